"""Pretended devices: cut operands into shards, run a local rule on each, join the results.

Local programs are evaluated with numpy; where `compiled` is said, by XLA, which takes far longer.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import JaxprEqn, make_jaxpr_over_axes
from meshwise.ir.factors import FactorRule, Strategy, operand_sharding, result_sharding
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Reduction, Sharding, local_shape, padded_shape
from meshwise.rules.identity import reduction_identity
from meshwise.rules.registry import REGISTRY, LocalContext, OpRule
from tests.fuzz.evaluate.collectives import Grid
from tests.fuzz.evaluate.keys import keys_of, words_of
from tests.fuzz.evaluate.run import run as run_with_numpy
from tests.rules.stepping import Coordinates, coordinates, exchanges, raw, run_alone, run_together

JOIN = {
    Reduction.SUM: np.add,
    Reduction.PROD: np.multiply,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.AND: np.logical_and,
    Reduction.OR: np.logical_or,
}


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
    closed = make_jaxpr_over_axes(local, mesh.named_sizes, types)
    for i, aval in enumerate(closed.out_avals):
        assert aval.shape == context.local_result_shape(i), (aval, context.local_result_shape(i))
        assert aval.dtype == eqn.outvars[i].aval.dtype, (aval, eqn.outvars[i].aval)
    dtypes = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    if not compiled and all(_key_words(d) in ((), (2,)) for d in dtypes):
        return _run_with_numpy(closed, mesh, eqn, shards)
    return (run_together if exchanges(closed.jaxpr) else run_alone)(closed, mesh, eqn, shards)


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
        grid = Grid(tuple(mesh.names), tuple(mesh.sizes), cuts_inside=bool(mesh.names))
        results = run_with_numpy(closed.jaxpr, closed.consts, values, grid)
    found = []
    for arrays, var in zip(results, eqn.outvars, strict=True):
        words = [words_of(x) for x in arrays] if _key_words(var.aval.dtype) else arrays
        found.append(dict(zip(coordinates(mesh), words, strict=True)))
    return found


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
