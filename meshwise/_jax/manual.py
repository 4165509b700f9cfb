"""Functions of local arrays as `jax.shard_map` traces them, and their jaxprs in plain collectives.

Under `check_vma` JAX's types say over which axes a value varies, and derivatives taken inside go by
that: the gradient of a value that all devices share is summed over them. The traced body then holds
variants of collectives and casts between such types; here they become the plain ones, which mean
the same where nobody asks for types, over the axes of the program that they end up in: each axis
is some of these, in order, and one of a single device is none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

from meshwise._jax.bodies import call_body, constraint_of, scan_counts
from meshwise._jax.control import kept_at_their_end
from meshwise._jax.environment import value_in
from meshwise._jax.hints import hint_p
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    at_source,
    bind,
    literal_value,
    opened,
    source_summary,
)
from meshwise._jax.specs import axes_of
from meshwise._jax.tracing import make_jaxpr_over_axes, without_mesh


class Names(dict[str, tuple[str, ...]]):
    """The axes of the program around that each axis is, and the order of all of these.

    A trace does not know the order of its axes: to JAX environments that differ in it are equal.
    """

    def __init__(self, names: Mapping[str, tuple[str, ...]], order: Sequence[str]):
        """`order` is that of the mesh."""
        super().__init__(names)
        self.order = tuple(order)


def shard_map_jaxpr(
    function: Callable[..., Any],
    axes: Mapping[str, int],
    in_specs: Any,
    out_specs: Any,
    args: Sequence[Any],
    local: Sequence[Any],
    check_vma: bool,
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of a function of local arrays, of types `local`, and the tree of its results."""
    auto = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    with without_mesh():
        closed, shapes = jax.make_jaxpr(mapped, return_shape=True)(*args)
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]
    if len(closed.jaxpr.eqns) != 1:
        raise NotImplementedError("a shard_map with equations around it")
    body = eqn.params["jaxpr"]
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    order = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    made: dict[Any, int] = {var: i for i, var in enumerate(eqn.outvars)}

    def per_device(*leaves: Any) -> list[Any]:
        given = [_operand(a, leaves, order, consts) for a in eqn.invars]
        outs = run_local(body, getattr(body, "consts", ()), given, names)
        return [
            outs[made[a]] if a in made else _operand(a, leaves, order, consts)
            for a in closed.jaxpr.outvars
        ]

    wide = [(name, size) for name, size in axes.items() if size > 1]
    own = {name: (name,) if size > 1 else () for name, size in axes.items()}
    names = Names(own, [name for name, _ in wide])
    return make_jaxpr_over_axes(per_device, wide, local), jax.tree.structure(shapes)


def _operand(
    atom: Any, leaves: Sequence[Any], order: Mapping[Any, int], consts: Mapping[Any, Any]
) -> Any:
    if isinstance(atom, Literal):
        return literal_value(atom)
    return leaves[order[atom]] if atom in order else consts[atom]


def run_local(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    names: Names,
    call: JaxprEqn | None = None,
) -> list[Any]:
    """A jaxpr's results, its collectives plain; what knows no line of the user has its call's.

    `names` are the axes of the program around that each axis of the jaxpr is.
    """
    inner = opened(jaxpr)
    env: dict[Var, Any] = dict(zip(inner.constvars, consts, strict=True))
    env.update(zip(inner.invars, args, strict=True))

    read = partial(value_in, env)

    for eqn in inner.eqns:
        unknown = call is not None and source_summary(eqn) == "unknown"
        with at_source(call if unknown and call is not None else eqn):
            results = _apply(eqn, [read(a) for a in eqn.invars], names)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in inner.outvars]


def _apply(eqn: JaxprEqn, args: Sequence[Any], names: Names) -> list[Any]:
    name = eqn.primitive.name
    if name == "shard_map":
        return run_region(region_of(eqn), args, names)
    if name in _CASTS or eqn.primitive is hint_p or constraint_of(eqn) is not None:
        return list(args)
    body = call_body(eqn)
    if body is not None:
        if body.recomputed and args:  # or it would be merged with what it recomputes
            args = lax.optimization_barrier(list(args))
        return run_local(body.jaxpr, body.consts, args, names, eqn)
    if name in _LOOPS:
        return _LOOPS[name](eqn, args, names)
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    over = named if isinstance(named, tuple) else (named,)
    if any(a in names for a in over if isinstance(a, str)):
        return _collective(eqn, args, names, over)
    return bind(eqn, args)


