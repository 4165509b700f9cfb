"""What a device holds at once, and plans taken because they hold or compute less."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.choose.graph import build_graph
from meshwise.choose.holding import peak_bytes
from meshwise.choose.limits import limits_of
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start
from meshwise.cost.hardware import CPU, GENERIC
from meshwise.cost.memory import peak_memory

N8, N24 = AbstractMesh((8,), ("d",)), AbstractMesh((2, 4), ("x", "y"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def completed(function, *args, **hints):
    """The search of a program, every node placed as completion has it."""
    plan = mw.jit(function, mesh=N8, **hints).partition(*args).plan
    graph = build_graph(plan.program, plan.rules, plan.completion, GENERIC)
    return Search(graph, completion_start(graph, limits_of(graph)), carries=False)


def gathered(w, x):
    """`w` is gathered for the product, and not read after it."""
    return (x @ w) @ x


def in_a_loop(w, x):
    """`w` is read in every step: gathered before the loop, and held until it ends."""
    return lax.scan(lambda h, _: ((h @ w) @ x, None), x, None, length=3)[0]


def joined_and_cut(w, x):
    """Of the join only a part is made; `w` and `x` are gathered, and held until then."""
    return lax.slice(jnp.concatenate([w, x], 1), (0, 32), (64, 96))


def joined_and_read(w, x):
    """All of the join is read."""
    return jnp.cumsum(jnp.concatenate([w, x], 1), 1)


SHARD, WHOLE = 2048, 16384
CASES = {
    "no join that is cut": (joined_and_cut, 2 * SHARD + SHARD),
    "a join that is read": (joined_and_read, 2 * SHARD + 2 * SHARD + 2 * SHARD),
    "a copy, while it is read": (gathered, 2 * SHARD + WHOLE + 2 * SHARD),
    "what a loop reads, throughout": (in_a_loop, 2 * SHARD + 2 * WHOLE + 2 * SHARD),
}


@pytest.mark.parametrize("function, held", CASES.values(), ids=CASES)
def test_what_is_held(function, held):
    hints = {"in_shardings": P("d"), "out_shardings": P("d")}
    assert peak_bytes(completed(function, f32(64, 64), f32(64, 64), **hints)) == held


def test_a_vector_is_gathered_to_be_rolled_by_what_is_told():
    """The join that `jnp.roll` cuts is in no memory: two of the vector are not held."""
    rolled = mw.jit(jnp.roll, mesh=N8, in_shardings=(P("d"), P()), out_shardings=P("d"))
    program = rolled.partition(f32(1024), jax.ShapeDtypeStruct((), jnp.int32))
    assert [one.kind.value for one in program.collectives] == ["all_gather"]
    assert program.wire_bytes == 7 * 1024 * 4 / 8


def stages(weights, batches):
    """A pipeline: stage by stage a weight, and microbatches that move on by one stage a step."""

    def step(state, x):
        state = jnp.roll(state, 1, axis=0).at[0].set(x)
        state = jax.vmap(lambda h, w: jnp.tanh(h @ w / 8))(state, weights)
        return state, state[-1]

    idle = jnp.zeros((7, *batches.shape[1:]))
    start = jnp.zeros((8, *batches.shape[1:]))
    outs = lax.scan(step, start, jnp.concatenate([batches, idle]))[1]
    return outs[7 : 7 + batches.shape[0]]


@pytest.mark.parametrize("spec", [P(), P(None, "d")], ids=["whole", "sharded"])
def test_stages_are_kept(spec):
    """To gather all weights would send less, and hold several times as much."""
    stage, batches = (8, 96, 96), (20, 16, 96)
    function = mw.jit(stages, mesh=N8, in_shardings=(P("d"), spec), out_shardings=spec)
    program = function.partition(f32(*stage), f32(*batches))
    assert all(c.shape[-2:] != stage[1:] for c in program.collectives)
    per_device = program.per_device
    sizes = per_device.mesh.axis_size
    assert peak_memory(per_device.jaxpr, sizes).temporary_bytes < 4 * np.prod(stage)
    draw = np.random.default_rng(0)
    args = [draw.normal(size=shape).astype(np.float32) for shape in (stage, batches)]
    np.testing.assert_allclose(program.simulate(*args), stages(*args), rtol=2e-5, atol=2e-6)


def classified(weights, x, labels):
    """A loss of directions of classes, by one-hot labels."""
    directions = weights / jnp.linalg.norm(weights, axis=0)
    hot = jax.nn.one_hot(labels, weights.shape[1])
    return -(hot * jax.nn.log_softmax(x @ directions)).sum(1).mean()


def test_no_one_hot_is_made_whole_to_save_a_sum_of_rows():
    """With labels' classes on every device one reduction of all rows less is sent."""
    classes, rows = 512, 128
    numbers = np.random.default_rng(0)
    args = (
        numbers.normal(size=(32, classes)).astype(np.float32),
        numbers.normal(size=(rows, 32)).astype(np.float32),
        numbers.integers(0, classes, (rows,)).astype(np.int32),
    )
    columns, gradient = P(None, "d"), jax.grad(classified)
    step = mw.jit(gradient, mesh=N8, in_shardings=(columns, P("d"), P("d")), out_shardings=columns)
    program = step.partition(*args)
    per_device = program.per_device
    sizes = per_device.mesh.axis_size
    assert peak_memory(per_device.jaxpr, sizes).temporary_bytes < 4 * classes * rows / 2
    np.testing.assert_allclose(program.simulate(*args), gradient(*args), rtol=1e-3, atol=1e-6)


