"""The settings of a user's programs: which are kept, and which say nothing of moves of arrays."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

from meshwise._jax.jaxprs import JaxprEqn, bodies_of, opened
from meshwise._jax.tracing import context_mesh, without_mesh

# Types that are others where x64 is off.
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


# What decides which operators a traced function is made of.
_OF_FUNCTIONS: tuple[Any, ...] = (
    _config.default_matmul_precision,
    _config.enable_x64,
    _config.numpy_dtype_promotion,
    _config.numpy_rank_promotion,
    _config.threefry_partitionable,
)


def settings_of_here() -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which functions are traced as here, wherever it is entered."""
    said = [(setting, setting.value) for setting in _OF_FUNCTIONS]

    @contextmanager
    def as_here() -> Iterator[None]:
        with ExitStack() as stack:
            for setting, value in said:
                if setting.value != value:
                    stack.enter_context(setting(value))
            yield

    return as_here


@contextmanager
def promoting() -> Iterator[None]:
    """In here ranks and types are promoted as ever: our own operators are written for that.

    What a user sets, so that mistakes are found, is for the user's function.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# Whether x64 is on here for the sake of a jaxpr's wide numbers alone.
_IS_TURNED_ON: ContextVar[bool] = ContextVar("x64 is turned on", default=False)


@contextmanager
def as_wide_as(jaxpr: Any) -> Iterator[None]:
    """In here numbers are as wide as those of a jaxpr: x64 is on if some of them have 64 bits.

    So they have in a function that turned it on for a part, and in what it kept for its gradient.
    """
    if x64_is_on() or not _has_wide(jaxpr):
        yield
        return
    before = _IS_TURNED_ON.set(True)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _IS_TURNED_ON.reset(before)


def as_wide_as_equation(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """In there x64 is off for an equation of another part, one without numbers of 64 bits.

    It was traced so, and what it calls, as a kernel of a user's, reads what is set.
    """
    return x64(False) if _IS_TURNED_ON.get() and not _is_wide(eqn) else nullcontext()


def x64_is_on() -> bool:
    """Whether numbers may have 64 bits here."""
    return bool(_config.enable_x64.value)


def x64(is_on: bool) -> AbstractContextManager[Any]:
    """In here numbers may have 64 bits, or may not."""
    return nullcontext() if is_on == x64_is_on() else jax.enable_x64(is_on)


@_weakref_lru_cache
def _has_wide(jaxpr: Any) -> bool:
    inner = opened(jaxpr)
    values = (*inner.constvars, *inner.invars)
    return _are_wide(v.aval for v in values) or any(map(_is_wide, inner.eqns))


def _is_wide(eqn: JaxprEqn) -> bool:
    types = (a.aval for a in (*eqn.invars, *eqn.outvars))
    return _are_wide(types) or any(map(_has_wide, bodies_of(eqn)))


def _are_wide(types: Iterable[Any]) -> bool:
    return any(getattr(t, "dtype", None) in _WIDE for t in types)


def looks_for_nans() -> bool:
    """Whether the results of programs are looked through for NaNs or infinities."""
    return _config.debug_nans.value or _config.debug_infs.value


@contextmanager
def moving() -> Iterator[None]:
    """In here arrays are moved as they are, whatever JAX is told of programs.

    Numbers keep their width, no mesh is in context, and none looks for NaNs, which were there
    before or are in padding.
    """
    with (
        promoting(),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.enable_x64(True),
        without_mesh(),
    ):
        yield


def mover(program: Callable[..., Any], dtypes: Sequence[Any]) -> Callable[..., Any]:
    """A program that only moves arrays, of some types, as one that settings do not change."""
    is_wide = any(d in _WIDE for d in dtypes)

    def move(*args: Any) -> Any:
        looks = looks_for_nans() or _config.disable_jit.value
        narrows = is_wide and not _config.enable_x64.value
        if not (looks or narrows or context_mesh() is not None):
            return program(*args)
        with moving():
            return program(*args)

    return move
