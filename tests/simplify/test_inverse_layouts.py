"""What is laid otherwise and back again is not moved for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N24 = AbstractMesh((2, 4), ("x", "y"))


def windows(x: Any) -> Any:
    b, h, w = x.shape
    return x.reshape(b, h // 5, 5, w // 6, 6).transpose(0, 1, 3, 2, 4).reshape(-1, 30)


def whole(cut: Any, shape: tuple[int, ...]) -> Any:
    b, h, w = shape
    return cut.reshape(b, h // 5, w // 6, 5, 6).transpose(0, 1, 3, 2, 4).reshape(shape)


def cut_and_whole(x: Any) -> Any:
    return jnp.tanh(whole(windows(x), x.shape))


def also_read(x: Any) -> Any:
    """What lies in between is there for who else reads it."""
    cut = windows(x)
    return jnp.tanh(whole(cut, x.shape)), cut.max(1).sum()


def flattened(x: Any) -> Any:
    return x.ravel()[None].squeeze(0).reshape(x.shape) * 2


def longer_by_ones(x: Any) -> Any:
    """A dim of one element moves nothing: it stays."""
    return x[None].squeeze(0) + 1


def turned_round(x: Any) -> Any:
    return x.transpose(1, 2, 0).transpose(1, 2, 0).transpose(1, 2, 0) + 1


def turned_otherwise(x: Any) -> Any:
    """Twice the same turn is another one."""
    return x.transpose(1, 2, 0).transpose(1, 2, 0)


def of_other_shape(x: Any) -> Any:
    return x.reshape(-1, 7).reshape(x.shape[0], -1)


def with_another_turn(x: Any) -> Any:
    """Elements come back elsewhere, in an array of the same shape."""
    return x.reshape(x.shape[0], -1).T.reshape(x.shape)


def of_another_type(x: Any) -> Any:
    return x.reshape(-1).astype(jnp.bfloat16).reshape(x.shape)


def in_a_loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: whole(windows(jnp.sin(x)), x.shape), x)


def back_with_ones(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1]).reshape(x.shape[0], -1, 1, x.shape[-1]).max(2)


def gradient_of_copies(x: Any) -> Any:
    """Copies are laid end to end, and are told apart with dims of one between."""
    return jax.grad(lambda x: (jnp.tile(x, (1, 3, 1)).reshape(2, 3, *x.shape[1:]) ** 2).sum())(x)


# A function, the equations that lay arrays otherwise in what is left of it, and whether it sends.
CASES: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "windows": (cut_and_whole, 0, False),
    "windows, also read": (also_read, 3, True),
    "windows, in a loop": (in_a_loop, 0, False),
    "flattened": (flattened, 0, False),
    "longer by ones": (longer_by_ones, 0, False),
    "back with ones": (back_with_ones, 1, False),
    "gradient of copies": (gradient_of_copies, 4, False),
    "turned round": (turned_round, 0, False),
    "turned otherwise": (turned_otherwise, 2, True),
    "of other shape": (of_other_shape, 2, True),
    "with another turn": (with_another_turn, 3, True),
    "of another type": (of_another_type, 2, True),
}
LAID = ("reshape", "transpose", "squeeze", "broadcast_in_dim")


@pytest.mark.parametrize("name", CASES)
def test_laid_back(name: str) -> None:
    function, laid, sends = CASES[name]
    x = np.random.default_rng(0).normal(size=(2, 40, 42)).astype(np.float32)
    given = P(None, ("x", "y"))
    out = jax.tree.map(lambda s: given if len(s.shape) == 3 else P(), jax.eval_shape(function, x))
    step = mw.jit(function, mesh=N24, in_shardings=given, out_shardings=out)
    program = step.partition(x)
    found = [e for e in program.plan.program.equations if e.primitive.name in LAID]
    assert len(found) == laid
    assert (program.wire_bytes > 0) == sends
    for ours, wanted in zip(
        jax.tree.leaves(program.simulate(x)), jax.tree.leaves(function(x)), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