def routed(x, router, up, down):
    """Each row goes to its best expert, by products with a mask of rows, experts and places."""
    scores = jax.nn.softmax(x @ router)
    best = jax.nn.one_hot(jnp.argmax(scores, -1), router.shape[1])
    place = (jnp.cumsum(best, 0) * best).sum(-1).astype(jnp.int32) - 1
    mask = best[:, :, None] * jax.nn.one_hot(place, 64)[:, None, :]
    sent = jnp.einsum("tec,td->ecd", mask, x)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, up))
    made = jnp.einsum("ecf,efd->ecd", hidden, down)
    return jnp.einsum("tec,ecd->td", mask * scores.max(-1)[:, None, None], made)


@pytest.mark.parametrize("rows", [256, 250])
def test_a_mask_stays_in_shards(rows):
    """To send what experts make to shards of columns is less, and every device has all the mask."""
    shapes = (rows, 64), (64, 8), (8, 64, 128), (8, 128, 64)
    specs = P("d"), P(), P("d"), P("d")
    program = mw.jit(routed, mesh=N8, in_shardings=specs, out_shardings=P("d")).partition(
        *(f32(*shape) for shape in shapes)
    )
    per_device = program.per_device
    sizes = per_device.mesh.axis_size
    assert peak_memory(per_device.jaxpr, sizes).temporary_bytes < rows * 8 * 64 * 4
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in shapes]
    np.testing.assert_allclose(program.simulate(*args), routed(*args), rtol=2e-4, atol=2e-4)


def states(rows, gates, scale):
    """A state that small gates move on: rows, and gates of fewer numbers, one of each a step."""

    def step(state, row_and_gate):
        row, gate = row_and_gate
        state = state * jnp.tanh(gate) + row[..., None] * scale
        return state, state @ gate

    start = jnp.zeros((*rows.shape[1:], gates.shape[1]))
    return lax.scan(step, start, (rows, gates))[1]


@pytest.mark.parametrize("steps", [32, 19], ids=["even", "uneven"])
def test_small_stacks_are_gathered_once(steps):
    """Gates are wanted whole in every step, and are few: one gather before the loop for all."""
    function = mw.jit(states, mesh=N8, in_shardings=(P("d"), P("d"), P()), out_shardings=P("d"))
    shapes = (steps, 8), (steps, 4), (8, 4)
    program = function.partition(*(f32(*shape) for shape in shapes))
    assert all(c.count == 1 for c in program.collectives)
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in shapes]
    np.testing.assert_allclose(program.simulate(*args), states(*args), rtol=2e-5, atol=2e-6)


def layers(weights, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w / 8), None), x, weights)[0]


@pytest.mark.parametrize("hardware", [GENERIC, CPU], ids=lambda h: h.name)
def test_stacks_of_weights_are_gathered_where_few_launches_are_worth_it(hardware):
    """On CPU devices one launch for nine is worth holding small weights; for fewer bytes it is not.

    Never are those gathered that lie in shards of each layer.
    """
    for spec, gathered in ((P("d"), hardware is CPU), (P(None, "d"), False)):
        hints = {"in_shardings": (spec, P("d")), "out_shardings": P("d")}
        function = mw.jit(layers, mesh=N8, hardware=hardware, **hints)
        program = function.partition(f32(8, 64, 64), f32(512, 64))
        assert (len(program.collectives) == 1 and program.collectives[0].count == 1) is gathered
        draw = np.random.default_rng(0)
        args = [draw.normal(size=s).astype(np.float32) for s in ((8, 64, 64), (512, 64))]
        np.testing.assert_allclose(program.simulate(*args), layers(*args), rtol=2e-5, atol=2e-6)


