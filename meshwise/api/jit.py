"""`mw.jit`: what a user types.

`mw.jit(fn, mesh=..., in_shardings=..., ...)` is used as `jax.jit` with shardings is. A call looks
its arguments up by structure, types and placements, as jit does; the first call of a kind traces
the function, completes the hints, chooses, partitions and compiles. Where there is nothing to
partition the call is `jax.jit`'s (`as_jax.py`).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import Arguments, argument_paths, leaf_key, name_of, take_apart
from meshwise.api.as_jax import AsJax
from meshwise.api.autotune import scheduled
from meshwise.api.build import DRIVER_OF, Resolved, build, donated_leaves, planning, resolve
from meshwise.api.calibrate import figures_of
from meshwise.api.deleted import refuse_gone
from meshwise.api.meshes import check_is_mesh, lies_as
from meshwise.api.options import Choices, Options
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.transform import Runner, call_in_trace
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import ArgumentError, MeshwiseError, NoMeshError, forgotten, message

_NOTHING: Any = object()


def jit(
    fun: Callable[..., Any] = _NOTHING,
    /,
    *,
    mesh: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    completion: str = "improved",
    strict: bool = False,
    hardware: Hardware | str = GENERIC,
    hoist_bytes: int | None = None,
    schedule: Any = None,
) -> Any:
    """Make one SPMD program of a function for every device of a mesh; also a decorator.

    Args:
        fun: a function of arrays and trees of arrays, written for one device.
        mesh: `jax.sharding.Mesh` or `AbstractMesh`; by default that of the shardings, of
            `jax.set_mesh`, of the arguments, or of what the function itself names. Where there is
            none, a call is one of `jax.jit`.
        in_shardings: a `PartitionSpec`, `NamedSharding` or None for each argument, or trees of them
            (prefixes of arguments' trees). None is completed from the others; an argument that
            comes committed to the mesh keeps its sharding.
        out_shardings: the same for results.
        static_argnums, static_argnames: arguments that are no arrays and select another program,
            as in `jax.jit`.
        donate_argnums, donate_argnames: arguments whose buffers the results may reuse.
        keep_unused, device, backend, inline, compiler_options: as in `jax.jit`.
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

    Raises what `jax.jit` raises for its arguments; when called, HintError, TreeError, MeshError,
    ArgumentError or MissingRuleError for what does not fit, which are of JAX's classes too.
    """
    given = {name: value for name, value in locals().items() if name != "fun"}
    if fun is _NOTHING:
        return functools.partial(jit, **given)
    return JitFunction(fun, _read(fun, given))


def _read(fun: Callable[..., Any], given: dict[str, Any]) -> Options:
    """What was given to `mw.jit`, checked as far as no call is needed for it."""
    mesh = given.pop("mesh")
    check_is_mesh(mesh)
    own = ("completion", "strict", "hardware", "hoist_bytes", "schedule")
    choices = Choices(**{name: given.pop(name) for name in own})
    _check_completion(choices.completion)
    placed = ("in_shardings", "out_shardings") if mesh is not None else ()  # read when called
    jax.jit(fun, **{k: v for k, v in given.items() if k not in placed})  # raises, warns as it does
    for kind in ("static", "donate"):
        names = f"{kind}_argnums", f"{kind}_argnames"
        found = _jax.static_arguments(fun, *[given[name] for name in names])
        given.update(zip(names, found, strict=True))
    return Options(mesh=mesh, choices=choices, **given)


def _check_completion(completion: str) -> None:
    if completion not in DRIVER_OF:
        raise ArgumentError(
            message(
                "mw.jit was given a completion that is none",
                [f"completion={completion!r}"],
                f"It is one of {', '.join(map(repr, DRIVER_OF))}.",
                "Leave it out to have the completed shardings improved.",
            )
        )


@dataclass(frozen=True)
class _Kept:
    """What earlier calls made: programs by the call, by what it says, and for traces, by mesh."""

    programs: dict[Any, SpmdProgram | MeshwiseError] = field(default_factory=dict)
    shared: dict[Any, SpmdProgram] = field(default_factory=dict)
    runners: dict[Any, Runner] = field(default_factory=dict)


@_jax.kept_with_function
def _kept(_: Callable[..., Any], __: Any) -> _Kept:
    """One for each function and each way to partition it, until `jax.clear_caches`."""
    return _Kept()


class JitFunction:
    """A function under `mw.jit`; call it, or look at what it becomes with `partition`.

    It is a `jax.stages.Wrapped`: `trace`, `lower` and `eval_shape` are as those of `jax.jit`. Calls
    with arguments like an earlier call's go through JAX's own dispatch, as `jax.jit`'s do; only
    others come to Python. That is why `__call__` is kept in a slot: Python finds it there at once.
    """

    __slots__ = ("__call__", "__dict__", "__weakref__")

    __call__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], options: Options):
        """Nothing is traced yet."""
        self.__name__ = self.__qualname__ = name_of(fn)  # of what has no name of its own
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.options = options
        self.name = name_of(fn)
        self._as_jax = AsJax(self.name, fn, options)
        self._dispatch = _jax.dispatcher(
            self.name, fn, self._missed, options.static_argnums, options.static_argnames
        )
        self.__call__ = self._first

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """The first call: the devices are known now, and so is how to call from now on."""
        looks_first = not _jax.SURVIVES_DONATED_ARGUMENTS and jax.device_count() > 1
        donates = bool(self.options.donate_argnums or self.options.donate_argnames)
        self.__call__ = _jax.guarded(self._dispatch, self.fn, self._look, looks_first, donates)
        return self.__call__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object when the function is a method."""
        return self if instance is None else BoundJitFunction(self, instance)

    def __repr__(self) -> str:
        """The function it is of."""
        return f"<mw.jit of {self.fn!r}>"

    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        arguments = take_apart(self.options, args, kwargs)
        key = self._key(arguments)
        known = self._kept.programs.get(key)
        if isinstance(known, SpmdProgram):
            return known
        made = self._kept.programs[key] = self._program_of_hints(arguments)
        return made

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Traced` for some arguments; lowering it partitions."""
        call = args, kwargs
        arguments = take_apart(self.options, args, kwargs).abstract()
        if self._is_jaxs(arguments):
            return self._as_jax.trace(call)
        try:
            resolve(self.name, self.options, arguments, self._as_jax.mesh)
        except MeshwiseError as refusal:
            traced = self._as_jax.answer(refusal, lambda: self._as_jax.trace(call), False)
            if isinstance(refusal, NoMeshError):
                return traced
        else:
            traced = self._as_jax.trace_uneven(call)
        return _jax.traced_with(traced, functools.partial(self._lowered, arguments, traced))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the partitioned program for some arguments."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the results, as `jax.eval_shape`."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget all programs: the next call traces, plans and compiles anew."""
        self._dispatch._clear_cache()
        self._as_jax.clear_cache()
        _kept.evict_weakref(self.fn)

    def _cache_size(self) -> int:
        """How many kinds of calls JAX's dispatch runs by itself."""
        return self._dispatch._cache_size()

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An error where an argument's buffers are gone, or donated and given twice."""
        arguments = take_apart(self.options, args, kwargs)
        donated = donated_leaves(self.options, arguments)
        paths = functools.partial(argument_paths, arguments)
        refuse_gone(self.name, arguments.leaves, paths, donated)

    def _missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Results of a call, what JAX's dispatch needs to repeat it, whether to come back."""
        arguments = take_apart(self.options, args, kwargs)

        def as_jax() -> tuple[Any, Any, bool]:
            return self._as_jax.run((args, kwargs))

        if self.options.is_for_one_device or _jax.is_tracing_forbidden():
            return as_jax()
        if self._is_traced(arguments):
            runners = self._kept.runners
            try:
                outs = call_in_trace(self.name, self.fn, self.options, arguments, runners)
            except MeshwiseError as refusal:
                return self._as_jax.answer(refusal, as_jax)
            return outs, None, False
        key, programs = self._key(arguments), self._kept.programs
        found = programs.get(key) or self._found(arguments, is_compiled=True)
        if isinstance(found, MeshwiseError):
            answer = self._as_jax.answer(found, as_jax, is_first=key not in programs)
            programs[key] = forgotten(found)
            return answer
        programs[key] = found
        if self._as_jax.may_run and found.user_mesh.size == 1:
            return as_jax()
        try:
            outs = found.executable(arguments.leaves)
        except _jax.InternalNanError:  # JAX finds the operator that made it
            return as_jax()
        fast = found.executable.fast_path(arguments.leaves, found.out_tree, outs)
        return jax.tree.unflatten(found.out_tree, outs), fast, False

    def _lowered(self, arguments: Arguments, traced: Any, platforms: Any, parameters: Any) -> Any:
        """`jax.stages.Lowered` of a traced call."""

        def as_jax() -> Any:
            return _jax.lower_flat(traced, platforms, parameters)

        found = self._found(arguments, is_compiled=False)
        if isinstance(found, MeshwiseError):
            return self._as_jax.answer(found, as_jax)
        if self._as_jax.may_run and found.user_mesh.size == 1:
            return as_jax()
        flat = found.executable.lower_for(platforms, parameters)
        return _jax.with_trees(flat, traced, found if found.executable.is_uneven else None)

    def _is_traced(self, arguments: Arguments) -> bool:
        return _jax.is_tracing() or any(isinstance(x, _jax.Tracer) for x in arguments.leaves)

    def _is_jaxs(self, arguments: Arguments) -> bool:
        """Whether a call ahead of time is JAX's: for a chosen device, or of traced arguments."""
        return self.options.is_for_one_device or self._is_traced(arguments)

    @property
    def _kept(self) -> _Kept:
        return _kept(self.fn, self.options.key)

    def _key(self, arguments: Arguments) -> Any:
        """Equal for calls that one program serves."""
        return (
            arguments.tree,
            arguments.static,
            arguments.static_named,
            self.options.mesh or _jax.context_mesh() or _jax.block_mesh(),
            _jax.settings_key(),
            tuple([leaf_key(leaf) for leaf in arguments.leaves]),
        )

    def _found(self, arguments: Arguments, is_compiled: bool) -> SpmdProgram | MeshwiseError:
        """The program for some arguments, or why there is none."""
        try:
            program = self._program_of_hints(arguments)
            if is_compiled:
                with planning(self.name):
                    program.executable.compile()
            return program
        except MeshwiseError as refusal:
            return refusal

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
        program = self._kept.shared.get(key)
        if program is None:
            program = self._scheduled_before(call, arguments, resolved)
        if program is None:
            program = build(self.name, self.fn, self.options, arguments, resolved)
            program = self._scheduled(program)
        self._kept.shared[key] = program
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
        for (known_call, (mesh, types, _)), program in self._kept.shared.items():
            if (known_call, mesh, types) == (call, *resolved.key[:2]):
                placements = program.placements[0][len(program.held) :]
                if all(map(lies_as, arguments.leaves, placements)):
                    return program
        return None


class BoundJitFunction(functools.partial):
    """A method under `mw.jit`, bound to its object."""

    @property
    def __self__(self) -> Any:
        """The object."""
        return self.args[0]

    @property
    def __func__(self) -> Any:
        """The function that is not bound."""
        return self.func

    def __getattr__(self, name: str) -> Any:
        """Everything else is the function's, as with a method of Python."""
        return getattr(self.func, name)

    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments."""
        function: Any = self.func
        return function.partition(*self.args, *args, **self.keywords, **kwargs)
