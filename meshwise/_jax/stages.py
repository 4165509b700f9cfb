"""The stages of `jax.jit` (traced, lowered, compiled), their lowering handed to someone else.

A partitioned program is lowered as a flat function of its leaves. What JAX made of that is here
given the trees of the user's function, so that it is used, called and checked as any other of JAX's
stages.
"""

from collections.abc import Callable
from typing import Any

from jax._src import stages as _stages

Lower = Callable[[Any, Any], Any]


class Traced(_stages.Traced):
    """JAX's `Traced`, lowered by a function of the platforms and JAX's private parameters."""

    __slots__ = ("_lowered_by",)

    def lower(self, *, lowering_platforms: Any = None, _private_parameters: Any = None) -> Any:
        """Lower, as JAX's method of this name."""
        return self._lowered_by(lowering_platforms, _private_parameters)


def traced_with(traced: Any, lower: Lower) -> Traced:
    """The same traced function, lowered by `lower`."""
    ours = object.__new__(Traced)
    for name in _stages.Traced.__slots__:
        setattr(ours, name, getattr(traced, name))
    ours._lowered_by = lower
    return ours


def lower_flat(traced: Any, platforms: Any, parameters: Any) -> Any:
    """JAX's `Lowered` of one of JAX's own `Traced`, for platforms other than the devices' too."""
    return traced.lower(lowering_platforms=platforms, _private_parameters=parameters)


def is_for_export(parameters: Any) -> bool:
    """Whether a program is lowered to be saved, and called by JAX alone."""
    return parameters is not None and parameters.for_export


class _UnevenCompiled(_stages.Compiled):
    """A compiled program of padded arrays that is called with logical ones."""

    __slots__ = ("_program",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(*args, **kwargs)

    @property
    def in_avals(self) -> Any:
        return _stages.Stage.in_avals.fget(self)  # pyright: ignore[reportOptionalCall]


class _Lowered(_stages.Lowered):
    """A lowered program that says of its results what was said to `jit`, as JAX's does.

    What was completed is known of it already, but only the compiled program tells. One that has a
    `_program` is compiled for padded arrays, and called with logical ones by that. What `_compiled`
    makes is the program that calls run: where nothing is said to `compile`, it is compiled once for
    both.
    """

    __slots__ = ("_compiled", "_program", "_said")

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None or any(what is not None for what in (*args, *kwargs.values())):
            compiled = super().compile(*args, **kwargs)
        else:
            flat = self._compiled()
            said = [], self.args_info, self.out_tree, self._no_kwargs
            compiled = _stages.Compiled(flat._executable, *said)
        if self._program is None:
            return compiled
        ours = object.__new__(_UnevenCompiled)
        for name in (*_stages.Compiled.__slots__, "_call"):
            setattr(ours, name, getattr(compiled, name))
        ours._program = self._program
        return ours

    @property
    def in_avals(self) -> Any:
        return _stages.Stage.in_avals.fget(self)  # pyright: ignore[reportOptionalCall]

    @property
    def out_info(self) -> Any:
        return self._said


def with_trees(
    flat: Any,
    traced: Any,
    uneven: Callable[..., Any] | None = None,
    compiled: Callable[[], Any] | None = None,
) -> Any:
    """A `Lowered` of leaves as one of the arguments and results of a `Traced`.

    `uneven` calls the program where logical arrays are to be padded before, None elsewhere.
    `compiled` gives the `Compiled` of the same leaves that calls run, if they run the same.
    """
    lowered = _Lowered(flat._lowering, traced.args_info, traced.out_tree)
    lowered._compiled = compiled
    lowered._program, lowered._said = uneven, traced.out_info
    return lowered
