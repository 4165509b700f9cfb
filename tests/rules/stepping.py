"""Local programs that XLA runs equation by equation: on one pretended device, or on all in step."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import JaxprEqn, Literal, scan_counts
from meshwise.ir.mesh import Mesh

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


def run_alone(
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


def run_together(
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
        if eqn.primitive.name == "scan" and exchanges(eqn.params["jaxpr"].jaxpr):
            _loop(eqn, environments, mesh)
            continue
        for device, environment in environments.items():
            if eqn.primitive.name == "axis_index":
                index = device[mesh.names.index(eqn.params["axis_name"])]
                environment[eqn.outvars[0]] = np.int32(index)
            else:
                _step(eqn, environment)


def exchanges(jaxpr: Any) -> bool:
    """Whether devices send to each other, in loops too."""
    return any(
        eqn.primitive.name in COLLECTIVES
        or (eqn.primitive.name == "scan" and exchanges(eqn.params["jaxpr"].jaxpr))
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
