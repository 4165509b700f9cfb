"""Explicit axes: types, values, shardings and errors are those of `jax.jit`.

Every function is called under `jax.jit` and under `mw.jit`, with the same arrays on the same mesh,
and under `jax.jit` on a mesh of one device, where nothing is partitioned. What the function saw of
types inside is compared too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    auto_axes,
    explicit_axes,
    reshard,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

import meshwise as mw

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
XY = dict.fromkeys("xy", EXPLICIT)
MIXED = {"x": EXPLICIT, "y": AUTO}
AUTO_XY = dict.fromkeys("xy", AUTO)


def make(kinds, count=2):
    """A mesh of `count` devices along each axis."""
    shape = (count,) * len(kinds)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(kinds), axis_types=tuple(kinds.values()))


def array(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(dtype)


SEEN = []


def see(x):
    """Note a value's type, and whether it speaks of the mesh in context."""
    mesh = jax.typeof(x).sharding.mesh
    SEEN.append((str(jax.typeof(x)), mesh == jax.sharding.get_abstract_mesh()))
    return x


def bare(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def anew(jit):
    """The same of functions that JAX has not seen yet: by function it keeps what it traced."""

    def of(fn=None, **options):
        return partial(of, **options) if fn is None else jit(partial(fn), **options)

    return of


def run(jit, kinds, function, arrays, count=2):
    """Results, and what the function saw, on a mesh in context."""
    SEEN.clear()
    with jax.set_mesh(make(kinds, count)):
        out = function(anew(jit), *[jax.device_put(a, spec) for a, spec in arrays])
    return out, list(dict.fromkeys(SEEN))


def agrees(kinds, function, arrays):
    got, seen = run(mw.jit, kinds, function, arrays)
    wanted, wanted_seen = run(jax.jit, kinds, function, arrays)
    truth, _ = run(jax.jit, kinds, function, arrays, count=1)
    assert seen == wanted_seen
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    leaves = zip(*map(jax.tree.leaves, (got, wanted, truth)), strict=True)
    for ours, theirs, whole in leaves:
        assert str(jax.typeof(ours)) == str(jax.typeof(theirs))
        assert ours.sharding == theirs.sharding
        for other in (theirs, whole):
            np.testing.assert_allclose(bare(ours), bare(other), rtol=2e-5, atol=2e-5)


def applied(fn):
    """Call the function under jit, twice: the second time from C++."""

    def call(jit, *args):
        step = jit(fn)
        step(*args)
        return step(*args)

    return call


def matmul(spec):
    return lambda a, b: see(jnp.einsum("ij,jk->ik", see(a), see(b), out_sharding=spec))


def scanned(carry, xs):
    def body(carry, x):
        y = jnp.einsum("ij,jk->ik", see(carry), see(x), out_sharding=P(None, "y"))
        return jnp.einsum("ij,jk->ik", jnp.tanh(y), x.T, out_sharding=P(None, "x")), see(y)

    return lax.scan(body, carry, xs)


def loops(x):
    doubled = lax.while_loop(lambda c: c.sum() < 100, lambda c: see(c) * 2, x)
    counted = lax.fori_loop(0, 3, lambda i, c: c + i, x)
    return doubled, counted, lax.cond(x.sum() > 3, lambda x: x * 2, lambda x: x - 1, see(x))


@jax.custom_vjp
def odd_sine(x):
    return jnp.sin(x)


odd_sine.defvjp(lambda x: (jnp.sin(x), see(x)), lambda x, g: (2 * see(g) * jnp.cos(x),))


def gathered(table, tokens):
    out = table.at[tokens].get(out_sharding=P("x", None, None))
    return see(out), table.at[tokens, :].get(out_sharding=P("x", None, "y"))


def at_positions(x, i):
    return x.at[:, i].add(5.0), jax.vmap(lambda row, j: row.at[j].set(2.0))(x, reshard(i, P("x")))


def drawn(key):
    shape = (8, 4)
    return (
        jax.random.normal(key, shape, out_sharding=P("x", "y")),
        jax.random.bits(key, shape, out_sharding=P("y")),
        jax.random.randint(key, shape, 0, 9, out_sharding=P("x")),
        jax.random.permutation(key, 8, out_sharding=P("x")),
        jax.random.split(key, 4),
        jax.random.fold_in(key, 3),
    )


def made(x):
    return (
        jnp.zeros(x.shape, out_sharding=P("x")),
        jnp.arange(8, dtype=jnp.float32, out_sharding=P(("x", "y"))),
        lax.broadcasted_iota(jnp.int32, (8, 2), 0, out_sharding=P("x", "y")),
        jnp.broadcast_to(x[0], (4, 4), out_sharding=P("y", "x")),
        lax.full_like(x, 3),
        jnp.ones((3, 5)),
        reshard(np.arange(4.0, dtype=np.float32), P("y")),
    )


def shaped(x):
    return (
        see(jnp.expand_dims(x, 1)),
        jnp.transpose(x)[None],
        jnp.squeeze(see(x[:, :, None, None]), (2, 3)),
        jnp.reshape(x, (2, 16), out_sharding=P("x", "y")),
        jnp.ravel(x, out_sharding=P("y")),
        jnp.repeat(x, 2, axis=1, out_sharding=P("x")),
        jnp.tile(reshard(x, P()), (1, 2)),
        lax.split(x, (4, 4), axis=0) if jax.typeof(x).sharding.spec[0] is None else x,
    )


def reduced(x):
    return (
        see(x.sum(0)),
        x.max(1),
        x.mean(),
        jnp.argmax(x, 0),
        jax.nn.softmax(x, axis=0),
        jnp.cumsum(reshard(x, P(None, "y")), 0),
        jnp.sort(reshard(x, P("x", None)), 1),
        jnp.argsort(reshard(x, P("x", None)), 1),
        lax.reduce_window(x, -np.inf, lax.max, (2, 1), (2, 1), "SAME"),
    )


def by_auto_axes(x):
    @partial(auto_axes, axes="x", out_sharding=P("x", None))
    def partly(y):
        return jnp.einsum("ij,kj->ik", see(jnp.sin(y)), y, out_sharding=P(None, None))

    wholly = auto_axes(lambda y: see(y @ y.T), out_sharding=P("x"))
    return see(partly(x * 2)), wholly(x)


def by_explicit_axes(x):
    @partial(explicit_axes, in_sharding=P("x", "y"))
    def wholly(y):
        return see(jnp.einsum("ij,kj->ik", see(y), jnp.sin(y), out_sharding=P("x", None)))

    partly = explicit_axes(lambda y: see(y) * 2, axes="y", in_sharding=P(None, "y"))
    return see(wholly(x * 2)), partly(x)


def in_other_meshes(x):
    mesh = jax.sharding.get_abstract_mesh()
    with use_abstract_mesh(mesh.update_axis_types({"x": AUTO, "y": AUTO})):
        y = reshard(x, P(None, None))
        y = y @ y.T
    other = mesh.update(axis_sizes=(mesh.size, 1), axis_names=("a", "b"))
    with use_abstract_mesh(other):
        z = see(jnp.sin(reshard(y, P(("a", "b"), None))) * 2)
    return reshard(y, P("x", None)), z, reshard(z, P("y", None))


def in_a_region(x):
    whole = jax.shard_map(lambda a: lax.psum(a.sum(1), "y"), in_specs=P("x", "y"), out_specs=P("x"))
    partly = jax.shard_map(lambda a: a * 3, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    return see(whole(x)), see(partly(x))


def unreduced(a, b):
    partial_sum = jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", unreduced={"y"}))
    return reshard(see(partial_sum + partial_sum), P("x"))


def constrained(x):
    return lax.with_sharding_constraint(x * 2, P("x", "y")), jax.device_put(x, P("y"))


SQUARE = (array(8, 4), P("x", "y"))
ROWS = (array(8, 4), P("x"))
INDICES = np.array([3, 0, 1, 1, 2, 3, 0, 2])

FUNCTIONS = {
    "elementwise": (XY, lambda x, y: see(see(x) * y + 1), [SQUARE, (array(1, 4), P())]),
    "product of rows and columns": (
        XY,
        lambda a, b: see(a @ b),
        [ROWS, (array(4, 6), P(None, "y"))],
    ),
    "product, gathered": (XY, lambda a, b: see(a @ b), [ROWS, (array(4, 6), P("x"))]),
    "product, as said": (XY, matmul(P("y")), [SQUARE, (array(4, 6), P("x", "y"))]),
    "product, summed": (XY, matmul(P("x", None)), [SQUARE, (array(4, 6), P("y", "x"))]),
    "dot": (XY, partial(jnp.dot, out_sharding=P("x")), [SQUARE, (array(4, 6), P("x", "y"))]),
    "shapes": (XY, shaped, [(array(8, 4), P(None, "y"))]),
    "reductions": (XY, reduced, [SQUARE]),
    "scan": (
        XY,
        scanned,
        [(array(2, 4) / 9, P(None, "x")), (array(3, 4, 4) / 9, P(None, "x", "y"))],
    ),
    "loops": (XY, loops, [SQUARE]),
    "gather": (XY, gathered, [(array(16, 4), P(None, "y")), (INDICES.reshape(4, 2), P("x"))]),
    "scatter": (XY, at_positions, [ROWS, (INDICES, P())]),
    "random": (XY, drawn, [(jax.random.key(1), P())]),
    "made inside": (XY, made, [(array(8, 4), P())]),
    "pads, slices, joins": (
        XY,
        lambda x: (lax.pad(x, 0.0, ((2, 2, 0), (0, 0, 0))), x[:, 1:3], jnp.concatenate([x, x], 1)),
        [ROWS],
    ),
    "dynamic slices": (
        XY,
        lambda x, i: (
            lax.dynamic_slice_in_dim(x, i, 2, axis=1),
            lax.dynamic_update_slice_in_dim(x, x[:, :1], i, axis=1),
        ),
        [ROWS, (np.int32(1), P())],
    ),
    "convolution": (
        XY,
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        [(array(4, 8, 3), P("x", "y")), (array(3, 3, 5), P())],
    ),
    "decompositions": (
        XY,
        lambda a: jnp.linalg.slogdet(a + 4 * jnp.eye(3)),
        [(array(8, 3, 3), P("x"))],
    ),
    "auto_axes": (XY, by_auto_axes, [SQUARE]),
    "explicit_axes": (AUTO_XY, by_explicit_axes, [SQUARE]),
    "other meshes": (XY, in_other_meshes, [SQUARE]),
    "regions": (XY, in_a_region, [SQUARE]),
    "unreduced": (XY, unreduced, [SQUARE, (array(4, 6), P("y", None))]),
    "constraints": (XY, constrained, [SQUARE]),
    "callbacks": (
        XY,
        lambda x: x + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        [SQUARE],
    ),
    "of the host": (XY, lambda x: see(x) * np.float32(2) + np.ones((8, 4), np.float32), [SQUARE]),
    "mixed": (MIXED, lambda x, y: see(jnp.sin(x) @ y), [SQUARE, (array(4, 6), P("y"))]),
    "mixed, minor": (MIXED, lambda x: see(x) * 2, [(array(8, 4), P(("x", "y")))]),
    "mixed, major": (MIXED, lambda x: see(x) * 2, [(array(8, 4), P(("y", "x")))]),
    "mixed, constrained": (MIXED, lambda x: lax.with_sharding_constraint(x, P("y")), [ROWS]),
    "mixed, resharded": (MIXED, lambda x: see(reshard(x, P(None, "x"))), [SQUARE]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    kinds, fn, arrays = FUNCTIONS[name]
    agrees(kinds, applied(fn), arrays)


def loss(fn):
    return lambda *args: sum(jnp.sum(jnp.square(out)) for out in jax.tree.leaves(fn(*args)))


def gradients(jit, fn, *args):
    step = jit(loss(fn))
    return (
        jax.grad(step)(*args),
        jit(jax.grad(step))(*args),
        jax.value_and_grad(loss(jit(fn)))(*args),
    )


def forward(jit, fn, *args):
    step = jit(fn)
    return jax.jvp(step, args, args), jax.linearize(step, *args)[1](*args)


def mapped(jit, fn, *args):
    stacked = [jnp.stack([a] * 3) for a in args]
    return jax.vmap(jit(fn))(*stacked), jit(jax.vmap(jit(fn), out_axes=1))(*stacked)


def nested(jit, fn, *args):
    inner = jit(fn)
    return jit(lambda *args: jax.tree.map(see, inner(*args)))(*args), jax.jit(inner)(*args)


def rematerialised(jit, fn, *args):
    return jax.grad(jit(jax.checkpoint(loss(fn))))(*args)


def ahead_of_time(jit, fn, *args):
    step = jit(fn)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in args]
    compiled = step.lower(*structs).compile()
    SEEN.extend(map(str, jax.tree.leaves(jax.eval_shape(step, *structs))))
    SEEN.extend(s.spec for s in jax.tree.leaves(compiled.output_shardings))
    SEEN.extend(map(str, jax.make_jaxpr(step)(*args).out_avals))
    return compiled(*args)


def to_placements(jit, fn, *args):
    return jit(fn, out_shardings=P("y"))(*args), jit(fn, out_shardings=None)(*args)


WAYS = {
    w.__name__: w
    for w in (gradients, forward, mapped, nested, rematerialised, ahead_of_time, to_placements)
}
CROSSED = {
    "elementwise": WAYS,
    "product, summed": WAYS,
    "gather": ("nested", "ahead_of_time"),
    "scan": ("gradients", "mapped", "rematerialised"),
    "auto_axes": ("gradients", "mapped", "nested"),
    "mixed, constrained": ("gradients", "mapped", "ahead_of_time"),
    "unreduced": ("gradients", "nested"),
    "other meshes": ("nested", "ahead_of_time"),
    "pads, slices, joins": ("gradients",),
    "random": ("nested",),
}


LONG = {
    ("random", "nested"),
    ("scan", "gradients"),
    ("scan", "mapped"),
    ("scan", "rematerialised"),
    ("auto_axes", "gradients"),
    ("auto_axes", "mapped"),
    ("pads, slices, joins", "gradients"),
}


def marked(*case):
    return pytest.param(*case, marks=[pytest.mark.slow] if case in LONG else [])


@pytest.mark.parametrize(
    ("name", "way"), [marked(n, w) for n, ways in CROSSED.items() for w in ways]
)
def test_ways_of_calling(name, way):
    kinds, fn, arrays = FUNCTIONS[name]
    agrees(kinds, lambda jit, *args: WAYS[way](jit, fn, *args), arrays)


def custom_rules(jit, x):
    return jax.grad(jit(lambda x: odd_sine(x).sum()))(x), jit(jax.grad(loss(odd_sine)))(x)


def mapped_over_a_sharded_dim(jit, x):
    inner = jit(lambda row: see(jnp.sin(see(row)) * 2))
    twice = jit(jax.vmap(lambda row: reshard(row, P(None))))
    return jax.vmap(inner)(x), twice(x), jax.vmap(inner, in_axes=1, out_axes=1)(x)


def transposed(jit, x):
    linear = jit(lambda x: reshard(x, P(None, "x")) * 3)
    return jax.linear_transpose(linear, x)(reshard(x, P(None, "x")))


def twice_differentiated(jit, x):
    step = jit(loss(jnp.sin))
    return jax.grad(lambda x: jax.grad(step)(x).sum())(x)


def trained(jit, w):
    @partial(jit, donate_argnums=0)
    def step(w):
        return jax.tree.map(
            lambda v, g: v - 0.1 * g, w, jax.grad(lambda w: loss(jnp.tanh)(w["a"]))(w)
        )

    state = {"a": w}
    for _ in range(3):
        state = step(state)
    return state


def closed_over(jit, x):
    return jit(lambda y: see(y * x + x.sum(0)))(x), jit(lambda: see(x) * 2)()


def of_the_host(jit, x):
    host = np.asarray(x)
    return [
        jit(lambda x: see(x) * 2)(host),
        jit(lambda x: see(x) * 2, in_shardings=P("x"))(host),
        jit(lambda x: see(x) * 2)(3.0),
        jit(lambda x, y: x + y)(x, host),
        jit(lambda x: x, out_shardings=P("y"))(host),
    ]


def outside(jit, x):
    matmul = jit(lambda x: see(x) @ x.T)
    late = auto_axes(jit(lambda x: x * 2))
    return auto_axes(matmul, out_sharding=P("x", "y"))(x), late(x, out_sharding=P("y"))


def of_keys(jit, x):
    keys = reshard(jax.random.split(jax.random.key(0), 8), P("x"))
    return (
        jit(jax.vmap(lambda key: jax.random.normal(key, (3,))))(keys),
        jit(see)(keys),
        jit(lambda: reshard(jax.random.key(5), P()))(),
    )


CALLS = {
    "custom rules": (XY, custom_rules, [SQUARE]),
    "vmap over a sharded dim": (XY, mapped_over_a_sharded_dim, [SQUARE]),
    "linear_transpose": (XY, transposed, [SQUARE]),
    "grad of grad": (XY, twice_differentiated, [SQUARE]),
    "a training loop": (XY, trained, [SQUARE]),
    "a mixed training loop": (MIXED, trained, [SQUARE]),
    "closed over": (XY, closed_over, [SQUARE]),
    "arrays of the host": (XY, of_the_host, [ROWS]),
    "under auto_axes": (XY, outside, [SQUARE]),
    "keys": (XY, of_keys, [SQUARE]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    agrees(*CALLS[name])


REFUSED = {
    "two shardings of one dim": (XY, lambda x, y: x * y, [SQUARE, (array(8, 4), P("y", "x"))]),
    "an ambiguous sum": (XY, jnp.matmul, [SQUARE, (array(4, 6), P("y"))]),
    "another ambiguous sum": (XY, jnp.matmul, [SQUARE, (array(4, 6), P("x"))]),
    "a slice of a sharded dim": (XY, lambda x: x[:3], [ROWS]),
    "a pad of a sharded dim": (XY, lambda x: jnp.pad(x, ((0, 1), (0, 0))), [ROWS]),
    "a split of a sharded dim": (XY, lambda x: lax.split(x, (3, 5)), [ROWS]),
    "a join of two shardings": (XY, lambda *x: jnp.concatenate(x), [SQUARE, ROWS]),
    "an ambiguous reshape": (XY, lambda x: jnp.reshape(x, (2, 16)), [ROWS]),
    "a select of two": (XY, lambda x, y: jnp.where(x > 0, x, y), [SQUARE, (array(8, 4), P("y"))]),
    "a carry that moves": (
        XY,
        lambda x: lax.scan(lambda c, _: (reshard(c, P()), None), x, None, length=2),
        [ROWS],
    ),
    "steps of a sharded dim": (XY, lambda x: lax.scan(lambda c, x: (c, x), 0, x), [ROWS]),
    "branches that differ": (
        XY,
        lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: reshard(x, P()), x),
        [ROWS],
    ),
    "a constraint that does not hold": (
        XY,
        lambda x: lax.with_sharding_constraint(x, P("y")),
        [ROWS],
    ),
    "an Auto axis in a type": (
        MIXED,
        lambda x: jnp.einsum("ij->i", jnp.sin(x), out_sharding=P("y")),
        [ROWS],
    ),
    "an uneven dim": (XY, lambda x: reshard(x[:, :3], P(None, "y")), [ROWS]),
    "no such axis": (XY, lambda x: reshard(x, P("z")), [ROWS]),
    "an axis twice": (XY, lambda x: reshard(x, P("x", "x")), [ROWS]),
    "a region's axes": (
        XY,
        jax.shard_map(auto_axes(lambda a: a, out_sharding=P()), in_specs=P("x"), out_specs=P("x")),
        [ROWS],
    ),
    "unreduced over another axis": (
        XY,
        lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=P(None, unreduced={"x"})),
        [(array(8, 4), P(None, "y")), (array(4, 6), P("y"))],
    ),
    "dims mapped together": (XY, jax.vmap(lambda x, y: x * y), [ROWS, (array(8, 4), P("y"))]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_jax_refuses(name):
    kinds, fn, arrays = REFUSED[name]
    with pytest.raises(Exception) as theirs:
        run(jax.jit, kinds, applied(fn), arrays)
    for call in (applied(fn), lambda jit, *args: jit(jax.jit(jit(fn)))(*args)):
        with pytest.raises(theirs.type):
            run(mw.jit, kinds, call, arrays)


def refused_alike(call):
    with pytest.raises(Exception) as theirs:
        call(jax.jit)
    with pytest.raises(theirs.type):
        call(mw.jit)


def test_placements_that_do_not_divide():
    """Over Auto axes arrays may be uneven at the boundary; a type cannot say so."""
    odd = np.arange(7.0, dtype=np.float32)
    for options in ({"in_shardings": P("x")}, {"out_shardings": {"a": P(("x", "y"))}}):
        for kinds in (XY, MIXED):
            with jax.set_mesh(make(kinds)):
                refused_alike(lambda jit, options=options: jit(lambda x: {"a": x}, **options)(odd))
    with (
        jax.set_mesh(make(XY)),
        pytest.raises(mw.HintError, match=r"args\[0\]: dim 0 of 7 is sharded"),
    ):
        mw.jit(lambda x: x, in_shardings=P("x"))(odd)


def test_meshes_that_do_not_match():
    explicit, auto, other = make(XY), make(AUTO_XY), make({"z": EXPLICIT, "w": EXPLICIT})
    x = jax.device_put(ROWS[0], NamedSharding(explicit, P("x")))
    on_auto, on_other = (jax.device_put(x, NamedSharding(m, P())) for m in (auto, other))
    add = lambda x, y: x + y  # noqa: E731
    for context in (auto, other):
        with jax.set_mesh(context):
            refused_alike(lambda jit: jit(lambda x: x * 2)(x))
    for y in (on_auto, on_other):
        refused_alike(lambda jit, y=y: jit(add)(x, y))
    with jax.set_mesh(explicit):
        refused_alike(lambda jit: jit(lambda x: x * 2, in_shardings=P("y"))(x))
    key = jax.random.key(0)
    where = NamedSharding(explicit, P("x"))
    with jax.set_mesh(explicit):  # JAX keeps what it traces here, of jax.random too
        mw.jit(lambda k: jax.random.normal(k, (8,), out_sharding=P("x")))(key)
    refused_alike(lambda jit: jit(lambda k: jax.random.normal(k, (8,), out_sharding=where))(key))
    refused_alike(lambda jit: jit(matmul(P("x")))(x, x.T))  # a spec, and no mesh in context


def test_without_a_mesh_in_context():
    mesh = make(XY)
    x, y = (jax.device_put(array(4, 4), NamedSharding(mesh, P(*s))) for s in (("x",), (None, "y")))
    where = NamedSharding(mesh, P("y"))

    def fn(x, y):
        drawn = jax.random.normal(jax.random.key(0), (4, 4), out_sharding=where)
        return see(x @ y) * 2, reshard(x, where) + drawn, auto_axes(jnp.sin, out_sharding=where)(x)

    found = []
    for jit in (jax.jit, mw.jit):
        SEEN.clear()
        outs = anew(jit)(fn)(x, y), auto_axes(jit(jnp.cos), out_sharding=where)(x)
        found.append((jax.tree.leaves(outs), list(SEEN)))
    (theirs, seen_by_theirs), (ours, seen_by_ours) = found
    assert seen_by_theirs == seen_by_ours
    for wanted, got in zip(theirs, ours, strict=True):
        assert wanted.sharding == got.sharding
        np.testing.assert_allclose(wanted, got, rtol=1e-5, atol=1e-5)


def test_results_on_meshes_of_other_kinds():
    explicit, auto = make(XY), make(AUTO_XY)
    x = jax.device_put(ROWS[0], NamedSharding(explicit, P("x")))
    y = jax.device_put(ROWS[0], NamedSharding(auto, P("y")))

    def to_auto(x):
        with use_abstract_mesh(auto.abstract_mesh):
            return reshard(x, P(None, None))

    with jax.set_mesh(explicit):
        for ours, theirs in zip(
            *[jit(lambda x, y: (x, y))(x, y) for jit in (mw.jit, jax.jit)], strict=True
        ):
            assert ours.sharding == theirs.sharding
        assert mw.jit(to_auto)(x).sharding.mesh == auto


def test_the_axes_of_a_mesh_that_is_given_are_completions():
    mesh = make(XY)
    SEEN.clear()
    step = mw.jit(lambda x: see(x) * 2, mesh=mesh, in_shardings=P("x"))
    for _ in range(2):
        assert step(ROWS[0]).sharding == NamedSharding(mesh, P("x"))
    assert [seen for seen, _ in SEEN] == ["float32[8,4]"]


def test_types_hold_on_a_mesh_that_is_given_where_the_function_speaks_of_them():
    mesh = make(XY)
    SEEN.clear()
    step = mw.jit(lambda x: reshard(see(x), P(None, "y")), mesh=mesh, in_shardings=P("x"))
    for _ in range(2):
        assert step(ROWS[0]).sharding == NamedSharding(mesh, P(None, "y"))
    assert SEEN[-1] == ("float32[8@x,4]", True)


def test_intermediate_values_are_partitioned_freely():
    """A type says where a value lies for the user; only results and what is asked for are held."""
    mesh = make({"x": EXPLICIT})

    def fn(x, w):
        hidden = jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=P(None, None)))
        return reshard(hidden, P("x"))

    with jax.set_mesh(mesh):
        x, w = jax.device_put(array(8, 4), P("x")), jax.device_put(array(4, 6), P())
        program = mw.jit(fn).partition(x, w)
        assert not program.collectives
        assert mw.jit(fn)(x, w).sharding == jax.jit(fn)(x, w).sharding
