"""Pretended devices: cut operands into shards, run a local rule on each, join the results.

Local programs are evaluated with numpy; where `compiled` is said, by XLA, which takes far longer.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import JaxprEqn, Literal, make_jaxpr_over_axes, scan_counts
from meshwise.ir.factors import FactorRule, Strategy, operand_sharding, result_sharding
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Reduction, Sharding, local_shape, padded_shape
from meshwise.rules.identity import reduction_identity
from meshwise.rules.registry import REGISTRY, LocalContext, OpRule
from tests.fuzz.evaluate.collectives import Grid
from tests.fuzz.evaluate.keys import keys_of, words_of
from tests.fuzz.evaluate.run import run as run_with_numpy

JOIN = {
    Reduction.SUM: np.add,
    Reduction.PROD: np.multiply,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.AND: np.logical_and,
    Reduction.OR: np.logical_or,
}
# Compiling takes most of the time of these tests.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Coordinates = tuple[int, ...]


def coordinates(mesh: Mesh) -> list[Coordinates]:
    """Every device, by its index along each axis."""
    return list(itertools.product(*(range(n) for n in mesh.sizes)))


def raw(value: Any) -> np.ndarray:
    """A value as a numpy array; of keys, their words as one more dim."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def _like(array: np.ndarray, aval: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(array), dtype=aval.dtype)
    return jnp.asarray(array, aval.dtype)


