"""The call primitive: what `mw.jit` is to JAX's transformations.

A function under `mw.jit` that is called with traced values becomes one `mw_call` equation, as a
function under `jax.jit` becomes one `jit` equation. It is differentiated, batched and split into
known and unknown parts as a whole; each result is an `mw_call` again, so that every program that
runs was partitioned by meshwise. Its parameters: `jaxpr` (closed, without constants), `in_specs`
and `out_specs` (one a leaf, None where completed), `witness`, a jaxpr that names the mesh's devices
(an enclosing `jax.jit` looks for devices in the jaxprs among an equation's parameters), and
`runner`, a hashable object with

- `run(jaxpr, in_specs, out_specs, args)`: partition and run on devices;
- `function(jaxpr, in_specs, out_specs)`: the partitioned program as a traceable function.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mw_call_p = Primitive("mw_call")
mw_call_p.multiple_results = True

Specs = tuple[Any, ...]


@lru_cache(maxsize=64)
def witness_of(mesh: jax.sharding.Mesh) -> ClosedJaxpr:
    """A jaxpr with a constraint to some mesh in it."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    on_mesh = NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names, auto), PartitionSpec())
    with jax.sharding.use_abstract_mesh(on_mesh.mesh.abstract_mesh):
        return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, on_mesh))(0.0)


def call(
    closed: ClosedJaxpr, in_specs: Sequence[Any], out_specs: Sequence[Any], rest: dict[str, Any],
    args: Sequence[Any],
) -> list[Any]:
    """Bind a closed jaxpr to traced (or concrete) arguments as one call.

    `rest` are the parameters that every call made of this one keeps: `runner` and `witness`.
    """
    consts = list(closed.consts)
    jaxpr = _without_consts(closed)
    specs = (None,) * len(consts) + tuple(in_specs)
    return mw_call_p.bind(
        *consts, *args, jaxpr=jaxpr, in_specs=specs, out_specs=tuple(out_specs), **rest
    )


@_weakref_lru_cache
def _without_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The constants as leading inputs; the same object for the same jaxpr, as caches need."""
    return ClosedJaxpr(_pe.convert_constvars_jaxpr(closed.jaxpr), ())


@mw_call_p.def_impl
def _impl(
    *args: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, runner: Any, **_: Any
) -> Any:
    return runner.run(jaxpr, in_specs, out_specs, args)


@mw_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> Any:
    return jaxpr.out_avals, jaxpr.effects


def _lowered(
    *args: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs, runner: Any, **_: Any
) -> Any:
    return runner.function(jaxpr, in_specs, out_specs)(args)


_mlir.register_lowering(mw_call_p, _mlir.lower_fun(_lowered, multiple_results=True))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, in_specs: Specs,
    out_specs: Specs, **rest: Any,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Primals and tangents in one call; tangents lie as their primals."""
    moving = [type(t) is not _ad.Zero for t in tangents]
    jvp, moving_out = _ad.jvp_jaxpr(jaxpr, moving, instantiate=False)
    specs_in = in_specs + _where(in_specs, moving)
    specs_out = out_specs + _where(out_specs, moving_out)
    outs = mw_call_p.bind(
        *primals, *_where(tangents, moving), jaxpr=jvp, in_specs=specs_in, out_specs=specs_out,
        **rest,
    )
    count = len(out_specs)
    nonzero = iter(outs[count:])
    zeros = [_ad.Zero(a.to_tangent_aval()) for a in jaxpr.out_avals]
    return outs[:count], [next(nonzero) if m else z for m, z in zip(moving_out, zeros, strict=True)]


_ad.primitive_jvps[mw_call_p] = _jvp