_CASTS = frozenset(
    {"pvary", "pcast", "reduced_vary_cast", "unreduced_vary_cast", "mesh_cast", "preduced"}
)


def _collective(eqn: JaxprEqn, args: Sequence[Any], names: Names, over: Sequence[Any]) -> list[Any]:
    """A collective over the axes of the program around that its own are."""
    name, params = eqn.primitive.name.removesuffix("_invariant"), eqn.params
    if name == "ppermute":
        over = [a for a in names if a in over]
    kept = tuple([sub for a in over for sub in names.get(a, (a,))])
    if not kept:
        return _ALONE[name](params, *args) if name in _ON_ALL else [_ALONE[name](params, *args)]
    if name == "ppermute":
        return _permuted(params, kept, args, names)
    if name in _BY_NAME:
        return _BY_NAME[name](params, kept, args)
    key = "axes" if "axes" in params else "axis_name"
    is_one = len(kept) == 1 and not isinstance(params[key], tuple)
    changed = kept[0] if is_one else kept
    return bind(eqn, args, {**params, key: changed})


def _summed(params: Any, axes: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    groups = params.get("axis_index_groups")
    return [lax.psum(x, tuple(axes), axis_index_groups=groups) for x in args]


def _gathered(params: Any, axes: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    options = {"axis": params["all_gather_dimension"], "tiled": params["tiled"]}
    groups = params.get("axis_index_groups")
    return [lax.all_gather(x, tuple(axes), axis_index_groups=groups, **options) for x in args]


def _numbered(params: Any, axes: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return [lax.axis_index(tuple(axes) if len(axes) > 1 else axes[0])]


def _permuted(params: Any, axes: Sequence[Any], args: Sequence[Any], names: Names) -> list[Any]:
    """Its devices are numbered in the order of the mesh's axes, whatever that of the tuple."""
    sizes = {a: lax.axis_size(a) for a in axes}
    order = [a for a in names.order if a in sizes]
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[a] for a in order])
    own = numbers.transpose([order.index(a) for a in axes]).ravel().tolist()
    perm = [(own[a], own[b]) for a, b in params["perm"]]
    return [lax.ppermute(x, tuple(order) if len(order) > 1 else order[0], perm) for x in args]


_BY_NAME: Mapping[str, Callable[..., list[Any]]] = {
    "psum": _summed,
    "all_gather": _gathered,
    "axis_index": _numbered,
}
_ON_ALL = frozenset({"psum", "pmax", "pmin"})


def _gathered_alone(params: Any, x: Any) -> Any:
    return x if params["tiled"] else lax.expand_dims(x, (params["all_gather_dimension"],))


def _scattered_alone(params: Any, x: Any) -> Any:
    return x if params["tiled"] else lax.squeeze(x, (params["scatter_dimension"],))


def _placed_alone(x: Any, into: Any, start: Any, size: Any, at: Any, received: Any) -> Any:
    """The rows that a device sends itself, in their places of another array."""
    del received  # as many as are sent
    rows = jax.numpy.arange(into.shape[0])
    offset = rows - at[0]
    taken = x[jax.numpy.clip(offset + start[0], 0, x.shape[0] - 1)]
    is_own = (offset >= 0) & (offset < size[0])
    return jax.numpy.where(is_own.reshape((-1,) + (1,) * (into.ndim - 1)), taken, into)


# What collectives do where there is one device.
_ALONE: Mapping[str, Callable[..., Any]] = {
    "psum": lambda params, *xs: list(xs),
    "pmax": lambda params, *xs: list(xs),
    "pmin": lambda params, *xs: list(xs),
    "axis_index": lambda params: jax.numpy.zeros((), "int32"),
    "ppermute": lambda params, x: x if params["perm"] else jax.numpy.zeros_like(x),
    "all_gather": _gathered_alone,
    "reduce_scatter": _scattered_alone,
    "all_to_all": lambda params, x: x,
    "pbroadcast": lambda params, x: x,
    "ragged_all_to_all": lambda params, x, into, *rows: _placed_alone(x, into, *rows),
}


def _scan(eqn: JaxprEqn, args: Sequence[Any], names: Names) -> list[Any]:
    params = eqn.params
    first, carried = scan_counts(eqn)
    body = params["jaxpr"]
    consts, carry, rows = args[:first], args[first : first + carried], args[first + carried :]

    def step(carry: Any, row: Any) -> tuple[list[Any], list[Any]]:
        outs = run_local(body, body.consts, [*consts, *carry, *row], names)
        return outs[:carried], outs[carried:]

    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    last, stacked = lax.scan(step, list(carry), list(rows), **options)
    return [*last, *stacked]


def _while(eqn: JaxprEqn, args: Sequence[Any], names: Names) -> list[Any]:
    params = eqn.params
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    test_consts, body_consts = args[:tests], args[tests : tests + bodies]

    def goes_on(carry: Sequence[Any]) -> Any:
        return run_local(test, test.consts, [*test_consts, *carry], names)[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        return run_local(body, body.consts, [*body_consts, *carry], names)

    def any_goes_on(carry: Sequence[Any]) -> Any:
        return jax.numpy.any(goes_on(carry))

    def step_of_some(carry: Sequence[Any]) -> list[Any]:
        return kept_at_their_end(goes_on(carry), step(carry), carry)

    start = list(args[tests + bodies :])
    are_many = bool(test.out_avals[0].shape)  # as `vmap` makes them
    functions = (any_goes_on, step_of_some) if are_many else (goes_on, step)
    return list(lax.while_loop(*functions, start))


def _cond(eqn: JaxprEqn, args: Sequence[Any], names: Names) -> list[Any]:
    branches = [
        lambda *operands, b=b: run_local(b, b.consts, operands, names)
        for b in eqn.params["branches"]
    ]
    return list(lax.switch(args[0], branches, *args[1:]))


_LOOPS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], Names], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


