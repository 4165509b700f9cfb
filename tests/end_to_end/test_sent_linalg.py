"""Linear algebra over a sharded batch sends nothing, nor do its gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

BATCH, SIZE, COLUMNS = 13, 4, 3  # over eight devices, two each


EIGHT = mesh_of(x=8)
GRID = mesh_of(x=2, y=4)


def definite(a: Any) -> Any:
    return a @ a.mT + SIZE * jnp.eye(SIZE)


def root(a: Any) -> Any:
    return jnp.linalg.cholesky(definite(a))


def lstsq(a: Any, b: Any) -> Any:
    return jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0])(a, b)


ONE: Mapping[str, Callable[[Any], Any]] = {
    "cholesky": root,
    "qr": jnp.linalg.qr,
    "svd": lambda a: jnp.linalg.svd(a, full_matrices=False),
    "svdvals": jnp.linalg.svdvals,
    "eigh": lambda a: jnp.linalg.eigh(definite(a)),
    "eigvalsh": lambda a: jnp.linalg.eigvalsh(definite(a)),
    "eigvals": jnp.linalg.eigvals,
    "inv": jnp.linalg.inv,
    "det": jnp.linalg.det,
    "slogdet": jnp.linalg.slogdet,
    "pinv": jnp.linalg.pinv,
    "matrix_power": lambda a: jnp.linalg.matrix_power(a, 3),
    "matrix_rank": jnp.linalg.matrix_rank,
    "norm": lambda a: jnp.linalg.norm(a, axis=(-2, -1)),
    "norm by singular values": lambda a: jnp.linalg.norm(a, 2, axis=(-2, -1)),
    "cond": jnp.linalg.cond,
    "lu": jax.vmap(jsl.lu),
    "lu_factor": jsl.lu_factor,
    "schur": jsl.schur,
    "hessenberg": jsl.hessenberg,
    "multi_dot": jax.vmap(lambda a: jnp.linalg.multi_dot([a, a, a])),
}
TWO: Mapping[str, Callable[[Any, Any], Any]] = {
    "solve": jnp.linalg.solve,
    "solve with a vector": lambda a, b: jnp.linalg.solve(a, b[..., :1]),
    "solve, definite": jax.vmap(lambda a, b: jsl.solve(definite(a), b, assume_a="pos")),
    "solve_triangular": jsl.solve_triangular,
    "cho_solve": lambda a, b: jsl.cho_solve((root(a), True), b),
    "lu_solve": lambda a, b: jsl.lu_solve(jsl.lu_factor(a), b),
    "lstsq": lstsq,
}
DIFFERENTIABLE = ["cholesky", "qr", "svdvals", "eigvalsh", "inv", "det", "slogdet", "pinv", "norm"]


def numbers() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    matrices = draw.normal(size=(BATCH, SIZE, SIZE)) + 3 * np.eye(SIZE)
    return matrices.astype(np.float32), draw.normal(size=(BATCH, SIZE, COLUMNS)).astype(np.float32)


def gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def total(*args: Any) -> Any:
        leaves = jax.tree.leaves(function(*args))
        return sum(jnp.sin(x).sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.grad(total, tuple(range(count)))


CASES: dict[str, tuple[Callable[..., Any], int]] = {name: (f, 1) for name, f in ONE.items()}
CASES |= {name: (f, 2) for name, f in TWO.items()}
CASES |= {f"gradient of {n}": (gradient(ONE[n], 1), 1) for n in DIFFERENTIABLE}
CASES |= {f"gradient of {n}": (gradient(f, 2), 2) for n, f in TWO.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_batch_sends_nothing(name: str):
    function, count = CASES[name]
    args = numbers()[:count]
    for mesh, spec in ((EIGHT, P("x")), (GRID, P(("y", "x")))):
        program = mw.jit(function, mesh=mesh, in_shardings=spec).partition(*args)
        assert not program.per_device.whole
        assert not program.collectives


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_one_device(name: str):
    function, count = CASES[name]
    args = numbers()[:count]
    program = mw.jit(function, mesh=EIGHT, in_shardings=P("x")).partition(*args)
    wanted = jax.jit(function)(*args)
    pairs = zip(jax.tree.leaves(program.simulate(*args)), jax.tree.leaves(wanted), strict=True)
    for found, wanted in pairs:
        scale = np.abs(np.asarray(wanted)).max()
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["solve", "solve_triangular", "cho_solve"])
def test_sharded_columns_send_nothing(name: str):
    a, b = numbers()[0][0], np.ones((SIZE, 32), np.float32)
    function = mw.jit(TWO[name], mesh=EIGHT, in_shardings=(P(), P(None, "x")))
    program = function.partition(a, b)
    assert not program.collectives
    np.testing.assert_allclose(program.simulate(a, b), TWO[name](a, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cholesky", "inv"])
def test_a_sharded_matrix_moves_to_the_batch(name: str):
    a = np.broadcast_to(numbers()[0][:1], (16, SIZE, SIZE))
    mesh = mesh_of(x=4)
    function = mw.jit(ONE[name], mesh=mesh, in_shardings=P(None, "x"), out_shardings=P(None, "x"))
    program = function.partition(a)
    moved = 3 * a.nbytes // 16
    kinds = [(c.kind.value, c.wire_bytes) for c in program.collectives]
    assert kinds == [("all_to_all", moved)] * 2
    np.testing.assert_allclose(program.simulate(a), ONE[name](a), rtol=1e-4, atol=1e-5)
