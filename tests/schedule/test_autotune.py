"""The autotuner: what it finds without being told, by the cost model and by the clock."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.api.autotune import _difference
from meshwise.cost.hardware import CPU
from meshwise.report.schedules import candidates_table
from tests.meshes import mesh_of
from tests.schedule.steps import adam, lamb, random

SIZE = 1 << 16


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (adam, ["reduce_scatter", "all_gather"]),
        (lamb, ["reduce_scatter", "all_reduce", "all_gather"]),
    ],
)
def test_an_optimizer_is_sliced(make, found):
    step = make(SIZE)
    tuned = mw.autotune(step.program, measure="cost", hardware=CPU)
    assert [c.kind.value for c in tuned.program.collectives] == found
    before, after = step.program.per_device, tuned.program.per_device
    assert after.wire_bytes <= before.wire_bytes + 64  # the norms
    lies = [str(s) for s in after.in_shardings]
    assert lies == ["[x, -]", "[-]", "[x]", "[x]"]
    for got, want in zip(tuned.program.simulate(*step.args), step.simulate(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_it_is_deterministic_by_cost():
    texts = {mw.autotune(lamb(SIZE).program, measure="cost", hardware=CPU).script() for _ in "12"}
    assert len(texts) == 1


def test_the_script_is_the_schedule():
    step = lamb(SIZE)
    tuned = mw.autotune(step.program, measure="cost", hardware=CPU)
    again = mw.Schedule(step.program).run(tuned.script())
    assert str(again.program) == str(tuned.program)


def test_many_results_that_would_be_gathered_keep_the_all_reduce():
    """Trap 9: the sum is read whole in more ways than an all_reduce costs."""

    def step(g, a, b, c):
        g = jax.lax.psum(g[0], "x")
        return a * g, b * g, c * g

    args = (random(8, SIZE), random(SIZE), random(SIZE, seed=1), random(SIZE, seed=2))
    specs = (P("x"), P(), P(), P())
    program = mw.SpmdProgram.from_shard_map(step, mesh_of(x=8), specs, (P(),) * 3, *args)
    tuned = mw.autotune(program, measure="cost", states=())
    assert [c.kind.value for c in tuned.program.collectives] == ["all_reduce"]


def test_finalists_are_timed_and_compared(mesh8):
    def step(g, w, m):
        m = 0.9 * m + jax.lax.psum(g[0], "x")
        return w - 0.1 * m, m

    args = (random(8, SIZE), random(SIZE), random(SIZE, seed=1))
    program = mw.SpmdProgram.from_shard_map(step, mesh8, (P("x"), P(), P()), (P(), P()), *args)
    tuned = mw.autotune(
        program, *args, rounds=np.int8(2), finalists=np.int64(2), budget_s=np.float32(60)
    )
    timed = [c for c in tuned.candidates if c.measured_s is not None]
    assert len(timed) >= 2
    assert tuned.best is timed[0]
    assert tuned.original in tuned.candidates or tuned.original.name == "as it is"
    assert not any(c.note for c in tuned.candidates)
    assert "  measured  " in str(tuned)
    found = f"{len(tuned.candidates)} schedules of {tuned.original.schedule.original.name}"
    assert repr(tuned) == f"<{found}, the best {tuned.best!r}>"
    assert repr(tuned.best).startswith(f"<schedule {tuned.best.name}, ")
    assert repr(tuned.best).endswith(" measured>")
    w, m = tuned.program(*args)
    want = program.simulate(*args)
    np.testing.assert_allclose(w, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(m, want[1], rtol=1e-5, atol=1e-6)


def train_step(schedule=None, **shardings):
    optimizer = optax.adam(1e-2)

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    def step(params, state, x, y):
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"w1": random(128, 512), "b1": random(512), "w2": random(512, 64)}
    return step, (params, optimizer.init(params), random(1024, 128), random(1024, 64))


def test_a_training_step_under_jit_keeps_its_state_in_slices(mesh8):
    step, args = train_step()
    options = {"mesh": mesh8, "in_shardings": (P(), None, P("x"), P("x")),
               "out_shardings": (P(), None, None)}  # fmt: skip
    plain, tuned = mw.jit(step, **options), mw.jit(step, **options, schedule="auto")
    (params, state), (wanted, plain_state) = args[:2], args[:2]
    for _ in range(2):
        params, state, value = tuned(params, state, *args[2:])
        wanted, plain_state, wanted_value = plain(wanted, plain_state, *args[2:])
    assert state[0].mu["w1"].sharding.spec == P("x")
    assert params["w1"].sharding.is_fully_replicated
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, wanted
    )


def test_state_is_sliced_where_gradients_come_in_parts(mesh8):
    """Few rows are gathered instead of large gradients summed: no all_reduce is to be split."""
    w = jax.ShapeDtypeStruct((256, 256), np.float32)

    def step(w, m, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * m + gradient
        return w - 0.01 * m, m

    x = jax.ShapeDtypeStruct((64, 256), np.float32)
    options = {"mesh": mesh8, "in_shardings": (P(), None, P("x")), "out_shardings": (P(), None)}
    plain, tuned = (
        mw.jit(step, **options, **more).partition(w, w, x) for more in ({}, {"schedule": "auto"})
    )
    assert "all_reduce" not in {str(c.kind) for c in plain.collectives}
    assert tuned.in_shardings[1].spec == tuned.out_shardings[1].spec == P(None, "x")
    assert tuned.wire_bytes == plain.wire_bytes
    for program, said in ((plain, "completed: no hint"), (tuned, "by its schedule; planned was")):
        w, m, x = (line for line in program.explain().splitlines() if line.startswith("  args["))
        assert "hint P()" in w and said in m and "hint P('x')" in x


def test_a_hint_on_state_holds(mesh8):
    step, args = train_step()
    hinted = mw.jit(
        step,
        mesh=mesh8,
        in_shardings=(P(), P(), P("x"), P("x")),
        out_shardings=(P(), P(), None),
        schedule="auto",
    )
    program = hinted.partition(*args)
    assert all(s.spec == P() for s in jax.tree.leaves(program.in_shardings[1]))
    with pytest.raises(mw.IllegalMove, match="is hinted"):
        s = mw.Schedule(program)
        s.slice_state("args[1][0].mu['w1']", dim=0, axes="x", gathers=True)


def test_a_script_for_jit(mesh8):
    def script(s):
        s.split(s.find("all_reduce")[0])

    fn = mw.jit(
        lambda x: jnp.sum(x, 0),
        mesh=mesh8,
        in_shardings=P("x"),
        out_shardings=P(),
        schedule=script,
    )
    x = random(16, 64)
    program = fn.partition(x)
    assert [c.kind.value for c in program.collectives] == ["reduce_scatter", "all_gather"]
    np.testing.assert_allclose(fn(x), x.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"measure": "luck"}, "measure='luck'"), ({"measure": "time"}, "nothing to run on")],
)
def test_what_cannot_be(options, text):
    with pytest.raises(mw.ArgumentError, match=text):
        mw.autotune(adam().program, **options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda args: args[:2], r"called with \(\*, \*\)"),
        (lambda args: ({"a": args[0]}, *args[1:]), "called with .*'a'"),
        (lambda args: (args[0][:, :3], *args[1:]), r"float32\[8,3\], wanted is float32\[8,64\]"),
        (lambda args: ("abc", *args[1:]), "is a str"),
    ],
)
@pytest.mark.parametrize("measure", ["time", "cost"])
def test_arguments_that_do_not_fit_the_program(arguments, text, measure, mesh8):
    def momentum(gradient, weights, mean):
        mean = 0.9 * mean + jax.lax.psum(gradient[0], "x") / 8
        return weights - 0.1 * mean, mean

    given = random(8, 64), jax.ShapeDtypeStruct((64,), "float32"), random(64)
    specs = (P("x"), P(), P()), (P(), P())
    program = mw.SpmdProgram.from_shard_map(momentum, mesh8, *specs, *given)
    with pytest.raises(mw.ArgumentError, match=text):
        mw.autotune(program, *arguments(given), measure=measure)


def test_a_sum_over_steps_is_reduced_after_the_loop():
    def step(batches, w):
        def one(total, batch):
            return total + jax.lax.psum(batch @ w, "x"), None

        return jax.lax.scan(one, jnp.zeros((64, 64)), batches)[0]

    args = (random(4, 64, 256), random(256, 64))
    specs = (P(None, None, "x"), P("x"))
    program = mw.SpmdProgram.from_shard_map(step, mesh_of(x=8), specs, P(), *args)
    tuned = mw.autotune(program, measure="cost", hardware=CPU)
    assert tuned.program.wire_bytes == program.wire_bytes // 4
    assert "s.hoist(" in tuned.script()
    np.testing.assert_allclose(
        tuned.program.simulate(*args), program.simulate(*args), rtol=1e-4, atol=1e-4
    )


def test_a_sum_that_is_cut_is_scattered():
    def step(x, w):
        y = jax.lax.psum(x @ w, "x")
        return jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index("x") * 512, 512, 0) * 2

    args = (random(4096, 64), random(64, 32))
    program = mw.SpmdProgram.from_shard_map(
        step, mesh_of(x=8), (P(None, "x"), P("x")), P("x"), *args
    )
    tuned = mw.autotune(program, measure="cost", hardware=CPU)
    assert [c.kind.value for c in tuned.program.collectives] == ["reduce_scatter"]
    np.testing.assert_allclose(
        tuned.program.simulate(*args), program.simulate(*args), rtol=1e-4, atol=1e-4
    )


def test_tensors_are_cut_along_dims_of_their_own():
    """One dim for all would pad some of them, and send more than the all_reduce."""

    def step(g, w, m):
        g = jax.tree.map(lambda x: jax.lax.psum(x[0], "x"), g)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m

    f32 = jax.ShapeDtypeStruct
    shapes = {"q": (12, 64000), "w": (64000, 12)}
    whole = {k: f32(s, jnp.float32) for k, s in shapes.items()}
    terms = {k: f32((8, *s), jnp.float32) for k, s in shapes.items()}
    specs = (P("x"), P(), P())
    program = mw.SpmdProgram.from_shard_map(
        step, mesh_of(x=8), specs, (P(), P()), terms, whole, whole
    )
    tuned = mw.autotune(program, measure="cost", hardware=CPU, states=("m['q']", "m['w']"))
    assert tuned.program.wire_bytes == program.wire_bytes
    assert [str(s) for s in tuned.program.per_device.in_shardings[-2:]] == ["[-, x]", "[x, -]"]


def test_a_result_of_two_gathered_values_is_not_cut_twice():
    def step(a, b):
        return jnp.concatenate([jax.lax.psum(a[0], "x"), jax.lax.psum(b[0], "x").T], 0)

    args = random(8, 64, 64), random(8, 64, 64, seed=1)
    specs = (P("x"), P("x"))
    program = mw.SpmdProgram.from_shard_map(step, mesh_of(x=8), specs, P(), *args)
    tuned = mw.autotune(program, measure="cost", hardware=CPU)
    np.testing.assert_allclose(
        tuned.program.simulate(*args), program.simulate(*args), rtol=1e-5, atol=1e-5
    )


def test_states_that_are_none_are_refused():
    with pytest.raises(mw.ArgumentError, match="'wieghts' is no argument"):
        mw.autotune(adam().program, measure="cost", states=["wieghts"])


@pytest.mark.parametrize(("given", "text"), [([], "no values"), (["all_reduce"], "takes handles")])
def test_moves_take_handles(given, text):
    with pytest.raises(mw.ArgumentError, match=text):
        mw.Schedule(adam().program).split(given)


def test_a_script_goes_on_with_the_slices_it_made(mesh8):
    """The second step's state lies in slices: that is no other program to be moved again."""

    def step(w, mean, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        mean = 0.9 * mean + gradient
        return w - 0.01 * mean, mean

    def script(s):
        _, gathered = s.split(s.find("all_reduce")[0])
        s.reorder(gathered, more_bytes=True)
        s.slice_state("args[1]")

    options = {"mesh": mesh8, "in_shardings": (None, None, P("x"))}
    plain, moved = mw.jit(step, **options), mw.jit(step, **options, schedule=script)
    w, mean, x = random(16, 500), random(16, 500, seed=1), random(4096, 16)
    found, wanted = (w, mean), (w, mean)
    for _ in range(3):
        found, wanted = moved(*found, x), plain(*wanted, x)
    assert found[1].sharding.spec == P("x")
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def momentum_in_slices(s):
    _, gathered = s.split(s.find("all_reduce")[0])
    s.reorder(gathered, more_bytes=True)
    s.slice_state("args[2]")


@pytest.mark.parametrize("schedule", ["auto", momentum_in_slices])
def test_a_program_does_not_depend_on_what_was_partitioned_before(mesh8, schedule):
    """State in slices, as a checkpoint holds it, is that of the schedule whoever made it."""

    def of_fresh(*calls):
        def step(x, w, mean):
            mean = 0.9 * mean + x.mean(0)
            return w - 0.1 * mean, mean

        f = mw.jit(step, mesh=mesh8, in_shardings=(P("x"), None, None), schedule=schedule)
        return [f.partition(*args) for args in calls][-1]

    size = 1 << 17
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, size), (size,), (size,))]
    specs = P("x"), P(), P("x")
    placed = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh8, spec))
        for t, spec in zip(types, specs, strict=True)
    ]
    alone, after = of_fresh(placed), of_fresh(types, placed)
    assert [p.spec for p in alone.in_shardings] == list(specs)
    assert alone.out_shardings == after.out_shardings
    assert str(alone) == str(after)