def garbage(dtype: Any, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """What padding may hold: NaN, or integers that are no position of anything."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if jax.dtypes.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        wild = np.array([info.min, info.max, 3, info.max // 2], dtype)
        return np.asarray(rng.choice(wild, shape))
    return np.full(shape, np.nan, dtype)


def cut(
    array: np.ndarray, sharding: Sharding, mesh: Mesh, fills: Sequence[Any] = ()
) -> dict[Coordinates, np.ndarray]:
    """The shard of each device; padding along dim `d` is `fills[d]`, or garbage where None."""
    rank = len(sharding.dims)
    shape = (*padded_shape(array.shape[:rank], sharding, mesh), *array.shape[rank:])
    padded = garbage(array.dtype, shape)
    for d, fill in enumerate(fills):
        if fill is not None:
            padded[(slice(None),) * d + (slice(array.shape[d], None),)] = fill
    padded[tuple(slice(n) for n in array.shape)] = array
    local = local_shape(array.shape[:rank], sharding, mesh)
    held: dict[Coordinates, np.ndarray] = {}  # devices that hold the same hold one object
    found = {}
    for device in coordinates(mesh):
        box = _box(sharding, local, mesh, device)
        found[device] = held.setdefault(tuple(s.start for s in box), padded[box])
    return found


def _box(
    sharding: Sharding, local: Sequence[int], mesh: Mesh, device: Coordinates
) -> tuple[slice, ...]:
    place = dict(zip(mesh.names, device, strict=True))
    box = []
    for axes, n in zip(sharding.dims, local, strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.axis_size[axis] + place[axis]
        box.append(slice(index * n, (index + 1) * n))
    return tuple(box)


def split(
    eqn: JaxprEqn, rule: OpRule, strategy: Strategy, mesh: Mesh, operands: Sequence[Any]
) -> list[dict[Coordinates, np.ndarray]]:
    """The shards of every operand, its padding masked where the rule asks for it."""
    factors = rule.factors
    found = []
    for o, value in enumerate(operands):
        sharding = operand_sharding(factors, strategy, o)
        masked = rule.masked is None or o in rule.masked
        fills = [
            _fill(factors, strategy, dim, value.dtype) if masked else None
            for dim in factors.operands[o]
        ]
        found.append(cut(raw(value), sharding, mesh, fills))
    return found


def _fill(rule: FactorRule, strategy: Strategy, dim: tuple[int, ...], dtype: Any) -> Any:
    reduced = rule.reduction_of.keys() - rule.permuted  # the local rule masks those itself
    if len(dim) == 1 and dim[0] in reduced and strategy.axes[dim[0]]:
        return reduction_identity(rule.reduction_of[dim[0]], dtype)
    return None


def run(
    eqn: JaxprEqn,
    rule: OpRule,
    strategy: Strategy,
    mesh: Mesh,
    shards: Sequence[dict[Coordinates, np.ndarray]],
    compiled: bool = False,
) -> list[dict[Coordinates, np.ndarray]]:
    """The local results of every device; a list of results, each a map from devices."""
    context = LocalContext(eqn, rule.factors, strategy, mesh)
    compute = rule.local or LocalContext.bind

    def local(*operands: Any) -> list[Any]:
        return list(compute(context, *operands))

    types = []
    for shard, atom in zip(shards, eqn.invars, strict=True):
        shape = next(iter(shard.values())).shape
        inner = len(_key_words(atom.aval.dtype))
        types.append(jax.ShapeDtypeStruct(shape[: len(shape) - inner], atom.aval.dtype))
    closed = make_jaxpr_over_axes(local, list(zip(mesh.names, mesh.sizes, strict=True)), types)
    for i, aval in enumerate(closed.out_avals):
        assert aval.shape == context.local_result_shape(i), (aval, context.local_result_shape(i))
        assert aval.dtype == eqn.outvars[i].aval.dtype, (aval, eqn.outvars[i].aval)
    dtypes = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    if not compiled and all(_key_words(d) in ((), (2,)) for d in dtypes):
        return _run_with_numpy(closed, mesh, eqn, shards)
    return (_run_together if _exchanges(closed.jaxpr) else _run_alone)(closed, mesh, eqn, shards)


@functools.cache
def _key_words(dtype: Any) -> tuple[int, ...]:
    """The dim that a key's words are in an array of raw words; none of numbers."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return ()
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape


def _run_with_numpy(
    closed: Any, mesh: Mesh, eqn: JaxprEqn, shards: Sequence[dict[Coordinates, Any]]
) -> list[dict[Coordinates, np.ndarray]]:
    """All devices in step; each equation once for every different set of operands."""
    values = []
    for shard, atom in zip(shards, eqn.invars, strict=True):
        is_key = bool(_key_words(atom.aval.dtype))
        held = {id(x): keys_of(x) if is_key else x for x in shard.values()}
        values.append([held[id(x)] for x in shard.values()])
    with np.errstate(all="ignore"):
        grid = Grid(tuple(mesh.names), tuple(mesh.sizes))
        results = run_with_numpy(closed.jaxpr, closed.consts, values, grid)
    found = []
    for arrays, var in zip(results, eqn.outvars, strict=True):
        words = [words_of(x) for x in arrays] if _key_words(var.aval.dtype) else arrays
        found.append(dict(zip(coordinates(mesh), words, strict=True)))
    return found


def _run_alone(
    closed: Any, mesh: Mesh, eqn: JaxprEqn, shards: Sequence[dict[Coordinates, Any]]
) -> list[dict[Coordinates, np.ndarray]]:
    """One device after the other, its position given as numbers."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def on_device(place: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
        environment = _bound(closed, operands)
        for local_eqn in closed.jaxpr.eqns:
            if local_eqn.primitive.name == "axis_index":
                environment[local_eqn.outvars[0]] = place[local_eqn.params["axis_name"]]
            else:
                _step(local_eqn, environment)
        return [_read(environment, v) for v in closed.jaxpr.outvars]

    found: list[dict[Coordinates, np.ndarray]] = [{} for _ in eqn.outvars]
    for device in coordinates(mesh):
        place = dict(zip(mesh.names, np.asarray(device, np.int32), strict=True))
        args = [_like(s[device], a.aval) for s, a in zip(shards, eqn.invars, strict=True)]
        for result, value in zip(found, on_device(place, args), strict=True):
            result[device] = raw(value)
    return found


def _run_together(
    closed: Any, mesh: Mesh, eqn: JaxprEqn, shards: Sequence[dict[Coordinates, Any]]
) -> list[dict[Coordinates, np.ndarray]]:
    """All devices in step, so that they can send to each other."""
    environments = {}
    for device in coordinates(mesh):
        args = [_like(s[device], a.aval) for s, a in zip(shards, eqn.invars, strict=True)]
        environments[device] = _bound(closed, args)
    _run_in_step(closed.jaxpr.eqns, environments, mesh)
    outs = closed.jaxpr.outvars
    return [{d: raw(_read(e, v)) for d, e in environments.items()} for v in outs]


def _run_in_step(
    eqns: Sequence[JaxprEqn], environments: dict[Coordinates, Any], mesh: Mesh
) -> None:
    for eqn in eqns:
        if eqn.primitive.name in COLLECTIVES:
            _collect(eqn, environments, mesh)
            continue
        if eqn.primitive.name == "scan" and _exchanges(eqn.params["jaxpr"].jaxpr):
            _loop(eqn, environments, mesh)
            continue
        for device, environment in environments.items():
            if eqn.primitive.name == "axis_index":
                index = device[mesh.names.index(eqn.params["axis_name"])]
                environment[eqn.outvars[0]] = np.int32(index)
            else:
                _step(eqn, environment)


def _exchanges(jaxpr: Any) -> bool:
    """Whether devices send to each other, in loops too."""
    return any(
        eqn.primitive.name in COLLECTIVES
        or (eqn.primitive.name == "scan" and _exchanges(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )


def _loop(eqn: JaxprEqn, environments: dict[Coordinates, Any], mesh: Mesh) -> None:
    """The trips of a loop that neither reads nor makes stacks, one after the other."""
    body, (consts, carried) = eqn.params["jaxpr"], scan_counts(eqn)
    assert carried == len(eqn.outvars) == len(eqn.invars) - consts
    given = {d: [_read(e, a) for a in eqn.invars] for d, e in environments.items()}
    for _ in range(eqn.params["length"]):
        inside = {d: _bound(body, operands) for d, operands in given.items()}
        _run_in_step(body.jaxpr.eqns, inside, mesh)
        for device, environment in inside.items():
            made = [_read(environment, v) for v in body.jaxpr.outvars]
            given[device] = [*given[device][:consts], *made]
    for device, environment in environments.items():
        environment.update(zip(eqn.outvars, given[device][consts:], strict=True))


def _collect(eqn: JaxprEqn, environments: dict[Coordinates, Any], mesh: Mesh) -> None:
    """One collective: the terms of each group in order, and what each device makes of them."""
    named = eqn.params.get("axis_name", eqn.params.get("axes"))
    axes = named if isinstance(named, tuple) else (named,)
    if eqn.primitive.name == "ppermute":  # counts devices in the order of the mesh
        axes = tuple(a for a in mesh.names if a in axes)
    positions = [mesh.names.index(a) for a in axes]
    places = list(itertools.product(*(range(mesh.sizes[p]) for p in positions)))
    for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
        sent = {d: raw(_read(e, atom)) for d, e in environments.items()}
        for device, environment in environments.items():
            group = [sent[_at(device, positions, place)] for place in places]
            me = places.index(tuple(device[p] for p in positions))
            received = COLLECTIVES[eqn.primitive.name](group, me, eqn.params)
            environment[out] = np.asarray(received, out.aval.dtype)


def _at(device: Coordinates, positions: Sequence[int], place: Coordinates) -> Coordinates:
    peer = list(device)
    for p, index in zip(positions, place, strict=True):
        peer[p] = index
    return tuple(peer)


def _all_gather(group: list[np.ndarray], me: int, params: dict[str, Any]) -> np.ndarray:
    join = np.concatenate if params["tiled"] else np.stack
    return join(group, params["all_gather_dimension"])


def _ppermute(group: list[np.ndarray], me: int, params: dict[str, Any]) -> np.ndarray:
    senders = [s for s, r in params["perm"] if r == me]
    return group[senders[0]] if senders else np.zeros_like(group[me])


def _all_to_all(group: list[np.ndarray], me: int, params: dict[str, Any]) -> np.ndarray:
    split, concat = params["split_axis"], params["concat_axis"]
    if params["tiled"]:
        return np.concatenate([np.split(x, len(group), split)[me] for x in group], concat)
    return np.stack([np.take(x, me, split) for x in group], concat)


def _reduce_scatter(group: list[np.ndarray], me: int, params: dict[str, Any]) -> np.ndarray:
    total, dim = np.add.reduce(group), params["scatter_dimension"]
    return np.split(total, len(group), dim)[me] if params["tiled"] else np.take(total, me, dim)


COLLECTIVES = {
    "all_gather": _all_gather,
    "ppermute": _ppermute,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "psum": lambda group, me, params: np.add.reduce(group),
    "pmax": lambda group, me, params: np.maximum.reduce(group),
    "pmin": lambda group, me, params: np.minimum.reduce(group),
}


def _bound(closed: Any, operands: Sequence[Any]) -> dict[Any, Any]:
    variables = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
    return dict(zip(variables, (*closed.consts, *operands), strict=True))


def _read(environment: dict[Any, Any], atom: Any) -> Any:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, atom.aval.dtype)
    return environment[atom]


def _step(eqn: JaxprEqn, environment: dict[Any, Any]) -> None:
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*(_read(environment, v) for v in eqn.invars), **params)
    results = results if eqn.primitive.multiple_results else [results]
    environment.update(zip(eqn.outvars, results, strict=True))


def join(
    local: dict[Coordinates, np.ndarray], shape: Sequence[int], sharding: Sharding, mesh: Mesh
) -> np.ndarray:
    """The global value; what is replicated must be the same on all devices."""
    rank = len(sharding.dims)
    sample = next(iter(local.values()))
    whole = garbage(sample.dtype, (*padded_shape(shape, sharding, mesh), *sample.shape[rank:]))
    sizes = local_shape(shape, sharding, mesh)
    held: dict[Any, dict[Coordinates, np.ndarray]] = {}
    for device, value in local.items():
        terms = tuple(c for c, a in zip(device, mesh.names, strict=True) if a in sharding.unreduced)
        box = tuple((s.start, s.stop) for s in _box(sharding, sizes, mesh, device))
        seen = held.setdefault(box, {})
        cropped = value[tuple(slice(max(0, n - b)) for (b, _), n in zip(box, shape, strict=True))]
        if terms in seen:
            np.testing.assert_array_equal(cropped, seen[terms], "replicated values differ")
        seen[terms] = cropped
    for box, terms in held.items():
        values = list(terms.values())
        total = values[0]
        for value in values[1:]:
            total = JOIN[sharding.reduction](total, value).astype(sample.dtype)
        where = tuple(slice(b, b + n) for (b, _), n in zip(box, total.shape, strict=False))
        whole[where] = total
    return whole[tuple(slice(n) for n in shape)]


def split_and_join(
    eqn: JaxprEqn,
    rule: OpRule,
    strategy: Strategy,
    mesh: Mesh,
    operands: Sequence[Any],
    compiled: bool = False,
) -> list[np.ndarray]:
    """The global results of running an equation split by a strategy."""
    local = run(eqn, rule, strategy, mesh, split(eqn, rule, strategy, mesh, operands), compiled)
    return [
        join(values, var.aval.shape, result_sharding(rule.factors, strategy, i), mesh)
        for i, (values, var) in enumerate(zip(local, eqn.outvars, strict=True))
    ]


def on_one_device(
    eqn: JaxprEqn, operands: Sequence[Any], compiled: bool = False
) -> list[np.ndarray]:
    """The results of an equation that is not split."""
    nowhere = refine_mesh((), ())
    whole = OpRule(REGISTRY.describe(eqn).factors)
    strategy = Strategy(((),) * len(whole.factors.sizes))
    shards = [{(): raw(value)} for value in operands]
    return [value[()] for value in run(eqn, whole, strategy, nowhere, shards, compiled)]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Equal to a tolerance for floats, else to the bit; NaN equals NaN."""
    if not jax.dtypes.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected, what)
        return
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    limit = max(tolerance, 16 * float(jnp.finfo(expected.dtype).eps))
    found, expected = found.astype(wide), expected.astype(wide)
    finite = expected[np.isfinite(expected)]
    scale = float(np.max(np.abs(finite))) if finite.size else 1.0
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit * scale, err_msg=what)
