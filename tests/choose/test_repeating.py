"""Work that takes hardly any time is done on every device, where figures are those of a machine."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU, GENERIC

N8 = AbstractMesh((8,), ("d",))


def derivative(u):
    k = jnp.fft.fftfreq(u.shape[0])[:, None]
    return jnp.fft.ifft2(1j * k * jnp.fft.fft2(u)).real


def power(a, x):
    def step(_, x):
        y = a @ x
        return y / jnp.linalg.norm(y)

    return lax.fori_loop(0, 10, step, x)


def solved(a, b):
    """Conjugate gradients: each step multiplies what is sharded, and needs sums of all of it."""

    def step(_, state):
        x, r, d, rr = state
        ad = a @ d
        alpha = rr / (d @ ad)
        x, r = x + alpha * d, r - alpha * ad
        new = r @ r
        return x, r, r + new / rr * d, new

    return lax.fori_loop(0, 10, step, (jnp.zeros_like(b), b, b, b @ b))[0]


def kinds(function, shapes, specs, out, hardware):
    step = mw.jit(function, mesh=N8, in_shardings=specs, out_shardings=out, hardware=hardware)
    program = step.partition(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    return [(str(c.kind), c.count) for c in program.collectives]


EXCHANGED = [("all_to_all", 1)] * 2
# What the collectives are with the figures of CPU devices, and with generic ones.
TRANSFORMS = {
    "small": ((64, 64), CPU, [("all_gather", 1)]),
    "small, uneven": ((60, 54), CPU, [("all_gather", 1)]),
    "small, fewest bytes": ((64, 64), GENERIC, EXCHANGED),
    "large": ((1024, 1024), CPU, EXCHANGED),
    "small, where launches are soon": ((64, 64), replace(CPU, launch_s=5e-6), EXCHANGED),
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_transforms(case):
    shape, hardware, wanted = TRANSFORMS[case]
    assert kinds(derivative, [shape], P("d"), P("d"), hardware) == wanted


def in_turns(x):
    """Rows and columns in order, in turns."""
    for _ in range(2):
        x = jnp.sort(jnp.sort(x, 1), 0)
    return x


# Comparisons are counted for what they take: sorting all of a matrix is more than two exchanges,
# sorting all of a vector less than those of a sort in shards.
SORTS = {
    "rows and columns": (in_turns, (64, 64), CPU, [("all_to_all", 1)] * 4),
    "where comparisons are as fast as the rest": (
        in_turns,
        (64, 64),
        replace(CPU, serial_flops_per_s=None),
        [("all_gather", 1)],
    ),
    "a vector": (jnp.sort, (2048,), CPU, [("all_gather", 1)]),
}


@pytest.mark.parametrize("case", SORTS)
def test_sorts(case):
    function, shape, hardware, wanted = SORTS[case]
    assert kinds(function, [shape], P("d"), P("d"), hardware) == wanted


def test_products_of_a_loop():
    """A matrix that is small enough is gathered once; nothing is sent in a step."""
    specs = (P("d"), P())
    assert kinds(power, [(64, 64), (64,)], specs, P(), CPU) == [("all_gather", 1)]
    for size, hardware in ((64, GENERIC), (1024, CPU)):
        found = kinds(power, [(size, size), (size,)], specs, P(), hardware)
        assert sum(count for _, count in found) >= 10


def test_what_many_nodes_read_is_gathered_once_for_all():
    """No node alone is better done by every device: the others would send what it makes."""
    specs = (P("d"), P("d"))
    assert kinds(solved, [(96, 96), (96,)], specs, P("d"), CPU) == [("all_gather", 1)] * 2
    for size, hardware in ((96, GENERIC), (1024, CPU)):
        found = kinds(solved, [(size, size), (size,)], specs, P("d"), hardware)
        assert sum(count for _, count in found) >= 10


@pytest.mark.parametrize("size", [24, 29])
def test_values_of_solutions(size, any_mesh):
    numbers = np.random.default_rng(0)
    a, b = numbers.normal(size=(size, size)), numbers.normal(size=size)
    args = ((a @ a.T + size * np.eye(size)).astype(np.float32), b.astype(np.float32))
    spec = P(any_mesh.axis_names[0])
    step = mw.jit(solved, mesh=any_mesh, in_shardings=spec, out_shardings=spec, hardware=CPU)
    np.testing.assert_allclose(step(*args), solved(*args), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(None, ("x", "y"))])
@pytest.mark.parametrize("shape", [(16, 24), (13, 10)])
def test_values(spec, shape, any_mesh):
    names = any_mesh.axis_names
    if not {"x", "y"} <= set(names):
        spec = P(names[0])
    u = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    step = mw.jit(derivative, mesh=any_mesh, in_shardings=spec, out_shardings=spec, hardware=CPU)
    np.testing.assert_allclose(step(u), derivative(u), rtol=1e-4, atol=1e-4)
