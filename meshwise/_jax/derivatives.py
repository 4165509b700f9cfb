"""How JAX differentiates a call of `mw.jit`, and splits it in a known and an unknown part.

Tangents and cotangents lie as the values they belong to. Derived jaxprs of a typed one are typed;
others are made over the Auto axes that the call's own was traced over, whatever mesh is in context.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshwise._jax.calls import (
    Specs,
    call,
    mw_call_p,
    setting_of,
    without_consts,
)
from meshwise._jax.explicit import is_typed, plain_type, struct_of
from meshwise._jax.hints import hint_p


def _where(values: Sequence[Any], chosen: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(v for v, c in zip(values, chosen, strict=True) if c)


def _merge(chosen: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    left, right = iter(yes), iter(no)
    return [next(left) if c else next(right) for c in chosen]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return struct_of(aval if is_typed([aval]) else plain_type(aval))


def _zeros_of(primals: Sequence[Any]) -> list[Any]:
    return [_ad_util.Zero(jax.typeof(p).to_tangent_aval()) for p in primals]


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    **rest: Any,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Primals and tangents in one call."""
    moving = [type(t) is not _ad_util.Zero for t in tangents]
    with setting_of(jaxpr, rest["runner"]):
        jvp, moving_out = _ad.jvp_jaxpr(jaxpr, moving, instantiate=False)
    outs = call(
        jvp,
        in_specs + _where(in_specs, moving),
        out_specs + _where(out_specs, moving_out),
        rest,
        [*primals, *_where(tangents, moving)],
    )
    count = len(out_specs)
    return outs[:count], _merge(
        moving_out, outs[count:], _where(_zeros_of(outs[:count]), [not m for m in moving_out])
    )


_ad.primitive_jvps[mw_call_p] = _jvp


