"""From a function and one call's arguments to its SPMD program, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import Arguments, argument_paths, argument_types, result_paths
from meshwise.api.spmd_program import SpmdProgram
from meshwise.choose.choose import DRIVERS, choose
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import (
    HintError,
    MeshError,
    MissingRuleError,
    TracerLeakError,
    TreeError,
    message,
)
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import Program
from meshwise.partition.partition import partition
from meshwise.propagate.constants import split_constants
from meshwise.propagate.propagate import propagate
from meshwise.rules import describe_all
from meshwise.rules.registry import OpRule
from meshwise.trace import make_program

DRIVER_OF = {"improved": DRIVERS[0], "gspmd": DRIVERS[1]}


@dataclass(frozen=True)
class Choices:
    """How a program is to be partitioned, whatever its function and hints."""

    completion: str = "improved"
    strict: bool = False
    hardware: Hardware = GENERIC


@dataclass(frozen=True)
class Options:
    """What was said to `mw.jit`, besides the function."""

    mesh: Any
    in_shardings: Any
    out_shardings: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    choices: Choices


def build(fn: Callable[..., Any], options: Options, arguments: Arguments) -> SpmdProgram:
    """Trace, complete, choose, partition: the program of a function for some arguments."""
    name = getattr(fn, "__name__", "fn")
    paths = argument_paths(arguments)
    types = argument_types(name, arguments, paths)
    in_specs = given_in_specs(name, options, arguments)
    mesh = find_mesh(name, options, in_specs, arguments.leaves)
    in_specs = _with_placements(name, in_specs, arguments.leaves, paths, mesh)
    closed, captured, out_tree = trace_call(name, fn, options, arguments, types, mesh)
    assert not captured, "a call inside a trace goes through call_in_trace"
    out_specs = given_out_specs(name, options, out_tree)
    per_device, plan = partition_jaxpr(
        closed, mesh, in_specs, out_specs, options.choices, name, paths, result_paths(out_tree)
    )
    donated = _donated(options, arguments)
    return SpmdProgram(per_device, plan, mesh, arguments.tree, out_tree, donated, name)


def partition_jaxpr(
    closed: Any,
    mesh: Any,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    choices: Choices,
    name: str,
    in_paths: Sequence[str],
    out_paths: Sequence[str],
) -> tuple[PerDeviceProgram, Plan]:
    """Complete, choose, partition: the per-device program of a jaxpr, and its plan."""
    refined = refine_mesh(mesh.axis_names, mesh.axis_sizes)
    program = make_program(closed, refined, in_specs, out_specs, in_paths, out_paths, name)
    rules = describe_all(program.equations)
    if choices.strict:
        _refuse_opaque(name, program, rules)
    program, rules = split_constants(program, rules)
    completion = propagate(program, rules)
    plan = choose(program, rules, completion, choices.hardware, DRIVER_OF[choices.completion])
    return partition(plan, choices.hardware), plan


def find_mesh(name: str, options: Options, in_specs: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """The mesh that was given, that of the context, or that which the shardings name."""
    mesh = options.mesh or _jax.context_mesh()
    mesh = mesh or _mesh_of(in_specs, options.out_shardings, leaves)
    if mesh is None:
        raise MeshError(
            f"{name} has no mesh. Give mw.jit a mesh=, NamedShardings, or call it inside "
            "jax.set_mesh(...)."
        )
    return mesh


def given_in_specs(name: str, options: Options, arguments: Arguments) -> list[Any]:
    """What in_shardings says of each leaf; None of keyword arguments."""
    args, kwargs = jax.tree.unflatten(arguments.tree, range(arguments.tree.num_leaves))
    count = len(jax.tree.leaves(kwargs))
    given = options.in_shardings
    if isinstance(given, list):
        given = tuple(given)
    specs = broadcast_specs(name, "in_shardings", args, given)
    return specs + [None] * count


def given_out_specs(name: str, options: Options, out_tree: Any) -> list[Any]:
    """What out_shardings says of each leaf of the result."""
    tree = jax.tree.unflatten(out_tree, list(range(out_tree.num_leaves)))
    return broadcast_specs(name, "out_shardings", tree, options.out_shardings)


def broadcast_specs(name: str, what: str, tree: Any, prefix: Any) -> list[Any]:
    """The entry of a prefix tree for every leaf of a tree; None where nothing is said."""
    try:
        specs = _jax.broadcast_prefix(prefix, tree)
    except ValueError as mismatch:
        offenders = _jax.prefix_errors(prefix, tree) or [str(mismatch)]
        raise TreeError(message(
            f"{what} of {name} do not match the tree they describe",
            offenders,
            "A tree of shardings has the structure of the arguments (a tuple, one entry an "
            "argument) or results, or is a prefix of it.",
            "Give one entry for each subtree; None leaves a subtree to completion.",
        )) from None
    return [None if _jax.is_unspecified(s) else s for s in specs]


def _mesh_of(in_specs: Sequence[Any], out_shardings: Any, leaves: Sequence[Any]) -> Any:
    """The mesh that shardings or committed arguments name, if any does."""
    given = [*in_specs, *jax.tree.leaves(out_shardings)]
    given += [getattr(leaf, "sharding", None) for leaf in leaves
              if getattr(leaf, "committed", True)]
    meshes = [s.mesh for s in given if isinstance(s, NamedSharding)]
    return next((m for m in meshes if not isinstance(m, AbstractMesh)), meshes[0] if meshes else None)


def _with_placements(
    name: str, specs: list[Any], leaves: Sequence[Any], paths: Sequence[str], mesh: Any
) -> list[Any]:
    """Specs with those of committed arguments filled in; an error where the two contradict."""
    ours = None if isinstance(mesh, AbstractMesh) else set(mesh.devices.flat)
    found, strangers, contradictions = [], [], []
    for spec, leaf, path in zip(specs, leaves, paths, strict=True):
        own = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
        if isinstance(leaf, jax.Array) and own is not None and ours not in (None, own.device_set):
            strangers.append(f"{path} {jax.typeof(leaf).str_short()} is on "
                             f"{_device_text(own.device_set)}")
        if not (isinstance(own, NamedSharding) and _same_axes(own.mesh, mesh)):
            found.append(spec)
            continue
        found.append(own.spec if spec is None else spec)
        wanted = spec if isinstance(spec, NamedSharding) else spec and NamedSharding(mesh, spec)
        if wanted is not None and isinstance(leaf, jax.Array) and _differs(own, wanted, leaf.ndim):
            contradictions.append(f"{path} lies as {own.spec}, in_shardings says {wanted.spec}")
    if strangers:
        raise MeshError(message(
            f"{name} was called with arguments on other devices than its mesh "
            f"({_device_text(ours or ())})",
            strangers,
            "A committed argument must lie on exactly the mesh's devices.",
            "Move it with jax.device_put(x, NamedSharding(mesh, spec)), or pass a numpy array.",
        ))
    if contradictions:
        raise HintError(message(
            f"{name} was called with arguments that lie otherwise than in_shardings says",
            contradictions,
            "A committed argument's sharding is a hint as well, and hints are never changed.",
            "Move the argument with jax.device_put, or leave its entry in in_shardings None.",
        ))
    return found


def _same_axes(theirs: Any, ours: Any) -> bool:
    same = (theirs.axis_names, theirs.axis_sizes) == (ours.axis_names, ours.axis_sizes)
    if not same or isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return same
    return bool((theirs.devices == ours.devices).all())


def _differs(own: NamedSharding, wanted: NamedSharding, rank: int) -> bool:
    if len(wanted.spec) > rank or PartitionSpec.UNCONSTRAINED in wanted.spec:
        return False
    return not own.is_equivalent_to(wanted, rank)


def _device_text(devices: Any) -> str:
    ids = sorted(d.id for d in devices)
    platform = next(iter(devices)).platform if devices else "no"
    return f"{len(ids)} {platform} devices {ids[:8]}{'...' if len(ids) > 8 else ''}"


def trace_call(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    arguments: Arguments,
    types: Sequence[Any],
    mesh: Any,
) -> tuple[Any, list[Any], Any]:
    """The function's jaxpr, the traced values it closes over, and the tree of its results."""
    dynamic, kwargs = jax.tree.unflatten(arguments.tree, types)
    by_position = dict(zip(arguments.positions, dynamic, strict=True)) | dict(arguments.static)
    args = [by_position[i] for i in range(len(by_position))]
    kwargs = {**kwargs, **dict(arguments.static_named)}
    axes = list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    try:
        return _jax.trace_function(
            fn, args, kwargs, options.static_argnums, options.static_argnames, axes
        )
    except jax.errors.UnexpectedTracerError as leak:
        raise TracerLeakError(message(
            f"{name} uses a traced value that was made outside this call",
            [str(leak).splitlines()[0]],
            "A value computed while a function is traced exists in that trace alone.",
            "Return it from the function that makes it and pass it on as an argument; "
            "jax.checking_leaks() shows where it was stored.",
        )) from leak


def _refuse_opaque(name: str, program: Program, rules: Sequence[OpRule]) -> None:
    whole = [
        f"{eqn.primitive.name} at {_jax.source_summary(eqn)}"
        for eqn, rule in zip(program.equations, rules, strict=True)
        if rule.opaque
    ]
    if whole:
        raise MissingRuleError(message(
            f"{name} (strict) has operators without a rule",
            list(dict.fromkeys(whole)),
            "Without a rule an operator is computed whole on every device.",
            "Leave out strict=True to accept that; program.explain() then lists them.",
        ))


def _donated(options: Options, arguments: Arguments) -> tuple[int, ...]:
    """Indices of the leaves that the user donates."""
    if not options.donate_argnums and not options.donate_argnames:
        return ()
    args, kwargs = jax.tree.unflatten(arguments.tree, range(arguments.tree.num_leaves))
    count = len(args) + len(arguments.static)
    nums = {n % count for n in options.donate_argnums if -count <= n < count}
    donated = [
        i for position, arg in zip(arguments.positions, args, strict=True)
        if position in nums for i in jax.tree.leaves(arg)
    ]
    donated += [i for k, arg in kwargs.items() if k in options.donate_argnames
                for i in jax.tree.leaves(arg)]
    return tuple(donated)
