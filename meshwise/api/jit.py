"""`mw.jit` and `mw.shard`: what a user types.

`mw.jit(fn, mesh=..., in_shardings=..., ...)` is used as `jax.jit` with shardings is. A call looks
its arguments up by structure, types and placements, as jit does; the first call of a kind traces
the function, completes the hints, chooses, partitions and compiles.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import (
    Arguments,
    argument_paths,
    describe,
    leaf_key,
    name_of,
    take_apart,
)
from meshwise.api.as_jax import AsJax
from meshwise.api.autotune import scheduled
from meshwise.api.build import DRIVER_OF, Choices, Options, Resolved, build, donated_leaves, resolve
from meshwise.api.calibrate import figures_of
from meshwise.api.deleted import any_gone, refuse_gone, refuse_shared
from meshwise.api.meshes import check_is_mesh, lies_as
from meshwise.api.specs import Described, broadcast_specs, kind_of
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.transform import Runner, call_in_trace
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import ArgumentError, MeshwiseError, message


def shard(x: Any, spec: Any) -> Any:
    """Say how a value is sharded: a hint, from inside a function under `mw.jit`.

    `spec` is a `PartitionSpec` or `NamedSharding` for one array, or a tree of them (a prefix of
    the tree `x`). A dim of `PartitionSpec.UNCONSTRAINED` is left to completion. Outside `mw.jit`
    the hint is a sharding constraint where a mesh is set, and nothing on one device.

    >>> shard(jax.numpy.ones(3), jax.sharding.PartitionSpec("data")).shape
    (3,)
    """
    leaves, tree = jax.tree.flatten(x)
    specs = broadcast_specs("mw.shard", "spec", spec, Described(x, "x", f"x is {kind_of(x)}"))
    types = [_jax.array_type(leaf) for leaf in leaves]
    if None in types:
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
        raise ArgumentError(
            message(
                "mw.shard was given values that are no arrays",
                [
                    f"x{path} is {describe(leaf)}"
                    for leaf, path, kind in zip(leaves, paths, types, strict=True)
                    if kind is None
                ],
                "A hint is on an array, or on a tree of them.",
                "Give others None for a hint, or leave them out of the tree.",
            )
        )
    hinted = [
        leaf if s is None else _jax.hint_p.bind(jax.numpy.asarray(leaf), sharding=s)
        for leaf, s in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(tree, hinted)


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    completion: str = "improved",
    strict: bool = False,
    hardware: Hardware | str = GENERIC,
    hoist_bytes: int | None = None,
    schedule: Any = None,
) -> Any:
    """Make one SPMD program of a function for every device of a mesh; also a decorator.

    Args:
        fn: a function of arrays and trees of arrays, written for one device.
        mesh: `jax.sharding.Mesh` or `AbstractMesh`; by default that of the shardings, or of
            `jax.set_mesh`.
        in_shardings: a `PartitionSpec`, `NamedSharding` or None for each argument, or trees of them
            (prefixes of arguments' trees). None is completed from the others; an argument that
            comes committed to the mesh keeps its sharding.
        out_shardings: the same for results.
        static_argnums, static_argnames: arguments that are no arrays and select another program,
            as in `jax.jit`.
        donate_argnums, donate_argnames: arguments whose buffers the results may reuse.
        completion: "gspmd" keeps the shardings that completion finds, "improved" goes on from
            there to lower the cost at fixed hints.
        strict: make an operator without a rule an error instead of computing it whole.
        hardware: figures of the devices by which plans are priced; "measured" for those that
            `mw.calibrate` measured of the mesh's devices.
        hoist_bytes: the most a device may hold of what is gathered before a loop; the rest is
            gathered in each step. By default all is gathered before it.
        schedule: moves to make on the partitioned program (`mw.Schedule`): a function of a
            schedule, the text of one as `script()` prints it, or "auto" for the best that
            `mw.autotune` finds by its cost model. Arguments without a hint may then be kept in
            slices.

    Raises HintError, TreeError, MeshError, ArgumentError or MissingRuleError when called, for what
    does not fit.
    """
    given = {name: value for name, value in locals().items() if name != "fn"}
    if fn is None:
        return functools.partial(jit, **given)
    _check(mesh, completion)
    _jax.check_jit_arguments(fn, static_argnums, static_argnames, donate_argnums, donate_argnames)
    statics = _jax.static_arguments(fn, static_argnums, static_argnames)
    donated = _jax.static_arguments(fn, donate_argnums, donate_argnames)
    choices = Choices(completion, strict, hardware, hoist_bytes, schedule)
    options = Options(mesh, in_shardings, out_shardings, *statics, *donated, choices)
    return JitFunction(fn, options)


def _check(mesh: Any, completion: str) -> None:
    check_is_mesh(mesh)
    if completion not in DRIVER_OF:
        raise ArgumentError(
            message(
                "mw.jit was given a completion that is none",
                [f"completion={completion!r}"],
                f"It is one of {', '.join(map(repr, DRIVER_OF))}.",
                "Leave it out to have the completed shardings improved.",
            )
        )


class JitFunction:
    """A function under `mw.jit`; call it, or look at what it becomes with `partition`."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        """Nothing is traced yet."""
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.options = options
        self.name = name_of(fn)
        self._programs: dict[Any, SpmdProgram] = {}
        self._shared: dict[Any, SpmdProgram] = {}
        self._runners: dict[Any, Runner] = {}
        self._as_jax = AsJax(self.name, fn, options)
        self._refused: dict[Any, MeshwiseError] = {}
        self._dispatch = _jax.dispatcher(
            self.name, self._first_call, options.static_argnums, options.static_argnames
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices of the mesh.

        Calls with arguments like an earlier call's go through JAX's own dispatch, as `jax.jit`'s
        do; only others come back here.
        """
        if self._looks_first:
            leaves = jax.tree.leaves((args, kwargs))
            if any_gone(leaves) or (self._donates and len(set(map(id, leaves))) < len(leaves)):
                self._refuse_gone(args, kwargs)
        try:
            return self._dispatch(*args, **kwargs)
        except (RuntimeError, ValueError):
            self._refuse_gone(args, kwargs)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object when the function is a method."""
        return self if instance is None else BoundJitFunction(self, instance)

    def __repr__(self) -> str:
        """The function it is of."""
        return f"<mw.jit of {self.fn!r}>"

    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._program(take_apart(self.options, args, kwargs))

    @functools.cached_property
    def _looks_first(self) -> bool:
        """Whether the arguments are looked at before a call, not only when it fails."""
        return not _jax.SURVIVES_DONATED_ARGUMENTS and jax.device_count() > 1

    @functools.cached_property
    def _donates(self) -> bool:
        return bool(self.options.donate_argnums or self.options.donate_argnames)

    def _refuse_gone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An error where an argument's buffers are gone, or donated and given twice."""
        arguments = take_apart(self.options, args, kwargs)
        paths = argument_paths(arguments)
        refuse_gone(self.name, arguments.leaves, paths)
        donated = donated_leaves(self.options, arguments)
        refuse_shared(self.name, arguments.leaves, paths, donated)

    def _first_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Results of a call, and what JAX's dispatch needs to repeat it (None: come back)."""
        arguments = take_apart(self.options, args, kwargs)
        if _jax.is_tracing() or any(isinstance(x, _jax.Tracer) for x in arguments.leaves):
            try:
                outs = call_in_trace(self.name, self.fn, self.options, arguments, self._runners)
            except MeshwiseError as refusal:
                outs = self._as_jax.answer(refusal, args, kwargs)
            return outs, None
        key = self._key(arguments)
        try:
            if key in self._refused:
                raise self._refused[key]
            program = self._program(arguments)
        except MeshwiseError as refusal:
            outs = self._as_jax.answer(refusal, args, kwargs)
            self._refused[key] = refusal.with_traceback(None)
            return outs, None
        outs = program.executable(arguments.leaves)
        fast = program.executable.fast_path(arguments.leaves, program.out_tree, outs)
        return jax.tree.unflatten(program.out_tree, outs), fast

    def _key(self, arguments: Arguments) -> Any:
        """Equal for calls that one program serves."""
        return (
            arguments.tree,
            arguments.static,
            arguments.static_named,
            self.options.mesh or _jax.context_mesh(),
            _jax.settings_key(),
            tuple([leaf_key(leaf) for leaf in arguments.leaves]),
        )

    def _program(self, arguments: Arguments) -> SpmdProgram:
        key = self._key(arguments)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._program_of_hints(arguments)
        return program

    def _scheduled(self, program: SpmdProgram) -> SpmdProgram:
        """A program after the moves that were asked for."""
        choices = self.options.choices
        said = choices.hardware if choices.hardware is not GENERIC else None
        figures = None if said is None else figures_of(said, program.user_mesh)
        return scheduled(program, choices.schedule, figures)

    def _program_of_hints(self, arguments: Arguments) -> SpmdProgram:
        """The program for what a call says, shared by calls whose arguments come from elsewhere.

        The second step of a training loop gets the first one's results where that got arrays of
        the host: the hints are the same, and so is the program.
        """
        resolved = resolve(self.name, self.options, arguments, self._as_jax.mesh)
        static = arguments.tree, arguments.static, arguments.static_named
        call = static, _jax.settings_key()
        key = call, resolved.key
        program = self._shared.get(key)
        if program is None:
            program = self._scheduled_before(call, arguments, resolved)
        if program is None:
            program = build(self.name, self.fn, self.options, arguments, resolved)
            program = self._scheduled(program)
        self._shared[key] = program
        return program

    def _scheduled_before(
        self, call: Any, arguments: Arguments, resolved: Resolved
    ) -> SpmdProgram | None:
        """A program of an earlier call whose schedule left its arguments as these lie.

        The second step of a loop gets state in the slices that the first one's schedule made: they
        are no hint, and the moves are made already.
        """
        if self.options.choices.schedule is None:
            return None
        for (known_call, (mesh, types, _)), program in self._shared.items():
            if (known_call, mesh, types) == (call, *resolved.key[:2]):
                placements = program.placements[0][len(program.held) :]
                if all(map(lies_as, arguments.leaves, placements)):
                    return program
        return None


class BoundJitFunction(functools.partial):
    """A method under `mw.jit`, bound to its object."""

    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments."""
        function: Any = self.func
        return function.partition(*self.args, *args, **self.keywords, **kwargs)
