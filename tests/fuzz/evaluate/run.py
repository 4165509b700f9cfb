"""Walk a jaxpr: each equation once for every different set of operands.

A value is a list with one array a device; devices that hold the same hold the same object, so
what is replicated is computed once. One device is a mesh without axes. Keys are 64-bit words.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import Literal
from tests.fuzz.evaluate.collectives import COLLECTIVES, Arrays, Grid, apply_collective
from tests.fuzz.evaluate.control import CONTROLS, apply_control
from tests.fuzz.evaluate.elementwise import ELEMENTWISE, cast
from tests.fuzz.evaluate.indexing import INDEXING
from tests.fuzz.evaluate.keys import KEYS, keys_of, words_of
from tests.fuzz.evaluate.matrices import MATRICES
from tests.fuzz.evaluate.shape import SHAPE
from tests.fuzz.evaluate.windows import WINDOWS

FUNCTIONS = {**ELEMENTWISE, **SHAPE, **INDEXING, **KEYS, **WINDOWS, **MATRICES}
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# What is rounded otherwise where it is added up in another order.
ROUNDED = (
    "reduce_sum",
    "dot_general",
    "conv_general_dilated",
    "cumsum",
    "scatter-add",
    "reduce_prod",
)
CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "closed_call")


def evaluate(
    closed: Any,
    args: Sequence[Any],
    noise: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[np.ndarray]:
    """What one device computes; with noise, what is added up is rounded otherwise."""
    with np.errstate(all="ignore"):
        values = [[on_host(a)] for a in args]
        one = Grid((), (), noise)
        return [v[0] for v in run(closed.jaxpr, closed.consts, values, one)]


def on_host(array: Any) -> np.ndarray:
    """An array as the walk has it."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return keys_of(np.asarray(jax.random.key_data(array)))
    return np.asarray(array)


def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    """The results of a jaxpr on every device of a grid."""
    known: dict[Any, Arrays] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        known[var] = [on_host(const)] * grid.count
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Arrays:
        if isinstance(atom, Literal):
            return [np.asarray(atom.val, atom.aval.dtype)] * grid.count
        return known[atom]

    for eqn in jaxpr.eqns:
        name, values = eqn.primitive.name, [read(v) for v in eqn.invars]
        if name in COLLECTIVES or name == "axis_index":
            results = apply_collective(name, eqn.params, values, grid)
        elif name in CONTROLS:
            results = apply_control(run, eqn, values, grid)
        elif name in CALLS:
            body = next(eqn.params[b] for b in BODIES if b in eqn.params)
            inner, held = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
            results = run(inner, held, values, grid)
        else:
            results = _on_every_device(eqn, values, grid)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _on_every_device(eqn: Any, values: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    computed: dict[tuple[int, ...], list[np.ndarray]] = {}
    found: list[list[np.ndarray]] = []
    for device in range(grid.count):
        operands = [v[device] for v in values]
        key = tuple(map(id, operands))
        if key not in computed:
            if grid.cuts_inside and eqn.primitive.name == "dynamic_slice":
                _begins_inside(eqn, operands)
            computed[key] = apply(eqn, operands)
            if grid.noise is not None and eqn.primitive.name in ROUNDED:
                computed[key] = [grid.noise(x) for x in computed[key]]
        found.append(computed[key])
    return [[f[k] for f in found] for k in range(len(eqn.outvars))]


def _begins_inside(eqn: Any, operands: Sequence[np.ndarray]) -> None:
    """XLA brings a slice inside, too, but not where it makes one of two (openxla/xla#49121)."""
    x, *starts = operands
    for start, n, size in zip(starts, x.shape, eqn.params["slice_sizes"], strict=True):
        assert 0 <= start <= n - size, f"a slice of {size} of {n} rows that begins at {start}"


def apply(eqn: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of one equation on one device."""
    name = eqn.primitive.name
    function = FUNCTIONS.get(name)
    given = operands
    if name != "bitcast_convert_type":
        given = [a.astype(np.float32) if _is_narrow(a.dtype) else a for a in operands]
    if function is None:
        found = _by_jax(eqn, operands)
    else:
        try:
            found = function(eqn.params, *given)
        except NotImplementedError:
            found = _by_jax(eqn, operands)
    results = list(found) if isinstance(found, list | tuple) else [found]
    return [_typed(x, v.aval, name) for x, v in zip(results, eqn.outvars, strict=True)]


def _is_narrow(dtype: np.dtype) -> bool:
    return dtype == np.float16 or (dtype.kind == "V" and dtype.names is None)


def _typed(x: Any, aval: Any, name: str) -> np.ndarray:
    x = np.asarray(x)
    assert x.shape == tuple(aval.shape), f"{name}: {x.shape}, not {aval.shape}"
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return x
    return x if x.dtype == aval.dtype else cast(x, aval.dtype)


def _by_jax(eqn: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What is rare is left to JAX, which compiles it."""
    given = []
    for x, v in zip(operands, eqn.invars, strict=True):
        if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended):
            given.append(jax.random.wrap_key_data(jnp.asarray(words_of(x)), dtype=v.aval.dtype))
        else:
            given.append(jnp.asarray(x))
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*given, **params)
    return [on_host(x) for x in (out if eqn.primitive.multiple_results else [out])]
