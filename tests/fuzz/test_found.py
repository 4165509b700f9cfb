"""What random programs found: each bug's smallest case, by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.fuzz import checking as fuzz
from tests.fuzz.programs import Case, Input, Step

X2 = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
X4 = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
X2Y2 = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X2Y2Z2 = AbstractMesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
COMPLETIONS = pytest.mark.parametrize("completion", ["gspmd", "improved"])


def numbers(*shape: int) -> np.ndarray:
    """Some floats."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def check(
    fn: Callable[..., Any],
    mesh: Any,
    ins: Sequence[Any],
    outs: Any,
    args: Sequence[Any],
    **options: Any,
) -> Any:
    """The partitioned program gives what one device does; returns the program."""
    step = mw.jit(fn, mesh=mesh, in_shardings=tuple(ins), out_shardings=outs, **options)
    program = step.partition(*args)
    for got, wanted in zip(
        jax.tree.leaves(program.simulate(*args)), jax.tree.leaves(fn(*args)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    return program


@COMPLETIONS
def test_least_of_scattered_updates(completion: str):
    """The updates' dim is no dim of the result, which is unreduced over its axes all the same."""
    check(
        lambda x, at, low: jnp.asarray(x).at[at].min(low, mode="drop"),
        X2,
        (None, P(None, "x"), None),
        None,
        (numbers(2), np.array([[0, 3]], np.uint32), np.float32(0.1)),
        completion=completion,
    )


@COMPLETIONS
def test_updates_and_result_do_not_share_an_axis(completion: str):
    """An axis that splits the updates cannot split the result that they are summed into."""
    check(
        lambda x, i, j, u: jnp.asarray(x).at[i, j].add(u, mode="clip").T,
        X2,
        (None, None, None, P("x")),
        P("x", None),
        (numbers(1, 2), np.array([0, 3]), np.array([1, -9]), numbers(2)),
        completion=completion,
    )


def test_a_node_that_no_neighbour_suggests_to_split():
    """A start in the program's order falls back on what completion gave."""
    check(
        lambda x, at, low: jax.nn.softmax(jnp.asarray(x).at[at].min(low, mode="drop"), axis=0),
        X2,
        (None, P(None, "x"), None),
        P("x"),
        (numbers(2), np.array([[0, 1, 0, 3]], np.uint32), np.float32(0.1)),
    )


@COMPLETIONS
def test_part_of_a_sum(completion: str):
    """A slice carries a sum although no factor of its operand is one of its result."""
    check(
        lambda x: jnp.sum(x, (0, 1))[1:3],
        X2,
        (P("x"),),
        None,
        (numbers(2, 1, 3),),
        completion=completion,
    )


@COMPLETIONS
def test_a_sum_of_terms_passed_on(completion: str):
    """Terms over one axis are added, summed over another axis as well, and passed on."""
    check(
        lambda x, w, v: jnp.sum(x @ w + x @ v, 0) * 0.5,
        X2Y2,
        (P("x", "y"), P("y"), P("y")),
        None,
        (numbers(8, 6), numbers(6, 3), numbers(6, 3) + 1),
        completion=completion,
    )


@COMPLETIONS
def test_a_sum_of_sums_and_another(completion: str):
    """Only one of two terms is unreduced over the axis."""
    check(
        lambda x, w, r: jnp.sum(x @ w + (x * 2) @ w, 1) + jnp.sum(r, 0),
        X2,
        (None, P(None, "x"), None),
        None,
        (numbers(4, 3), numbers(3, 4), numbers(5, 4)),
        completion=completion,
    )


@pytest.mark.parametrize("way", ["dice 0", "dice 1", "dice 2", "gspmd", "improved"])
def test_a_sum_whose_dims_are_of_two_factors(way: str):
    """A convolution in groups: what its sum passes through has one factor for `(group feature)`."""
    kernel = Input("a0", (1, 4, 4), spec=((), ("z",), ("x",)))
    text = "lax.conv_general_dilated({0}, {1}, (3,), ((1, 1),), rhs_dilation=(2,), "
    text += "dimension_numbers=('NHC', 'HIO', 'NHC'), feature_group_count=2) * 0.5"
    step = Step("v0", text, ("a1", "a0"), (8, 1, 4), "float32")
    inputs = (kernel, Input("a1", (8, 1, 8)))
    case = Case((("x", 2), ("z", 2)), inputs, (step,), (("v0", None),))
    for seed in range(6):
        assert not fuzz.check(replace(case, seed=seed), (way,), "numpy")


def test_replicated_arguments_that_are_on_the_mesh_already(mesh8: jax.sharding.Mesh):
    """An empty spec is a spec: the second step of data parallelism gets what the first returned."""
    everywhere = jax.device_put(numbers(3), NamedSharding(mesh8, P()))
    doubled = mw.jit(lambda x: x * 2, mesh=mesh8, in_shardings=P(), out_shardings=P())
    np.testing.assert_array_equal(doubled(everywhere), numbers(3) * 2)


@COMPLETIONS
def test_one_axis_for_two_factors_of_a_dim(completion: str):
    """Completion: the operand says x of one factor of a reshaped dim, the result of another."""
    check(
        lambda a, w: (jnp.reshape(w, (4, 1, 2, 4)), a @ w),
        X2,
        (None, None),
        (P(None, None, "x", None), P("x")),
        (numbers(2), numbers(2, 16)),
        completion=completion,
    )


@pytest.mark.parametrize("reduce", [jnp.all, jnp.any])
@COMPLETIONS
def test_whether_all_or_any_are_true(reduce: Any, completion: str):
    """Booleans have no collective of their own: one of bytes stands for it."""
    some = np.arange(24).reshape(8, 3) % np.array([24, 25, 1]) > np.array([0, -1, 0])
    check(lambda x: reduce(x, 0), X4, (P("x"),), None, (some,), completion=completion)


@COMPLETIONS
def test_a_part_of_an_axis_that_is_used_alone(completion: str):
    """Two rows over four devices: half of the axis splits them, the other half nothing."""
    check(
        lambda x, y: jnp.reshape(x, (2, 5)) + y,
        X4,
        (P("x"), P(None, None)),
        None,
        (numbers(10), numbers(2, 5)),
        completion=completion,
    )


@COMPLETIONS
def test_parts_of_an_axis_in_two_dims(completion: str):
    """Six devices are two by three, and the two dims have two rows and three."""
    check(
        lambda x: jnp.tanh(jnp.reshape(x, (2, 6))),
        AbstractMesh((6,), ("x",), axis_types=(AxisType.Auto,)),
        (P("x"),),
        None,
        (numbers(12),),
        completion=completion,
    )


@COMPLETIONS
def test_a_join_of_nothing(completion: str):
    """Rows that are sharded, and none of them."""
    nothing = numbers(0)
    ins = (P("x"), P("x"))
    check(
        lambda a, b: jnp.concatenate([a, b]), X2, ins, None, (nothing,) * 2, completion=completion
    )


@COMPLETIONS
def test_a_write_into_nothing(completion: str):
    """An update at one position of a dim that has none."""
    check(
        lambda x, i, u: jnp.asarray(x).at[:, :, i].add(u),
        X2,
        (P(None, None, "x"), None, None),
        None,
        (numbers(1, 1, 0), np.zeros((1, 1), np.uint32), numbers(1, 1, 1, 1)),
        completion=completion,
    )


@COMPLETIONS
def test_a_transform_along_a_dim_of_two_rows_in_shards(completion: str):
    """No device can follow it, and nothing else was suggested, with four dims and three axes."""
    check(
        lambda x: jnp.fft.fftn(x, axes=(1, 2, 3)),
        X2Y2Z2,
        (None,),
        P(("y", "z"), None, None, "x"),
        (numbers(3, 2, 2, 2),),
        completion=completion,
    )


def check_on_devices(
    fn: Callable[..., Any], mesh: jax.sharding.Mesh, ins: Any, outs: Any, args: Sequence[Any]
) -> None:
    """Real devices give what one does without compiling, where XLA cannot be wrong."""
    step = mw.jit(fn, mesh=mesh, in_shardings=ins, out_shardings=outs, completion="gspmd")
    got, wanted = step(*args), fn(*map(jnp.asarray, args))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, wanted)))