def test_state_is_gone_on_with_where_its_owner_laid_a_part_of_it(mesh8):
    """Where a part lies in slices of its own, the others are still those of the schedule."""

    def step(x, w, mean, total):
        mean = 0.9 * mean + x.mean(0)
        return w - 0.1 * mean, mean, total + (x * x).sum(0)

    options = {"mesh": mesh8, "in_shardings": (P("x"), None, None, None)}
    moved = mw.jit(step, **options, schedule=momentum_in_slices)
    x, w, mean, total = random(8, 64), *(random(64, seed=n) for n in range(3))
    put = [jax.device_put(a, NamedSharding(mesh8, s)) for a, s in ((w, P()), (total, P("x")))]
    found, wanted = (put[0], mean, put[1]), (w, mean, total)
    for _ in range(3):
        found, wanted = moved(x, *found), jax.jit(step)(x, *wanted)
        assert [f.sharding.spec for f in found] == [P(), P("x"), P("x")]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_results_with_infinities_are_compared_in_the_rest():
    wanted = [np.array([1.0, np.inf, np.nan], np.float32)]
    assert not _difference([np.array([1 + 1e-7, np.inf, np.nan], np.float32)], wanted)
    assert _difference([np.array([5.0, np.inf, np.nan], np.float32)], wanted)
    assert _difference([np.array([1.0, 3.0, np.nan], np.float32)], wanted)


def test_a_table_shows_what_is_known_and_is_no_wider_than_a_page():
    names = [", ".join(["bucket all_gather(data*model)"] * n) for n in (1, 7)]
    rows = [(name, 1.5e-3, None, 2048.0, 3, 4096, "sends more") for name in names]
    assert candidates_table(rows) == [
        "  predicted     sent  launches  peak memory  schedule",
        "   1,500 us  2.0 KiB         3      4.0 KiB  bucket all_gather(data*model) (sends more)",
        "   1,500 us  2.0 KiB         3      4.0 KiB  bucket all_gather(data*model), bucket",
        *[" " * 45 + "all_gather(data*model), bucket all_gather(data*model),"],
        *[" " * 45 + "bucket all_gather(data*model), bucket"],
        *[" " * 45 + "all_gather(data*model), bucket all_gather(data*model),"],
        *[" " * 45 + "bucket all_gather(data*model) (sends more)"],
    ]
