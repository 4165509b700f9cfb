"""From a function and one call's arguments to its SPMD program, step by step."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import (
    Arguments,
    argument_paths,
    argument_types,
    refuse_others,
    refuse_symbolic,
    result_paths,
)
from meshwise.api.calibrate import figures_of, measured_so_far
from meshwise.api.deleted import refuse_gone
from meshwise.api.meshes import (
    check_effects,
    check_hint_devices,
    check_regions,
    check_saved,
    fill_placements,
    lies_on,
    mesh_said,
    platform_of,
    refuse_no_mesh,
    refuse_other_memories,
    spec_key,
    with_placements,
)
from meshwise.api.options import Choices, Options
from meshwise.api.other_meshes import OtherMeshes
from meshwise.api.specs import given_in_specs, given_out_specs, refuse_keywords
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.traced import leaked_tracers, trace_call
from meshwise.api.typed import Placements, pinned, placements, specs_of_types
from meshwise.choose.choose import DRIVERS
from meshwise.choose.plan import Plan
from meshwise.errors import (
    MeshwiseError,
    MissingRuleError,
    UnplannedError,
    also,
    message,
)
from meshwise.flatten import Enters, flatten, with_counted_regions
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import Hint, Program
from meshwise.partition.coarsen import coarsen
from meshwise.partition.partition import partition
from meshwise.partition.ways import plan_of
from meshwise.propagate.complete import Completed, complete
from meshwise.rules import describe_all
from meshwise.rules.control_flow import has_independent_steps
from meshwise.rules.registry import REGISTRY, OpRule, settings_key
from meshwise.run.garbage import garbage_later
from meshwise.run.placement import value_off_mesh
from meshwise.trace import make_program, misfits_inside

DRIVER_OF = {"improved": DRIVERS[0], "gspmd": DRIVERS[1]}

_FORESEEN = (
    jax.errors.JAXTypeError,
    jax.errors.JaxRuntimeError,
    jax.errors.UnexpectedTracerError,
)


@dataclass(frozen=True)
class Resolved:
    """What a call says, read once: paths, types and hints of its leaves, and the mesh."""

    paths: list[str]
    types: list[jax.ShapeDtypeStruct]
    in_specs: list[Any]
    mesh: Any

    @property
    def key(self) -> Any:
        """Equal for calls that one program serves, wherever their arguments come from."""
        types = tuple([(t.shape, t.dtype, t.weak_type, t.sharding) for t in self.types])
        return self.mesh, types, tuple([spec_key(s) for s in self.in_specs])


def circumstances(choices: Choices) -> Any:
    """What a program depends on that no call says: JAX's settings, rules, what was measured."""
    return settings_key(), measured_so_far(choices.hardware)


def resolve(
    name: str, options: Options, arguments: Arguments, own_mesh: Callable[[Arguments], Any]
) -> Resolved:
    """Read a call's arguments: what they are, and how they are to lie.

    `own_mesh` finds the mesh that the function names itself, where nothing else does.
    """
    paths = argument_paths(arguments)
    types = argument_types(name, arguments, paths)
    in_specs = in_specs_of(name, options, arguments)
    said = options.mesh, in_specs, options.out_shardings, arguments.leaves
    mesh = mesh_said(*said) or own_mesh(arguments) or refuse_no_mesh(name)
    refuse_others(name, arguments, paths, types)
    refuse_other_memories(name, in_specs, arguments.leaves, paths, mesh)
    in_specs = with_placements(
        name, in_specs, arguments.leaves, paths, mesh, options.mesh is not None
    )
    return Resolved(paths, types, in_specs, mesh)


@dataclass(frozen=True)
class TracedCall:
    """A call's function as a plain jaxpr, with what is said of all it takes and returns.

    `held` are the arrays on the mesh that it closes over, its first inputs.
    """

    closed: Any
    out_avals: Sequence[Any]
    out_tree: Any
    held: list[Any]
    in_specs: list[Any]
    in_paths: list[str]
    out_specs: list[Any]
    out_paths: list[str]


def traced(
    name: str, fn: Callable[..., Any], options: Options, arguments: Arguments, resolved: Resolved
) -> TracedCall:
    """Trace a function for some arguments, and spread what is said of it over its leaves."""
    mesh, in_specs = resolved.mesh, resolved.in_specs
    typed, captured, out_tree = trace_call(name, fn, options, arguments, in_specs, mesh)
    if captured:
        raise leaked_tracers(name, captured)
    refuse_gone(name, typed.consts, lambda: _closed_over(typed.consts))
    closed, held = _hold_arrays(_jax.plain_jaxpr(typed), mesh)
    return TracedCall(
        closed=closed,
        out_avals=typed.out_avals,
        out_tree=out_tree,
        held=held,
        in_specs=[*fill_placements([None] * len(held), held, mesh), *in_specs],
        in_paths=[*_closed_over(held), *resolved.paths],
        out_specs=given_out_specs(name, options.out_shardings, out_tree),
        out_paths=result_paths(out_tree),
    )