def test_a_little_less_memory_is_worth_nothing():
    """Data parallelism with weights in shards gathers them: completion's plan holds no less."""
    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()  # noqa: E731
    hints = {"in_shardings": (P("d"), P("d")), "out_shardings": P("d")}
    program = mw.jit(jax.grad(loss), mesh=N8, **hints).partition(f32(64, 64), f32(512, 64))
    assert sorted(str(c.kind) for c in program.collectives) == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("size", [1024, 1003], ids=["even", "uneven"])
def test_a_test_of_all_numbers_stays_in_shards_beside_a_sort_of_all(size):
    """Each device tests its own numbers for NaN, sorts all, and reads what it wants of these."""
    program = mw.jit(jnp.median, mesh=N8, in_shardings=P("d"), out_shardings=P()).partition(
        f32(size)
    )
    tested, gathered = program.collectives
    assert str(tested.kind) == "all_reduce" and tested.wire_bytes <= 2
    assert str(gathered.kind) == "all_gather" and gathered.wire_bytes == 7 * -(-size // 8) * 4
    values = np.random.default_rng(0).normal(size=size).astype(np.float32)
    np.testing.assert_array_equal(program.simulate(values), np.median(values))


def looked_up(table, values):
    """Places of a few values among many numbers in order."""
    return jnp.searchsorted(jnp.sort(table), values)


@pytest.mark.parametrize("size", [4096, 4001], ids=["even", "uneven"])
def test_what_is_looked_up_is_sorted_where_it_is_gathered(size):
    """In order or not, all numbers come to every device once."""
    specs = P("d"), P()
    program = mw.jit(looked_up, mesh=N8, in_shardings=specs, out_shardings=P()).partition(
        f32(size), f32(512)
    )
    (gathered,) = program.collectives
    assert str(gathered.kind) == "all_gather" and gathered.wire_bytes == 7 * -(-size // 8) * 4
    draw = np.random.default_rng(0)
    args = [draw.normal(size=n).astype(np.float32) for n in (size, 512)]
    np.testing.assert_array_equal(program.simulate(*args), looked_up(*args))


@pytest.mark.parametrize(
    ("function", "shape", "sent"),
    [(jnp.argsort, (4096,), 7 * 2048), (jax.nn.softmax, (128, 96), 7 * 6144 + 2 * 7 * 128)],
    ids=["a little more memory", "far more work"],
)
def test_what_is_wanted_whole(function, shape, sent):
    """Memory is worth less than as many bytes again, and work a few in a hundred."""
    over = P("d") if len(shape) == 1 else P(None, "d")
    program = mw.jit(function, mesh=N8, in_shardings=over, out_shardings=P()).partition(f32(*shape))
    assert program.wire_bytes == sent
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_allclose(program.simulate(values), function(values), rtol=1e-5)


def test_of_nothing_nothing_is_held():
    program = mw.jit(jnp.cumsum, mesh=N8, in_shardings=P("d")).partition(f32(0))
    assert program.wire_bytes == 0


def shortest_paths(distances):
    """Floyd and Warshall: each step goes through all pairs, and reads a row and a column."""

    def step(k, found):
        return jnp.minimum(found, found[:, k][:, None] + found[k][None, :])

    return lax.fori_loop(0, len(distances), step, distances)


@pytest.mark.parametrize("side", [64, 43], ids=["even", "uneven"])
def test_work_of_a_loop_is_shared(side):
    """Gathering all before the loop sends half of a row a step, for eight times the work."""
    hints = {"in_shardings": P("d"), "out_shardings": P("d")}
    program = mw.jit(shortest_paths, mesh=N8, **hints).partition(f32(side, side))
    completed = mw.jit(shortest_paths, mesh=N8, completion="gspmd", **hints).partition(
        f32(side, side)
    )
    whole = 3 * side**3
    assert program.plan.work_seconds * GENERIC.flops_per_s < whole / 4
    assert program.wire_bytes <= completed.wire_bytes
    assert all(c.count == side for c in program.collectives)
    distances = np.random.default_rng(0).uniform(1, 9, (side, side)).astype(np.float32)
    np.testing.assert_array_equal(program.simulate(distances), shortest_paths(distances))


def halved(values):
    """A few numbers changed a little in each step, of all of which each device wants a sum."""
    step = lambda h, _: (h * jnp.tanh(h.sum()), None)  # noqa: E731
    return lax.scan(step, values, None, length=50)[0]


def test_work_is_not_shared_where_that_costs_more():
    """Gathered once, all numbers are on every device: no sum is sent in fifty steps."""
    hints = {"in_shardings": P("d"), "out_shardings": P("d")}
    program = mw.jit(halved, mesh=N8, **hints).partition(f32(16))
    assert [(str(c.kind), c.count) for c in program.collectives] == [("all_gather", 1)]


def test_a_gradient_of_a_diagonal_is_not_made_whole_on_every_device():
    """Its sum over rows would need no exchange of 512 bytes then."""

    def loss(scores):
        return -jnp.diag(jax.nn.log_softmax(scores, 0)).mean()

    hints = {"in_shardings": P("d"), "out_shardings": P("d")}
    program = mw.jit(jax.grad(loss), mesh=N8, **hints).partition(f32(128, 128))
    made = {v.aval.shape for eqn in program.per_device.jaxpr.jaxpr.eqns for v in eqn.outvars}
    assert (16, 128) in made
    assert (128, 128) not in made
    assert program.wire_bytes == (2 + 2 + 1) * 512 * 7 / 8  # two sums of 128, and a gather


def gradient_of_layers(w, x):
    def loss(w):
        return (lax.scan(lambda h, w: (h @ w @ w.T, None), x, w)[0] ** 2).mean()

    return jax.grad(loss)(w)


@pytest.mark.parametrize("columns", [96, 100], ids=["even", "uneven"])
def test_what_layers_keep_lies_in_columns_that_do_not_divide(columns):
    """A part of them is a little larger for its padding, and is not moved to rows and back."""
    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=s).astype(np.float32) / 9 for s in ((4, 64, columns), (48, 64)))
    hints = {"in_shardings": (P(None, None, "d"), P("d")), "out_shardings": P(None, None, "d")}
    program = mw.jit(gradient_of_layers, mesh=N8, **hints).partition(w, x)
    assert program.wire_bytes == (3 + 2) * 4 * 7 / 8 * 48 * 64 * 4
    np.testing.assert_allclose(
        program.simulate(w, x), gradient_of_layers(w, x), rtol=1e-3, atol=1e-6
    )


