"""`mw.jit`: what a user types.

`mw.jit(fn, mesh=..., in_shardings=..., ...)` is used as `jax.jit` with shardings is. A call looks
its arguments up by structure, types and placements, as jit does; the first call of a kind traces
the function, completes the hints, chooses, partitions and compiles. Where there is nothing to
partition the call is `jax.jit`'s (`as_jax.py`).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import name_of
from meshwise.api.build import DRIVER_OF
from meshwise.api.calibrate import check_figures
from meshwise.api.calls import Calls
from meshwise.api.deleted import base_of
from meshwise.api.dispatch import Dispatch
from meshwise.api.options import Choices, Options, check_is_mesh
from meshwise.api.spmd_program import SpmdProgram
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import ArgumentError, message
from meshwise.ir.numbers import number_of_bytes


class _NotGiven:
    """What stands for a function that comes later, to a decorator."""

    def __repr__(self) -> str:
        return "<not given>"


_NOTHING: Any = _NotGiven()


@_jax.hides_frames
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
    NoMeshError, ArgumentError, DeletedArrayError, TracerLeakError, UnplannedError or, with
    `strict`, MissingRuleError for what does not fit; most are of JAX's classes too.
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
    _check_hoist_bytes(choices.hoist_bytes)
    _check_strict(choices.strict)
    check_figures(choices.hardware)
    placed = ("in_shardings", "out_shardings") if mesh is not None else ()  # read when called
    jax.jit(fun, **{k: v for k, v in given.items() if k not in placed})  # raises, warns as it does
    for kind in ("static", "donate"):
        names = f"{kind}_argnums", f"{kind}_argnames"
        found = _jax.static_arguments(fun, *[given[name] for name in names])
        given.update(zip(names, found, strict=True))
    return Options(mesh=mesh, choices=choices, **given)


def _check_hoist_bytes(most: Any) -> None:
    number = number_of_bytes(most)
    if most is not None and (number is None or number < 0):
        raise ArgumentError(
            message(
                "mw.jit was given a limit that is no number of bytes",
                [f"hoist_bytes={most!r}"],
                "It is a whole number, 0 or more: what a device may hold of what loops read.",
                "Leave it out to have everything gathered before a loop; 0 gathers in each step.",
            )
        )


def _check_strict(strict: Any) -> None:
    if not isinstance(strict, bool):
        raise ArgumentError(
            message(
                "mw.jit was given what is neither strict nor not",
                [f"strict={strict!r:.60}"],
                "It is True or False: whether operators without a rule are refused.",
                "Leave it out to have them computed whole.",
            )
        )


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


class JitFunction:
    """A function under `mw.jit`; call it, or look at what it becomes with `partition`.

    It is a `jax.stages.Wrapped`: `trace`, `lower` and `eval_shape` are as those of `jax.jit`. Calls
    with arguments like an earlier call's go through JAX's own dispatch, as `jax.jit`'s do; only
    others come to Python. `__call__` is kept in a slot, where Python finds it at once.
    """

    __slots__ = ("__call__", "__dict__", "__weakref__")

    __call__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], options: Options):
        """Nothing is traced yet."""
        self.__name__ = self.__qualname__ = name_of(fn)  # of what has no name of its own
        functools.update_wrapper(self, fn, updated=())
        own = dir(type(self))  # a function's attributes hide nothing of this class
        self.__dict__.update({k: v for k, v in getattr(fn, "__dict__", {}).items() if k not in own})
        self.fn = fn
        self.options = options
        self.name = name_of(fn)
        self.calls = calls = Calls(self.name, fn, options)
        self._misses = misses = Dispatch(calls)
        self._dispatch = dispatch = _jax.dispatcher(
            self.name,
            calls.step_by_step,
            misses.missed,
            options.static_argnums,
            options.static_argnames,
        )
        donates = bool(options.donate_argnums or options.donate_argnames)
        self.__call__ = dispatch
        if donates:
            self.__call__ = _jax.guarded(dispatch, calls.look, base_of, calls.held)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object when the function is a method."""
        return self if instance is None else BoundJitFunction(self, instance)

    def __repr__(self) -> str:
        """The function it is of, if that can be shown."""
        try:
            return f"<mw.jit of {self.fn!r}>"
        except Exception:
            return "<mw.jit>"

    @_jax.hides_frames
    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self.calls.partition(args, kwargs)

    @_jax.hides_frames
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Traced` for some arguments; lowering it partitions."""
        return self.calls.trace(args, kwargs)

    @_jax.hides_frames
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the partitioned program for some arguments."""
        return self.trace(*args, **kwargs).lower()

    @_jax.hides_frames
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the results, as `jax.eval_shape`."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget all programs: the next call traces, plans and compiles anew."""
        self._dispatch._clear_cache()
        self._misses.clear_cache()
        self.calls.clear()

    def _cache_size(self) -> int:
        """How many kinds of calls JAX's dispatch runs by itself."""
        return self._dispatch._cache_size() + self._misses.cache_size()


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