def build(
    name: str, fn: Callable[..., Any], options: Options, arguments: Arguments, resolved: Resolved
) -> SpmdProgram:
    """Trace, complete, choose, partition: the program of a function for some arguments."""
    call, mesh = traced(name, fn, options, arguments, resolved), resolved.mesh
    per_device, plan, places = partition_call(name, options, call, mesh)
    return SpmdProgram(
        per_device=per_device,
        user_mesh=mesh,
        in_tree=arguments.tree,
        out_tree=call.out_tree,
        placements=places,
        in_paths=plan.program.in_paths,
        out_paths=plan.program.out_paths,
        plan=plan,
        hints=(_given(plan.program.in_hints), _given(plan.program.out_hints)),
        held=tuple(call.held),
        donated=donated_inputs(options, arguments, call),
        name=name,
        compiling=options.compiling,
    )


def partition_call(
    name: str, options: Options, call: TracedCall, mesh: Any
) -> tuple[PerDeviceProgram, Plan, Placements]:
    """Partition a traced call by what is said of it."""
    return partition_typed(
        call.closed,
        call.out_avals,
        mesh,
        call.in_specs,
        call.out_specs,
        options.choices,
        name,
        call.in_paths,
        call.out_paths,
        are_plain=options.mesh is None,
    )


def donated_inputs(options: Options, arguments: Arguments, call: TracedCall) -> tuple[int, ...]:
    """Indices of a program's inputs that the user donates."""
    return tuple([len(call.held) + i for i in donated_leaves(options, arguments)])


def _given(hints: Sequence[Hint | None]) -> tuple[str | None, ...]:
    return tuple([None if hint is None else hint.given_as for hint in hints])


def _hold_arrays(closed: Any, mesh: Any) -> tuple[Any, list[Any]]:
    """Constants that lie on the mesh as leading inputs, and these; others lie on no mesh then."""
    if _jax.has_constants_in_calls(closed):
        closed = flatten(closed)
    closed, held = _jax.hoisted(closed, [lies_on(c, mesh) for c in closed.consts])
    return _jax.ClosedJaxpr(closed.jaxpr, [value_off_mesh(c) for c in closed.consts]), held


def partition_typed(
    closed: Any,
    out_avals: Sequence[Any],
    mesh: Any,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    choices: Choices,
    name: str,
    *paths: Sequence[str],
    are_plain: bool = False,
) -> tuple[PerDeviceProgram, Plan, Placements]:
    """Partition a plain jaxpr so that its results lie as their types say, and where all lie.

    With `are_plain` results come out as those of `jax.jit`: over whole axes, and even where nobody
    asked for anything uneven. Raises UnplannedError for what nobody foresaw.
    """
    wanted = specs_of_types(out_avals, out_specs)
    others = OtherMeshes(mesh, refine_mesh(mesh.axis_names, mesh.axis_sizes))
    with planning(name), garbage_later(), _jax.as_wide_as(closed):
        plan = plan_jaxpr(closed, others, in_specs, wanted, choices, name, *paths)
        if (pins := pinned(plan, out_avals, wanted, others.meshes, are_plain)) is not None:
            wanted = pins
            plan = plan_jaxpr(closed, others, in_specs, wanted, choices, name, *paths)
        per_device = partition(plan, choices.hoist_bytes)
    return per_device, plan, placements(plan, others.meshes, in_specs, wanted, out_avals)


def _closed_over(arrays: Sequence[Any]) -> list[str]:
    """How errors call the arrays that a function closes over."""
    return [f"closed-over array {i}" for i in range(len(arrays))]


@contextmanager
def planning(name: str) -> Iterator[None]:
    """What nobody foresaw is an UnplannedError; what is traced is ours, its tracers no leaks.

    Nor is any mesh in context: a program is for its own.
    """
    try:
        with _jax.without_leak_checks(), _jax.promoting(), _jax.without_mesh():
            yield
    except (MeshwiseError, *_FORESEEN):
        raise
    except Exception as unforeseen:
        if _jax.is_of_no_lowering(unforeseen):  # nor has jax.jit a program of it
            raise
        refusal = UnplannedError(
            message(
                f"{name} could not be planned",
                [f"{type(unforeseen).__name__}: {unforeseen}"],
                "This is no mistake of yours.",
                "Please report it, with the function; jax.jit may run it meanwhile.",
            )
        )
        raise also(refusal, type(unforeseen)) from unforeseen