def accumulated(weights, batches):
    """Gradients of layers, added up over microbatches."""

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        return (lax.scan(layer, x, weights)[0] ** 2).mean()

    def add(total, x):
        return total + jax.grad(loss)(weights, x), None

    return lax.scan(add, jnp.zeros_like(weights), batches)[0]


def test_what_loops_carry_and_stack_is_held():
    """Gradients are scattered in each step: once at the end, a device would hold them whole, twice.

    That would send a quarter less, and hold three times as much.
    """
    sharded = P(None, "d")
    step = mw.jit(accumulated, mesh=N8, in_shardings=(sharded, P(None, "d")), out_shardings=sharded)
    program = step.partition(f32(4, 128, 128), f32(4, 512, 128))
    layers, steps, weight = 4, 4, 128 * 128 * 4
    assert program.wire_bytes == 3 * steps * layers * weight * 7 / 8
    assert peak_memory(program.jaxpr, {"d": 8}).temporary_bytes < 2 * layers * weight


def scanned(weights, x):
    """Layers of two products each."""

    def layer(x, both):
        up, down = both
        return x + jax.nn.relu(x @ up) @ down, None

    return (lax.scan(layer, x, weights)[0] ** 2).mean()


def test_sums_of_rows_that_are_stacked_are_reduced_in_the_loop():
    """After it fewer collectives send as many bytes, but a device holds both stacks twice."""
    shapes = f32(6, 64, 128), f32(6, 128, 64)
    specs = P(None, None, "y"), P(None, "y")
    step = mw.jit(jax.grad(scanned), mesh=N24, in_shardings=(specs, P("x")), out_shardings=specs)
    program = step.partition(shapes, f32(32, 64))
    reduced = [c for c in program.collectives if c.axes == ("x",)]
    assert [(c.count, math.prod(c.shape)) for c in reduced] == [(6, 64 * 32)] * 2
    stacks = 2 * 6 * 64 * 128 * 4 // 4
    assert peak_memory(program.jaxpr, {"x": 2, "y": 4}).temporary_bytes < stacks


def test_parts_of_what_is_laid_otherwise_are_no_more_than_parts():
    """All of a vector is gathered, and each device cuts its part of two of them joined."""
    rolled = mw.jit(jnp.roll, mesh=N8, in_shardings=(P("d"), P()), out_shardings=P("d"))
    vector = 2**16 * 4
    plan = rolled.partition(f32(2**16), jax.ShapeDtypeStruct((), jnp.int32)).plan
    graph = build_graph(plan.program, plan.rules, plan.completion, GENERIC)
    placed = [plan.equations[node.members[0].equation].strategy.axes for node in graph.nodes]
    held = peak_bytes(Search(graph, placed))
    assert vector < held < 1.2 * (vector + vector // 8)