def _where(values: Sequence[Any], chosen: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(v for v, c in zip(values, chosen, strict=True) if c)


def _transpose(
    cotangents: Sequence[Any], *args: Any, jaxpr: ClosedJaxpr, in_specs: Specs, out_specs: Specs,
    **rest: Any,
) -> list[Any]:
    """Cotangents of the linear arguments in one call; each lies as its argument."""
    linear = tuple(_ad.is_undefined_primal(a) for a in args)
    given = tuple(type(ct) is not _ad.Zero for ct in cotangents)
    known = [a for a, is_linear in zip(args, linear, strict=True) if not is_linear]
    back = _transposed(jaxpr, linear, given)
    outs = iter(call(
        back,
        [*_where(in_specs, [not x for x in linear]), *_where(out_specs, given)],
        _where(in_specs, linear),
        rest,
        [*known, *_where(cotangents, given)],
    ))
    return [next(outs) if is_linear else None for is_linear in linear]


@_weakref_lru_cache
def _transposed(
    jaxpr: ClosedJaxpr, linear: tuple[bool, ...], given: tuple[bool, ...]
) -> ClosedJaxpr:
    """From the arguments that are not linear and the cotangents to the linear ones' cotangents."""
    function = jaxpr_as_fun(jaxpr)
    known = _where(jaxpr.in_avals, [not x for x in linear])
    structs = [_struct(a) for a in _where(jaxpr.in_avals, linear)]

    def transposed(*values: Any) -> Sequence[Any]:
        constants, cts = values[: len(known)], values[len(known):]

        def of_linear(*moving: Any) -> tuple[Any, ...]:
            left, right = iter(moving), iter(constants)
            merged = [next(left) if is_linear else next(right) for is_linear in linear]
            return _where(function(*merged), given)

        return jax.linear_transpose(of_linear, *structs)(tuple(cts))

    types = [*known, *_where(jaxpr.out_avals, given)]
    return jax.make_jaxpr(transposed)(*[_struct(a) for a in types])


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


_ad.primitive_transposes[mw_call_p] = _transpose


def _partial_eval(trace: Any, *tracers: Any, jaxpr: ClosedJaxpr, in_specs: Specs,
                  out_specs: Specs, **rest: Any) -> list[Any]:
    """Run what is known now; stage the rest as a call that reads the residuals."""
    unknown_in = [not t.is_known() for t in tracers]
    known_in = [not u for u in unknown_in]
    known, unknown, unknown_out, residual_avals = _pe.partial_eval_jaxpr_nounits(
        jaxpr, unknown_in, instantiate=False
    )
    known_out = [not u for u in unknown_out]
    none = (None,) * len(residual_avals)
    outs = call(
        known, _where(in_specs, known_in), _where(out_specs, known_out) + none, rest,
        [t.pval.get_known() for t, k in zip(tracers, known_in, strict=True) if k],
    )
    count = len(outs) - len(residual_avals)
    known_values, residuals = outs[:count], outs[count:]
    inputs = [trace.new_instantiated_const(r) for r in residuals]
    inputs += [t for t, u in zip(tracers, unknown_in, strict=True) if u]
    results = [_pe.JaxprTracer(trace, _pe.PartialVal.unknown(a), None) for a in unknown.out_avals]
    closed = _without_consts(unknown)
    inputs = [trace.new_instantiated_const(c) for c in unknown.consts] + inputs
    params = {
        "jaxpr": closed,
        "in_specs": (None,) * (len(inputs) - sum(unknown_in)) + _where(in_specs, unknown_in),
        "out_specs": _where(out_specs, unknown_out),
        **rest,
    }
    source = source_info_util.current()
    recipe = _pe.new_eqn_recipe(
        trace, inputs, results, mw_call_p, params, closed.effects, source
    )
    for result in results:
        result.recipe = recipe
    values, staged = iter(known_values), iter(results)
    return [next(staged) if u else next(values) for u in unknown_out]


_pe.custom_partial_eval_rules[mw_call_p] = _partial_eval


def _update_params(
    unknown_in: Sequence[bool], needed_in: Sequence[bool], known_out: Sequence[bool],
    staged_out: Sequence[bool], residuals_out: int, residuals_in: int,
    known: dict[str, Any], staged: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Specs of the two halves of a call that rematerialisation cuts."""
    known_in = [not u for u in unknown_in]
    known = {
        **known,
        "in_specs": _where(known["in_specs"], known_in),
        "out_specs": _where(known["out_specs"], known_out) + (None,) * residuals_out,
    }
    staged = {
        **staged,
        "in_specs": (None,) * residuals_in + _where(staged["in_specs"], needed_in),
        "out_specs": _where(staged["out_specs"], staged_out),
    }
    return known, staged


def _partial_eval_custom(*args: Any) -> Any:
    return _pe.closed_call_partial_eval_custom_rule("jaxpr", _update_params, *args)


_pe.partial_eval_jaxpr_custom_rules[mw_call_p] = _partial_eval_custom


def _dce(used_out: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Drop results that nobody uses, and what only they need."""
    if not any(used_out) and not eqn.effects:
        return [False] * len(eqn.invars), None
    jaxpr, used_in = _pe.dce_jaxpr(eqn.params["jaxpr"].jaxpr, used_out)
    params = {
        **eqn.params,
        "jaxpr": ClosedJaxpr(jaxpr, ()),
        "in_specs": _where(eqn.params["in_specs"], used_in),
        "out_specs": _where(eqn.params["out_specs"], used_out),
    }
    kept = eqn.replace(
        invars=list(_where(eqn.invars, used_in)),
        outvars=list(_where(eqn.outvars, used_out)),
        params=params,
        effects=jaxpr.effects,
    )
    return used_in, kept


_pe.dce_rules[mw_call_p] = _dce


def _batch(
    axis_data: Any, values: Sequence[Any], dims: Sequence[Any], *, jaxpr: ClosedJaxpr,
    in_specs: Specs, out_specs: Specs, **rest: Any,
) -> tuple[list[Any], list[Any]]:
    """One call for all: the mapped dim is sharded over `spmd_axis_name`, else completed."""
    batched, dims_out = _batching.batch_jaxpr2(jaxpr, axis_data, tuple(dims))
    specs = [
        tuple(batched_spec(s, d, axis_data.spmd_name) for s, d in zip(each, at, strict=True))
        for each, at in ((in_specs, dims), (out_specs, dims_out))
    ]
    outs = mw_call_p.bind(
        *values, jaxpr=batched, in_specs=specs[0], out_specs=specs[1], **rest
    )
    return outs, dims_out


_batching.fancy_primitive_batchers[mw_call_p] = _batch


def batched_spec(spec: Any, dim: Any, axis_name: Any) -> Any:
    """A hint on a value that gained a dim: sharded over `axis_name`, open where there is none."""
    if spec is None or not isinstance(dim, int):
        return spec
    entries = list(spec.spec if isinstance(spec, NamedSharding) else spec)
    entries += [None] * (dim - len(entries))
    entries.insert(dim, axis_name or PartitionSpec.UNCONSTRAINED)
    batched = PartitionSpec(*entries)
    return NamedSharding(spec.mesh, batched) if isinstance(spec, NamedSharding) else batched

