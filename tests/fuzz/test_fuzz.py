"""Random programs against one device: a few in every run, many in the slow suite."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.fuzz.checking import check, compare, ways_of
from tests.fuzz.making import make
from tests.fuzz.operators import PROFILES
from tests.fuzz.pipeline import COMPLETIONS
from tests.fuzz.programs import MESHES, Case, Input, Step, arguments_of, function_of
from tests.fuzz.shrinking import reproducer, shrink

FEW = 8  # blocks of the default suite, each of so many programs
OF_EACH = 5
BLOCKS, BLOCK = 20, 25  # of the slow suite


def complain(case: Case, ways: tuple[str, ...], engine: str) -> None:
    """Fail with what a person needs to see it again."""
    failures = check(case, ways, engine)
    shown = [f"{f.kind}: {f.detail}\n{reproducer(case, f.completion)}" for f in failures]
    hint = f"python -m tests.fuzz --cases 1 --seed {case.seed} makes it small"
    assert not failures, "\n\n".join([*shown, hint])


@pytest.mark.parametrize("block", range(FEW))
def test_random_programs_equal_one_device(block: int):
    for seed in range(100 + block * OF_EACH, 100 + (block + 1) * OF_EACH):
        case, problems = make(seed, PROFILES)
        assert not problems
        complain(case, ways_of(seed), "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_random_programs_equal_one_device(block: int):
    for seed in range(400 + block * BLOCK, 400 + (block + 1) * BLOCK):
        complain(make(seed, PROFILES)[0], ways_of(seed), "numpy")


@pytest.mark.parametrize("seed", range(100, 104))
def test_a_random_program_equals_one_device_compiled(seed: int):
    complain(make(seed, PROFILES)[0], COMPLETIONS[seed % 3 :][:1], "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_random_programs_equal_one_device_compiled(block: int):
    for seed in range(1000 + block * BLOCK, 1000 + (block + 1) * BLOCK):
        complain(make(seed, PROFILES)[0], COMPLETIONS, "compiled")
    jax.clear_caches()


def test_programs_are_the_same_from_the_same_seed():
    first, second = (make(3, PROFILES)[0] for _ in range(2))
    assert first == second
    assert [x.tolist() for x in arguments_of(first) if hasattr(x, "tolist")] == [
        x.tolist() for x in arguments_of(second) if hasattr(x, "tolist")
    ]


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("completion", ["gspmd", "improved"])
def test_what_stays_in_its_rows_moves_nothing(axes: tuple[tuple[str, int], ...], completion: str):
    """Rows split over all axes; whatever is done to each row alone needs no other device."""
    names = tuple(a for a, _ in axes)
    mesh = AbstractMesh(tuple(n for _, n in axes), names, axis_types=(AxisType.Auto,) * len(axes))

    def program(x: jax.Array, w: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.nn.softmax(jax.numpy.tanh(x @ w) + jax.random.normal(key, (17, 5)))
        largest = jax.numpy.argmax(y, -1)
        return y - y.mean(-1, keepdims=True), jax.numpy.take_along_axis(y, largest[:, None], 1)

    rows = P(names)
    step = mw.jit(
        program, mesh=mesh, in_shardings=(rows, P(), P()), out_shardings=rows, completion=completion
    )
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((17, 3), (3, 5))]
    made = step.partition(*types, jax.eval_shape(lambda: jax.random.key(0)))
    assert made.collectives == ()
    assert made.wire_bytes == 0


def test_shrinking_finds_the_step_that_matters():
    steps = (
        Step("v0", "jnp.tanh({0})", ("a0",), (4, 3), "float32"),
        Step("v1", "hint({0}, {spec})", ("v0",), (4, 3), "float32", (("x",), None)),
        Step("v2", "jnp.cumsum({0}, axis=0)", ("v1",), (4, 3), "float32"),
        Step("v3", "{0} + {0}", ("v2",), (4, 3), "float32"),
    )
    case = Case((("x", 2), ("y", 2)), (Input("a0", (4, 3)),), steps, (("v3", None), ("v0", None)))
    smallest = shrink(case, lambda c: any("cumsum" in s.text for s in c.steps))
    assert [s.text for s in smallest.steps] == ["jnp.cumsum({0}, axis=0)"]
    assert "jnp.cumsum" in reproducer(smallest, "gspmd")
    assert len(smallest.axes) == 1
    wanted = jax.numpy.cumsum(arguments_of(smallest)[0], axis=0)
    assert not compare(
        *map(jax.device_get, (function_of(smallest, False)(*arguments_of(smallest))[0], wanted))
    )
