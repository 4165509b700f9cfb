"""What lies turned goes straight to where its shards belong: values, bytes, and whole programs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.choose.tree import reshard_tree
from meshwise.cost.hardware import GENERIC
from meshwise.ir.mesh import Mesh, plain_mesh
from meshwise.ir.sharding import Reduction, Sharding, unreduced
from meshwise.reshard.plan import Reshard, StepKind
from meshwise.reshard.search import plan_reshard, reshard_bound, reshard_cost
from meshwise.reshard.tiles import received_bytes, tiles_over
from meshwise.reshard.turned import straightened
from tests.reshard.cases import MESHES, check_values, user_shardings

MESH = MESHES["2x4"]
X, Y = MESH.refine(("x",)), MESH.refine(("y",))


def turned_shardings(mesh: Mesh) -> Iterator[Sharding]:
    """Every sharding of a matrix over whole axes, turned along axes of each dim, and of both."""
    for sharding in user_shardings(mesh, 2):
        first, second = sharding.dims
        for axes in dict.fromkeys((first, second, (*first, *second))):
            if axes:
                yield unreduced(sharding.dims, (), Reduction.SUM, axes)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("shape", [(24, 48), (24, 7)], ids=str)
def test_every_target_that_one_step_leads_to(name: str, shape: tuple[int, int]) -> None:
    mesh = MESHES[name]
    even = [s for s in turned_shardings(mesh) if divides(shape, s, mesh)]
    pairs = [
        (source, target)
        for source in even
        for target in user_shardings(mesh, 2)
        if straightened(Reshard(shape, 4, mesh, source, target, GENERIC)) is not None
    ]
    assert {source for source, _ in pairs} == set(even)
    pick = np.random.default_rng(0).permutation(len(pairs))[:40]
    check_values(shape, [pairs[i] for i in pick], mesh)


def divides(shape: tuple[int, int], source: Sharding, mesh: Mesh) -> bool:
    """Whether the dims that are turned divide."""
    return all(
        n % mesh.size(axes) == 0 or set(axes).isdisjoint(source.turned)
        for n, axes in zip(shape, source.dims, strict=True)
    )


def test_blocks_that_change_places_come_from_where_they_lie_turned() -> None:
    source, target = unreduced((X, Y), (), Reduction.SUM, Y), Sharding((Y, X))
    plan = plan_reshard(Reshard((64, 64), 4, MESH, source, target, GENERIC))
    assert [(s.kind, s.launches) for s in plan.steps] == [(StepKind.ROUNDS, 2)]
    blocks = (32, 16), (16, 32)
    ends = [
        tiles_over(MESH.names, (64, 64), block, s, MESH)
        for block, s in zip(blocks, (source, target), strict=True)
    ]
    assert plan.wire_bytes == received_bytes(ends[0], ends[1], 4) == 2048
    assert plan.peak_bytes == 2048


def test_whole_shards_change_places_once() -> None:
    source = unreduced((X + Y, ()), (), Reduction.SUM, X + Y)
    for target in (source.straight, Sharding(((), Y + X)), Sharding((Y + X, ()))):
        plan = plan_reshard(Reshard((64, 64), 4, MESH, source, target, GENERIC))
        moved = 2048 if target.dims[0] else 1792
        assert plan.wire_bytes == moved, target
    back = plan_reshard(Reshard((64, 64), 4, MESH, source, source.straight, GENERIC))
    assert [s.kind for s in back.steps] == [StepKind.PERMUTE]


def test_many_devices_change_places_in_one_step_at_most() -> None:
    mesh = plain_mesh(("x", "y"), (8, 4))
    source = unreduced((("x",), ("y",)), (), Reduction.SUM, ("y",))
    asked = Reshard((64, 64), 4, mesh, source, Sharding((("y",), ("x",))), GENERIC)
    assert straightened(asked) is None and reshard_cost(asked) == float("inf")
    seconds, edges = reshard_tree(*asked[:3], source, frozenset({asked.target}), GENERIC)
    assert [e[1] for e in edges] == [source.straight, asked.target]
    parts = [plan_reshard(asked._replace(source=a, target=b)) for a, b in edges]
    assert seconds >= sum(part.seconds for part in parts) > 0


def test_two_wishes_share_the_step() -> None:
    source = unreduced((X, Y), (), Reduction.SUM, Y)
    wanted = frozenset({Sharding((Y, X)), Sharding((X, Y))})
    seconds, edges = reshard_tree((64, 64), 4, MESH, source, wanted, GENERIC)
    assert [a for a, _ in edges] == [source, edges[0][1]] and {b for _, b in edges} == wanted
    assert seconds == sum(reshard_cost(Reshard((64, 64), 4, MESH, *e, GENERIC)) for e in edges)


def test_terms_of_a_sum_are_moved_as_terms() -> None:
    source = unreduced((X, ()), Y, Reduction.SUM, X)
    wanted = frozenset({Sharding((X, Y))})
    _, edges = reshard_tree((64, 64), 4, MESH, source, wanted, GENERIC)
    assert edges[0] == (source, unreduced((X, ()), Y, Reduction.SUM))


def test_no_bound_is_above_the_cost() -> None:
    for source in turned_shardings(MESH):
        for target in user_shardings(MESH, 2):
            asked = Reshard((64, 64), 4, MESH, source, target, GENERIC)
            assert reshard_bound(asked) <= reshard_cost(asked)


def test_a_sharding_says_that_it_is_turned() -> None:
    assert str(unreduced((X, Y), (), Reduction.SUM, Y)) == "[x, y.0*y.1] turned along y.0, y.1"
    with pytest.raises(AssertionError):
        unreduced((X, Y), (), Reduction.SUM, Y[:1])


def quarter(x: Any) -> Any:
    return jnp.rot90(x)


def three_quarters(x: Any) -> Any:
    return jnp.rot90(x, 3)


def anti_transposed(x: Any) -> Any:
    """Both dims change their order, and places."""
    return jnp.rot90(x, 2).T


def gradient(x: Any) -> Any:
    weights = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape[::-1])
    return jax.grad(lambda x: (jnp.sin(jnp.rot90(x)) * weights).sum())(x).T


def in_a_loop(x: Any) -> Any:
    """Read in every step as it is not, and once as it is."""
    y = jnp.flip(x, 1)
    return lax.fori_loop(0, 3, lambda _, z: jnp.cos(z) + y.T, y.T)


def turned_in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, z: jnp.rot90(z[: z.shape[1]]), x[: x.shape[1]]).sum(0)


def in_a_branch(x: Any) -> Any:
    y = jnp.flip(x, 1)
    return lax.cond(x[0, 0] > 0, lambda: y.T * 2, lambda: x.T)


def read_twice(x: Any) -> Any:
    y = jnp.flip(x, 1)
    return y.T, y * x


def of_a_sum(x: Any) -> Any:
    """Reversed before it is added up."""
    return jnp.flip(x @ x.T, 1).T


PROGRAMS = [
    quarter,
    three_quarters,
    anti_transposed,
    gradient,
    in_a_loop,
    turned_in_a_loop,
    in_a_branch,
    read_twice,
    of_a_sum,
]
PLACES = [
    ((8,), P("a"), P(None, "a")),
    ((8,), P("a"), P("a")),
    ((2, 4), P("a", "b"), P("a", "b")),
    ((4, 2), P("a", "b"), P("a", "b")),
    ((2, 4), P(("a", "b")), P(None, ("b", "a"))),
    ((2, 2, 2), P("a", "b"), P("a", ("b", "c"))),
    ((2, 2, 2), P(("a", "c"), "b"), P("b", ("c", "a"))),
]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("sizes", "given", "wanted"), PLACES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (13, 9), (16, 9)], ids=str)
def test_programs(
    function: Callable[..., Any],
    sizes: tuple[int, ...],
    given: P,
    wanted: P,
    shape: tuple[int, int],
) -> None:
    mesh = AbstractMesh(sizes, ("a", "b", "c")[: len(sizes)])
    outs: Any = None if function is turned_in_a_loop else wanted
    outs = (outs, None) if function is read_twice else outs
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=outs, hardware=GENERIC)
    ours = jax.tree.leaves(step.partition(x).simulate(x))
    for mine, other in zip(ours, jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [quarter, three_quarters, anti_transposed])
@pytest.mark.parametrize(
    ("sizes", "given", "sent"),
    [
        ((2, 4), P("a", "b"), 2048),
        ((4, 2), P("a", "b"), 2048),
        ((2, 2, 2), P("a", ("b", "c")), 2048),
    ],
    ids=str,
)
def test_a_quarter_turn_sends_no_element_twice(
    function: Callable[..., Any], sizes: tuple[int, ...], given: P, sent: int
) -> None:
    mesh = AbstractMesh(sizes, ("a", "b", "c")[: len(sizes)])
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=given, hardware=GENERIC)
    assert step.partition(x).wire_bytes == sent


def test_what_a_loop_reads_is_brought_before_it() -> None:
    mesh = AbstractMesh((2, 4), ("x", "y"))
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    spec = P("x", "y")
    step = mw.jit(in_a_loop, mesh=mesh, in_shardings=spec, out_shardings=spec, hardware=GENERIC)
    part = step.partition(x)
    assert part.wire_bytes == 2048 and all(c.count == 1 for c in part.collectives)
