"""Values that are computed and not used: nothing comes of their derivatives either."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def without_gradient_unless(used: Any, tree: Any) -> Any:
    """A tree of arrays as they are, whose gradients are none where they are not `used`.

    `used` is true or false for each of their leading rows. What comes back of a value that nobody
    uses is zero, and zero times an infinite derivative would be no number.
    """

    def held(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        rows = jnp.reshape(used, jnp.shape(used) + (1,) * (x.ndim - jnp.ndim(used)))
        return _held(x, jnp.broadcast_to(rows, x.shape))

    return jax.tree.map(held, tree)


@jax.custom_jvp
def _held(x: Any, used: Any) -> Any:
    del used
    return x


@_held.defjvp
def _held_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, used = primals
    return x, lax.select(used, tangents[0], jnp.zeros_like(tangents[0]))