@pytest.mark.parametrize("start", [33, 38, -3])
def test_a_start_outside_before_a_reshard_that_slices(start: int, mesh2x4: jax.sharding.Mesh):
    """XLA makes one slice of two and clamps neither start as it should (openxla/xla#49121)."""
    check_on_devices(
        lambda x, i: jax.lax.dynamic_slice(x * 2, (i, 0), (10, 3), allow_negative_indices=False),
        mesh2x4,
        (P(), P()),
        P("x"),
        (numbers(40, 5), np.int32(start)),
    )


@pytest.mark.parametrize("rows", [32, 33])
@pytest.mark.parametrize("at", [4, 28, -2])
def test_few_rows_at_a_known_place_of_what_a_reshard_sliced(
    at: int, rows: int, mesh2x4: jax.sharding.Mesh
):
    """The same, on devices that have none of the rows."""

    def write(x: Any, y: Any) -> Any:
        return mw.shard(x, P(("x", "y"))).at[at : at + 2 or None].set(-y[1:3])

    check_on_devices(
        write, mesh2x4, (P(), P()), P(("x", "y")), (numbers(rows, 5), 2 * numbers(rows, 5))
    )


@pytest.mark.parametrize("how", ["set", "add", "max", "apply"])
def test_one_position_of_what_a_reshard_sliced(how: str, mesh2x4: jax.sharding.Mesh):
    """The same, of the slice and update that XLA makes of a scatter at one position."""

    def write(x: Any, i: Any) -> Any:
        joined = jnp.negative if how == "apply" else 7.0
        return getattr(mw.shard(x * 2, P()).at[i], how)(joined)

    for row in (-1, 0, 19, 20, 45):
        check_on_devices(write, mesh2x4, (P(), P()), P("x"), (numbers(40, 5), np.int32(row)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
def test_a_number_that_is_none_wins(reduce: Any, dtype: str, mesh2x4: jax.sharding.Mesh):
    """The collectives of XLA's CPU backend lose NaN in a maximum."""
    x = numbers(17, 6)
    x[3, 2], x[16, 0], x[7, 5], x[0, 1] = np.nan, np.inf, -np.inf, -0.0
    x[:, 4] = -np.inf
    rows = P(("y", "x"))
    check_on_devices(lambda x: reduce(x, 0), mesh2x4, (rows,), P(), (x.astype(dtype),))
