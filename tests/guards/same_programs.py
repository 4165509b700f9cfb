"""The programs of `test_same_programs`, planned while variables and texts hash in another order.

`python -m tests.guards.same_programs SALT` prints a line `NAME: digest` for each program.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.core import Var
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

ROWS, BATCHES = (128, 16), (4, 128, 16)


def sums_of_a_barrier(x: Any, y: Any) -> Any:
    sums = lax.optimization_barrier(tuple(x.T @ (y * (k + 1)) for k in range(6)))
    return tuple(jnp.tanh(c * (k + 2.0)) for k, c in enumerate(sums))


def sums_of_a_loop(xs: Any, y: Any) -> Any:
    def step(sums: Any, x: Any) -> Any:
        return tuple(c + x[:, :4].T @ (y[:, :4] * (k + 1)) for k, c in enumerate(sums)), None

    sums, _ = lax.scan(step, tuple(jnp.zeros((4, 4)) for _ in range(6)), xs)
    return tuple(jnp.tanh(c * (k + 2.0)) + c.T for k, c in enumerate(sums))


def layers(x: Any, y: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = x
        for weight in weights:
            hidden = jax.nn.relu(hidden @ weight) + hidden
        return jnp.mean((hidden - y) ** 2)

    return jax.value_and_grad(loss)([jnp.eye(16) * (k + 1) for k in range(4)])


def in_order(x: Any, y: Any) -> Any:
    best, places = lax.top_k(x.T, 3)
    return jnp.sort(x, 0), jnp.argmax(y, 0), best, places, jnp.cumsum(x * y, 0)


def shifted(x: Any, y: Any) -> Any:
    for _ in range(3):
        x = x.at[1:-1].set((x[:-2] + x[2:]) / 2 + y[1:-1])
    return x, jnp.roll(y, 1, 0)


PROGRAMS: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "sums of a barrier": (sums_of_a_barrier, (ROWS, ROWS), (P("x"), P("x"))),
    "sums of a loop": (sums_of_a_loop, (BATCHES, ROWS), (P(None, "x"), P("x"))),
    "layers": (layers, (ROWS, ROWS), (P("x", "y"), P("x"))),
    "in order": (in_order, (ROWS, ROWS), (P("x"), P("y"))),
    "shifted": (shifted, (ROWS, ROWS), (P(("x", "y")), P("x"))),
}


def main(salt: int) -> None:
    setattr(Var, "__hash__", lambda var: hash((id(var), salt)))  # noqa: B010
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for name, (function, shapes, specs) in PROGRAMS.items():
        types = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        program = mw.jit(function, mesh=mesh, in_shardings=specs).partition(*types)
        text = str(program.per_device.jaxpr)
        print(f"{name}: {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
