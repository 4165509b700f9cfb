"""The settings of a user's programs, which say nothing of what only moves their arrays."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import config as _config

from meshwise._jax.tracing import context_mesh, without_mesh

# Types that are others where x64 is off.
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


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
