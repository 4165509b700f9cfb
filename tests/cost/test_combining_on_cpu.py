"""Sums over devices that are held to be one are one in what XLA on CPU compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwise.cost.cpu.kernels import cpu_kernels_of
from meshwise.cost.steps import steps_of

SIZES = {"x": 2, "y": 4}


def one_after_the_other(a, b):
    first = lax.psum(jnp.sin(a), "x")
    return first, lax.psum(b * first[:1, :32], "x")


def some_after_others(a, b):
    """The third waits for the first, and is alone; the fourth for nobody."""
    first = lax.psum(jnp.sin(a), "x")
    second = lax.psum(jnp.tanh(a), "x")
    third = lax.psum(b * first[:1, :32], "x")
    return first, second, third, lax.psum(jnp.cos(b), "x")


def crossed(a, b):
    """Of two pairs only one can be made one: the other would wait for itself."""
    first, other = lax.psum(jnp.sin(a), "x"), lax.psum(jnp.cos(b), "y")
    return lax.psum(jnp.tanh(b) * first[:1, :32], "y"), lax.psum(a * other[:1, :1], "x")


def in_a_loop(a, b):
    def step(carry, _):
        return (lax.psum(jnp.sin(carry[0]), "x"), lax.psum(jnp.cos(carry[1]), "x")), None

    return lax.scan(step, (a, b), None, length=3)[0]


CASES = {
    "two": lambda a, b: (lax.psum(a * 2, "x"), lax.psum(b * 3, "x")),
    "a pair": lambda a, b: lax.psum((a * 2, b * 3), "x"),
    "one after the other": one_after_the_other,
    "some after others": some_after_others,
    "crossed": crossed,
    "over other axes": lambda a, b: (lax.psum(a * 2, "x"), lax.psum(b * 3, "y")),
    "sum and largest": lambda a, b: (lax.psum(a * 2, "x"), lax.pmax(b * 3, "x")),
    "two largest": lambda a, b: (lax.pmax(a * 2, "x"), lax.pmax(b * 3, "x")),
    "of other types": lambda a, b: (
        lax.psum(a * 2, "x"), lax.psum((b * 3).astype(jnp.int32), "x"),
    ),
    "short floats": lambda a, b: (
        lax.psum((a * 2).astype(jnp.bfloat16), "x") * jnp.tanh(a), lax.psum(b * 3, "x"),
    ),
    "gathered": lambda a, b: (
        lax.all_gather(a * 2, "x", tiled=True), lax.all_gather(b * 3, "x", tiled=True),
    ),
    "in a loop": in_a_loop,
}  # fmt: skip


def counted(program):
    """Sums over devices; what makes short floats of them writes in place, and is none."""
    own = sum(1 for k in program.kernels if k.name in ("psum", "pmax") and not k.replaces)
    return own + sum(counted(body.program) for k in program.kernels for body in k.bodies)


@pytest.mark.parametrize("name", CASES)
def test_as_many_as_xla_makes(name, mesh2x4):
    function = CASES[name]
    args = jnp.ones((64, 64)), jnp.ones((64, 32))
    spec = P(("x", "y"))
    mapped = jax.shard_map(function, mesh=mesh2x4, in_specs=spec, out_specs=spec, check_vma=False)
    lowered = jax.jit(mapped).lower(*args).compile().as_text()
    axes = list(SIZES.items())
    local = [jax.ShapeDtypeStruct((8, n), jnp.float32) for n in (64, 32)]
    jaxpr = jax.make_jaxpr(function, axis_env=axes)(*local)
    assert counted(cpu_kernels_of(steps_of(jaxpr, SIZES))) == lowered.count(" all-reduce(")