def plan_jaxpr(
    closed: Any,
    others: OtherMeshes,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    choices: Choices,
    name: str,
    in_paths: Sequence[str],
    out_paths: Sequence[str],
) -> Plan:
    """Complete and choose: the plan of a jaxpr. `others` learns of the meshes that it names."""
    mesh, refined = others.ours, others.refined
    refuse_symbolic(name, in_paths, closed.in_avals)
    wrong = misfits_inside(closed, refined)
    closed = _jax.without_references(closed)
    closed = _jax.without_dead(_jax.on_platform(closed, platform_of(mesh)))
    closed = with_counted_regions(_jax.spelled_out(closed, REGISTRY.rules))
    check_effects(name, mesh, closed)
    check_saved(name, closed)
    closed = _jax.without_saved_placements(closed)
    closed = _jax.inspected(_jax.as_regions(closed, others.axes_of, mesh.size), mesh)
    in_specs = [_jax.spell(s, others.axes_of) for s in in_specs]
    out_specs = [_jax.spell(s, others.axes_of) for s in out_specs]

    def read(enters: Enters) -> Program:
        what = closed, refined, in_specs, out_specs, in_paths, out_paths, name
        program = make_program(*what, enters, wrong)
        check_hint_devices(name, mesh, program, in_specs, out_specs)
        check_regions(name, mesh, program)
        return program

    driver = DRIVER_OF[choices.completion]
    hardware = figures_of(choices.hardware, mesh)
    plans = [plan_of(each, hardware, driver) for each in completions(read, choices)]
    # Nor may a loop that is shared out give a device more work than it has of each step's parts.
    most = plans[0].work_seconds * (1 + 1e-9)
    plan = min((p for p in plans if p.work_seconds <= most), key=lambda plan: plan.seconds)
    # Other meshes are spelled in sub-axes.
    return plan if others.found else coarsen(plan)


def completions(read: Callable[[Enters], Program], choices: Choices) -> list[Completed]:
    """A program as it can be completed: with all bodies, and with loops that can be shared out."""
    completed = [_complete(read(_jax.has_bodies), choices)]
    shared: set[int] = set()
    while found := loops_to_share(completed[-1]) - shared:
        shared |= found
        completed[1:] = [_complete(read(partial(_enters, shared)), choices)]
    return completed


def _enters(shared: Set[int], eqn: _jax.JaxprEqn) -> bool:
    return _jax.has_bodies(eqn) and id(eqn) not in shared


def _complete(program: Program, choices: Choices) -> Completed:
    """A program completed; in strict mode, if every equation has a rule."""
    rules = describe_all(program.equations)
    if choices.strict:
        _refuse_opaque(program.name, program, rules)
    return complete(program, rules)


def loops_to_share(completed: Completed) -> set[int]:
    """Loops whose steps may be shared out over the devices, as one equation each.

    That is another plan, to be compared: each device takes steps of its own and all of each, where
    steps do not depend on each other, and lie in shards.
    """
    sharded: dict[int, _jax.JaxprEqn] = {}
    program, _, completion = completed
    for eqn in program.equations:
        if eqn.primitive is not _jax.step_p and eqn.primitive is not _jax.stack_p:
            continue
        stack = eqn.invars[0] if eqn.primitive is _jax.step_p else eqn.outvars[0]
        original = eqn.params["control"].original
        if not isinstance(stack, _jax.Literal) and completion.dims[stack][0]:
            sharded[id(original)] = original
    return {key for key, original in sharded.items() if has_independent_steps(original)}


def in_specs_of(name: str, options: Options, arguments: Arguments) -> list[Any]:
    """What in_shardings says of each leaf; None where nothing is said."""
    if options.mesh is None and not _jax.is_unspecified(options.in_shardings):
        statics = [key for key, _ in arguments.static_named]
        refuse_keywords(name, [*arguments.names, *statics])
    positions, statics = arguments.positions, len(arguments.static)
    return given_in_specs(name, options.in_shardings, arguments.tree, positions, statics)


def _refuse_opaque(name: str, program: Program, rules: Sequence[OpRule]) -> None:
    whole = [
        f"{_jax.operator_name(eqn)} at {_jax.source_summary(eqn)}"
        for eqn, rule in zip(program.equations, rules, strict=True)
        if rule.opaque
    ]
    if whole:
        raise MissingRuleError(
            message(
                f"{name} (strict) has operators without a rule",
                list(dict.fromkeys(whole)),
                "Without a rule an operator is computed whole on every device.",
                "Say how they are partitioned, with mw.register_rule or, for kernels, mw.like "
                "(docs/extending.md). Or leave out strict=True; program.explain() then lists them.",
            )
        )


def donated_leaves(options: Options, arguments: Arguments) -> tuple[int, ...]:
    """Indices of the leaves that the user donates."""
    if not options.donate_argnums and not options.donate_argnames:
        return ()
    if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
        return ()  # as in JAX, which may have to call the function again
    args, kwargs = arguments.tree.children()
    count = len(arguments.positions) + len(arguments.static)
    nums = {n % count for n in options.donate_argnums if -count <= n < count}
    chosen = [p in nums for p in arguments.positions]
    chosen += [name in options.donate_argnames for name in arguments.names]
    parts = zip(chosen, (*args.children(), *kwargs.children()), strict=True)
    leaves = [is_chosen for is_chosen, part in parts for _ in range(part.num_leaves)]
    return tuple([i for i, is_chosen in enumerate(leaves) if is_chosen])
