"""Functions of local arrays as `jax.shard_map` traces them, and their jaxprs in plain collectives.

Under `check_vma` JAX's types say over which axes a value varies, and derivatives taken inside go by
that: the gradient of a value that all devices share is summed over them. The traced body then holds
variants of collectives and casts between such types; here they become the plain ones, which mean
the same where nobody asks for types, and axes of one device are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

from meshwise._jax.bodies import call_body, scan_counts
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
from meshwise._jax.tracing import make_jaxpr_over_axes, without_mesh


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
        outs = _run(body, getattr(body, "consts", ()), given, axes)
        return [
            outs[made[a]] if a in made else _operand(a, leaves, order, consts)
            for a in closed.jaxpr.outvars
        ]

    wide = [(name, size) for name, size in axes.items() if size > 1]
    return make_jaxpr_over_axes(per_device, wide, local), jax.tree.structure(shapes)


def _operand(
    atom: Any, leaves: Sequence[Any], order: Mapping[Any, int], consts: Mapping[Any, Any]
) -> Any:
    if isinstance(atom, Literal):
        return literal_value(atom)
    return leaves[order[atom]] if atom in order else consts[atom]


def _run(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    axes: Mapping[str, int],
    call: JaxprEqn | None = None,
) -> list[Any]:
    """A jaxpr's results, its collectives plain; what knows no line of the user has its call's."""
    inner = opened(jaxpr)
    env: dict[Var, Any] = dict(zip(inner.constvars, consts, strict=True))
    env.update(zip(inner.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return literal_value(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        unknown = call is not None and source_summary(eqn) == "unknown"
        with at_source(call if unknown and call is not None else eqn):
            results = _apply(eqn, [read(a) for a in eqn.invars], axes)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in inner.outvars]


def _apply(eqn: JaxprEqn, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    name = eqn.primitive.name
    if name == "shard_map":
        raise NotImplementedError("a shard_map in a shard_map")
    if name in _CASTS:
        return list(args)
    body = call_body(eqn)
    if body is not None:
        return _run(body.jaxpr, body.consts, args, axes, eqn)
    if name in _LOOPS:
        return _LOOPS[name](eqn, args, axes)
    plain = _PLAIN.get(name)
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    over = named if isinstance(named, tuple) else (named,)
    if any(a in axes for a in over if isinstance(a, str)):
        return _collective(eqn, args, axes, over, plain or name)
    return bind(eqn, args)


_CASTS = frozenset({"pvary", "pcast", "reduced_vary_cast", "unreduced_vary_cast"})
_PLAIN = {"psum_invariant": "psum", "all_gather_invariant": "all_gather"}


def _collective(
    eqn: JaxprEqn, args: Sequence[Any], axes: Mapping[str, int], over: Sequence[Any], name: str
) -> list[Any]:
    """A collective over the axes that have more than one device."""
    kept = tuple([a for a in over if not isinstance(a, str) or axes[a] > 1])
    params = eqn.params
    if name == "psum" and not any(isinstance(a, int) for a in over):
        groups = params.get("axis_index_groups")
        if not kept:
            return list(args)
        return [lax.psum(x, kept, axis_index_groups=groups) for x in args]
    if name == "all_gather" and kept:
        return [
            lax.all_gather(
                args[0],
                kept,
                axis=params["all_gather_dimension"],
                axis_index_groups=params.get("axis_index_groups"),
                tiled=params["tiled"],
            )
        ]
    if kept:
        key = "axes" if "axes" in params else "axis_name"
        changed = kept if isinstance(params[key], tuple) else kept[0]
        return bind(eqn, args, {**params, key: changed})
    return [_ALONE[name](eqn.params, *args)]


def _gathered_alone(params: Any, x: Any) -> Any:
    return x if params["tiled"] else lax.expand_dims(x, (params["all_gather_dimension"],))


def _scattered_alone(params: Any, x: Any) -> Any:
    return x if params["tiled"] else lax.squeeze(x, (params["scatter_dimension"],))


def _exchanged_alone(params: Any, x: Any) -> Any:
    if params["tiled"]:
        return x
    return jax.numpy.moveaxis(x, params["split_axis"], params["concat_axis"])


# What collectives do where there is one device.
_ALONE: Mapping[str, Callable[..., Any]] = {
    "psum": lambda params, x: x,
    "pmax": lambda params, x: x,
    "pmin": lambda params, x: x,
    "axis_index": lambda params: jax.numpy.zeros((), "int32"),
    "ppermute": lambda params, x: x if params["perm"] else jax.numpy.zeros_like(x),
    "all_gather": _gathered_alone,
    "reduce_scatter": _scattered_alone,
    "all_to_all": _exchanged_alone,
}


def _scan(eqn: JaxprEqn, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    params = eqn.params
    first, carried = scan_counts(eqn)
    body = params["jaxpr"]
    consts, carry, rows = args[:first], args[first : first + carried], args[first + carried :]

    def step(carry: Any, row: Any) -> tuple[list[Any], list[Any]]:
        outs = _run(body, body.consts, [*consts, *carry, *row], axes)
        return outs[:carried], outs[carried:]

    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    last, stacked = lax.scan(step, list(carry), list(rows), **options)
    return [*last, *stacked]


def _while(eqn: JaxprEqn, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    params = eqn.params
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    test_consts, body_consts = args[:tests], args[tests : tests + bodies]
    return list(
        lax.while_loop(
            lambda carry: _run(test, test.consts, [*test_consts, *carry], axes)[0],
            lambda carry: _run(body, body.consts, [*body_consts, *carry], axes),
            list(args[tests + bodies :]),
        )
    )


def _cond(eqn: JaxprEqn, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    branches = [
        lambda *operands, b=b: _run(b, b.consts, operands, axes) for b in eqn.params["branches"]
    ]
    return list(lax.switch(args[0], branches, *args[1:]))


_LOOPS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], Mapping[str, int]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
