"""Memories of the host and layouts, asked for at the boundary or inside."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, assert_same_outcome, mesh_of, put

MESH = mesh_of(4, 2)
Space = jax.memory.Space
ROWS = NamedSharding(MESH, P("x"))
HOST = ROWS.with_memory_kind("pinned_host")


def rows():
    return put("x")


def on_host():
    return jax.device_put(X, HOST)


RESULTS = {
    "asked for": (lambda x: x * 2, {"out_shardings": HOST}),
    "asked for, of one of two": (lambda x: (x * 2, x @ x), {"out_shardings": (HOST, None)}),
    "not pinned": (lambda x: x + 1, {"out_shardings": ROWS.with_memory_kind("unpinned_host")}),
    "put there": (lambda x: jax.device_put(x * 2, HOST), {}),
    "moved there": (lambda x: jax.device_put(x * 2, Space.Host), {}),
    "moved there and asked for here": (
        lambda x: jax.device_put(x * 2, Space.Host),
        {"out_shardings": ROWS},
    ),
    "there and back": (
        lambda x: jax.device_put(jax.device_put(x * 2, Space.Host), Space.Device) + 1,
        {},
    ),
    "each row in a loop": (lambda x: lax.map(lambda r: jax.device_put(r * 2, Space.Host), x), {}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_in_memories(name):
    fn, options = RESULTS[name]
    # The steps of a loop are shared out or not, as is cheaper.
    assert_same_outcome(lambda jit: jit(fn, **options)(rows()), places="loop" not in name)


ARGUMENTS = {
    "as it is": (lambda x: x, {}),
    "computed with": (lambda x: x * 2, {}),
    "moved first": (lambda x: jax.device_put(x, Space.Device) * 2, {}),
    "put on the devices": (lambda x: jax.device_put(x, ROWS) * 2, {"in_shardings": HOST}),
    "row by row": (lambda x: lax.map(lambda r: jax.device_put(r, Space.Device) + 1, x), {}),
    "with another": (lambda x: x + rows(), {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_in_memories(name):
    fn, options = ARGUMENTS[name]
    assert_same_outcome(lambda jit: jit(fn, **options)(on_host()), falls_back=True)


def test_a_mesh_that_was_given_refuses_them():
    with pytest.raises(mw.MeshwiseError, match=r"args\[0\] lies in pinned_host"):
        mw.jit(lambda x: x * 2, mesh=MESH)(on_host())
    with pytest.raises(mw.MeshwiseError, match=r"args\[0\] is to be in pinned_host"):
        mw.jit(lambda x: x * 2, mesh=MESH, in_shardings=HOST)(rows())


@pytest.mark.parametrize("arg", [rows, on_host])
def test_two_memories_in_one_sum(arg):
    assert_same_outcome(lambda jit: jit(lambda x, y: x + y)(arg(), rows()))


NAMES = {"names_which_can_be_saved": ["y"], "names_which_can_be_offloaded": ["z"]}
WAY = {"offload_src": "device", "offload_dst": "pinned_host"}
POLICIES = {
    "by name": jax.checkpoint_policies.save_and_offload_only_these_names(**NAMES, **WAY),
    "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def local(fn):
    """The program of each device."""
    return mw.jit(fn).partition(rows()).jaxpr


@pytest.mark.parametrize("policy", POLICIES)
def test_residuals_in_the_memory_of_the_host(policy):
    @partial(jax.checkpoint, policy=POLICIES[policy])
    def layer(x, _=None):
        z = checkpoint_name(jnp.sin(x @ x / 9), "z")
        return checkpoint_name(jnp.sin(z @ x / 9), "y"), None

    once = jax.grad(lambda x: layer(x)[0].sum())
    looped = jax.grad(lambda x: lax.scan(layer, x, None, length=3)[0].sum())
    for fn in (once, looped):
        assert_same_outcome(lambda jit, fn=fn: jit(fn)(rows()), places=False)
    # The local program moves what the user's moves.
    moves = [str(made).count("<host>") > 0 for made in (jax.make_jaxpr(once)(X), local(once))]
    assert moves[0] == moves[1]


BY_ROWS, BY_COLUMNS = Layout((0, 1)), Layout((1, 0))
FORMATS = {
    "rows": {"in_shardings": Format(BY_ROWS, ROWS), "out_shardings": Format(BY_ROWS, ROWS)},
    "columns": {"out_shardings": Format(BY_COLUMNS, ROWS)},
    "none": {"in_shardings": Format(None, ROWS), "out_shardings": Format(None, ROWS)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_layouts(name):
    def run(jit):
        out = jit(lambda x: x * 2 + 1, **FORMATS[name])(X)
        return out, np.array(out.format.layout.major_to_minor)

    assert_same_outcome(run)


def test_layouts_inside_and_chosen():
    def inside(jit):
        there = Format(BY_COLUMNS, ROWS)
        return jit(lambda x: lax.with_sharding_constraint(x * 2, there))(X)

    def chosen(jit):
        free = {"in_shardings": Format(Layout.AUTO), "out_shardings": Format(Layout.AUTO)}
        return jit(lambda x: x.T, **free).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()(X)

    assert_same_outcome(inside)
    assert_same_outcome(chosen)
    assert_same_outcome(lambda jit: jit(lambda x: x, out_shardings=BY_ROWS)(X))