@dataclass(frozen=True)
class Region:
    """A `jax.shard_map` equation: its body, and the axes of each dim of operands and results.

    `axes` are the mesh's axes that become manual in it, with their sizes.
    """

    body: Any
    axes: tuple[tuple[str, int], ...]
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]


def region_of(eqn: JaxprEqn) -> Region:
    """What a `shard_map` equation says."""
    params = eqn.params
    mesh = params["mesh"]
    axes = [(a, mesh.shape[a]) for a in mesh.axis_names if a in params["newly_manual_axes"]]
    wide = frozenset(a for a, size in axes if size > 1)

    def dims(specs: Sequence[Any], atoms: Sequence[Any]) -> Any:
        return tuple([_dims(s, a.aval, wide) for s, a in zip(specs, atoms, strict=True)])

    operands, results = dims(params["in_specs"], eqn.invars), dims(params["out_specs"], eqn.outvars)
    return Region(params["jaxpr"], tuple(axes), operands, results)


def _dims(spec: Any, aval: Any, wide: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    named = axes_of(spec, len(aval.shape))
    return tuple([tuple([a for a in own if a in wide]) for own in named])


def run_region(
    region: Region, args: Sequence[Any], names: Names, held: frozenset[str] = frozenset()
) -> list[Any]:
    """What a region computes, in a program where every axis is manual.

    Operands and results are sharded over the axes `held` and replicated over the region's others:
    there each device takes its block of an operand, and results are gathered.
    """
    blocks = [
        _own_block(x, dims, names, held) for x, dims in zip(args, region.operands, strict=True)
    ]
    consts = getattr(region.body, "consts", ())
    outs = run_local(region.body, consts, blocks, names)
    return [_whole(x, dims, names, held) for x, dims in zip(outs, region.results, strict=True)]


def _own_block(x: Any, dims: Sequence[Sequence[str]], names: Names, held: frozenset[str]) -> Any:
    for dim, own in enumerate(dims):
        axes = [sub for a in own if a not in held for sub in names[a]]
        if axes:
            size = x.shape[dim] // math.prod(lax.axis_size(a) for a in axes)
            start = lax.axis_index(tuple(axes)) * size
            x = lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)
    return x


def _whole(x: Any, dims: Sequence[Sequence[str]], names: Names, held: frozenset[str]) -> Any:
    for dim, own in enumerate(dims):
        axes = tuple([sub for a in own if a not in held for sub in names[a]])
        if axes:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x