def _jet(
    primals: Sequence[Any],
    series: Sequence[Sequence[Any]],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    **rest: Any,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Values and Taylor coefficients (`jax.experimental.jet`) in one call."""
    order = len(series[0])
    given = [*primals, *(term for terms in series for term in terms)]
    with setting_of(jaxpr, rest["runner"]):
        taylor = jax.make_jaxpr(_taylor_of(jaxpr, order))(*map(struct_of, map(jax.typeof, given)))
    terms_in, terms_out = (
        [s for s in specs for _ in range(order)] for specs in (in_specs, out_specs)
    )
    outs = call(taylor, (*in_specs, *terms_in), (*out_specs, *terms_out), rest, given)
    return _with_terms(outs, len(out_specs), order)


def _taylor_of(jaxpr: ClosedJaxpr, order: int) -> Callable[..., list[Any]]:
    """A flat function of values and their coefficients, which are not scaled by factorials."""

    def taylor(*given: Any) -> list[Any]:
        primals, series = _with_terms(given, len(jaxpr.in_avals), order)
        outs, terms = jet.jet(jaxpr_as_fun(jaxpr), primals, series, factorial_scaled=False)
        return [*outs, *(term for own in terms for term in own)]

    return taylor


def _with_terms(flat: Sequence[Any], count: int, order: int) -> tuple[list[Any], list[Any]]:
    terms = flat[count:]
    return list(flat[:count]), [list(terms[k * order : (k + 1) * order]) for k in range(count)]


jet.jet_rules[mw_call_p] = _jet
jet.deflinear(hint_p)


def _linearize(
    is_vjp: bool,
    moving: Sequence[bool],
    *primals: Any,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    **rest: Any,
) -> Any:
    """A call that also returns residuals, and a linear one that reads them."""
    del is_vjp
    with setting_of(jaxpr, rest["runner"]):
        forward, linear, kept, moving_out = _linearized(jaxpr, tuple(moving))
    count = len(out_specs)
    unsaid = (None,) * (len(forward.out_avals) - count)
    outs = call(forward, in_specs, out_specs + unsaid, rest, primals)
    zeros = _zeros_of(outs[:count])
    saved = iter(outs[count:])
    residuals = [next(saved) if k is None else primals[k] for k in kept]

    def linearized(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        made = call(
            linear,
            (None,) * len(residuals) + _where(in_specs, moving),
            _where(out_specs, moving_out),
            rest,
            [*residuals, *map(_ad.instantiate_zeros, _where(tangents, moving))],
        )
        return _merge(moving_out, made, _where(zeros, [not m for m in moving_out]))

    if _LINEARIZED_TAKES_A_TREE:
        return outs[:count], moving_out, residuals, None, lambda r, _, *ts: linearized(r, *ts)
    return outs[:count], moving_out, residuals, linearized


# Since 0.11.1 what a rule returns has residuals of two kinds, the second a tree.
_LINEARIZED_TAKES_A_TREE = jax.__version_info__ >= (0, 11, 1)

_ad.primitive_linearizations[mw_call_p] = _linearize


@_weakref_lru_cache
def _linearized(
    jaxpr: ClosedJaxpr, moving: tuple[bool, ...]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[int | None], list[bool]]:
    """The jaxpr with residuals as further results; the linear one of residuals and tangents.

    Then, for each residual, the input that it is (None for those that are results), and which
    results of the jaxpr have a tangent.
    """
    function = jaxpr_as_fun(jaxpr)
    trees = []

    def forward(*primals: Any) -> list[Any]:
        fixed = _where(primals, [not m for m in moving])
        outs, pushed = jax.linearize(
            lambda *moved: function(*_merge(moving, moved, fixed)), *_where(primals, moving)
        )
        residuals, tree = jax.tree.flatten(pushed)
        trees.append(tree)
        return [*outs, *residuals]

    made = jax.make_jaxpr(forward)(*map(_struct, jaxpr.in_avals))
    count = len(jaxpr.out_avals)
    avals = made.out_avals[count:]
    tangents = [a.to_tangent_aval() for a in _where(jaxpr.in_avals, moving)]

    def push(*values: Any) -> Any:
        pushed = jax.tree.unflatten(trees[-1], values[: len(avals)])
        return pushed(*values[len(avals) :])

    linear = jax.make_jaxpr(push)(*map(_struct, (*avals, *tangents)))
    moving_out = _depends(linear.jaxpr, len(avals))
    linear = _with_results(linear, moving_out)
    numbers = {v: i for i, v in enumerate(made.jaxpr.invars)}
    kept = [numbers.get(v) if not _is_literal(v) else None for v in made.jaxpr.outvars[count:]]
    made = _with_results(made, [*[True] * count, *(k is None for k in kept)])
    return made, linear, kept, moving_out


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _core.Literal)


def _depends(jaxpr: Any, first: int) -> list[bool]:
    """Which results depend on the inputs from `first` on."""
    touched = set(jaxpr.invars[first:])
    for eqn in jaxpr.eqns:
        if any(not _is_literal(a) and a in touched for a in eqn.invars):
            touched.update(eqn.outvars)
    return [not _is_literal(v) and v in touched for v in jaxpr.outvars]


def _with_results(closed: ClosedJaxpr, used: Sequence[bool]) -> ClosedJaxpr:
    """The jaxpr with some of its results, and what only the others need left out."""
    return closed.replace(jaxpr=_pe.dce_jaxpr(closed.jaxpr, list(used), instantiate=True)[0])


def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    **rest: Any,
) -> list[Any]:
    """Cotangents of the linear arguments in one call."""
    linear = tuple(_ad.is_undefined_primal(a) for a in args)
    given = tuple(type(ct) is not _ad_util.Zero for ct in cotangents)
    known = [a for a, is_linear in zip(args, linear, strict=True) if not is_linear]
    with setting_of(jaxpr, rest["runner"]):
        back = _transposed(jaxpr, linear, given)
    wanted = _where(in_specs, linear)
    outs = iter(
        call(
            back,
            [*_where(in_specs, [not x for x in linear]), *_where(out_specs, given)],
            wanted,
            rest,
            [*known, *_where(cotangents, given)],
        )
    )
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
        constants, cts = values[: len(known)], values[len(known) :]

        def of_linear(*moving: Any) -> tuple[Any, ...]:
            return _where(function(*_merge(linear, moving, constants)), given)

        return jax.linear_transpose(of_linear, *structs)(tuple(cts))

    types = [*known, *_where(jaxpr.out_avals, given)]
    return jax.make_jaxpr(transposed)(*map(_struct, types))


_ad.primitive_transposes[mw_call_p] = _transpose


def _partial_eval(
    trace: Any,
    *tracers: Any,
    jaxpr: ClosedJaxpr,
    in_specs: Specs,
    out_specs: Specs,
    **rest: Any,
) -> list[Any]:
    """Run what is known now; stage the rest as a call that reads the residuals."""
    unknown_in = [not t.is_known() for t in tracers]
    known_in = [not u for u in unknown_in]
    with setting_of(jaxpr, rest["runner"]):
        known, unknown, unknown_out, residual_avals = _pe.partial_eval_jaxpr_nounits(
            jaxpr, unknown_in, instantiate=False
        )
    known_out = [not u for u in unknown_out]
    none = (None,) * len(residual_avals)
    outs = call(
        known,
        _where(in_specs, known_in),
        _where(out_specs, known_out) + none,
        rest,
        [t.pval.get_known() for t, k in zip(tracers, known_in, strict=True) if k],
    )
    count = len(outs) - len(residual_avals)
    known_values, residuals = outs[:count], outs[count:]
    inputs = [trace.new_instantiated_const(r) for r in residuals]
    inputs += [t for t, u in zip(tracers, unknown_in, strict=True) if u]
    closed = without_consts(unknown)
    inputs = [trace.new_instantiated_const(c) for c in unknown.consts] + inputs
    params = {
        **rest,
        "jaxpr": closed,
        "in_specs": (None,) * (len(inputs) - sum(unknown_in)) + _where(in_specs, unknown_in),
        "out_specs": _where(out_specs, unknown_out),
    }
    types, effects = mw_call_p.abstract_eval(*[t.aval for t in inputs], **params)
    results = [_pe.JaxprTracer(trace, _pe.PartialVal.unknown(a), None) for a in types]
    recipe = _pe.new_eqn_recipe(
        trace, inputs, results, mw_call_p, params, effects, source_info_util.current()
    )
    for result in results:
        result.recipe = recipe
    return _merge(unknown_out, results, known_values)


_pe.custom_partial_eval_rules[mw_call_p] = _partial_eval


def _update_params(
    unknown_in: Sequence[bool],
    needed_in: Sequence[bool],
    known_out: Sequence[bool],
    staged_out: Sequence[bool],
    residuals_out: int,
    residuals_in: int,
    known: dict[str, Any],
    staged: dict[str, Any],
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


def _dce(used_out: list[bool], *of_equation: Any) -> tuple[list[bool], Any]:
    """Drop results that nobody uses, and what only they need.

    JAX gives the equation; since 0.12 it says before which of the arguments are alive.
    """
    eqn = of_equation[-1]
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
