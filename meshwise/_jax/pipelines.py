"""The primitives of pipelines: a cut in a model, and a pipelined loss and its gradients.

`stage_boundary` is the identity of one array. Of the arrays that one call of `mw.stage_boundary`
marks, the first *leads*: as many equations lead as a model has cuts. Derivatives are not marked.

An equation of `mw_pipeline` holds a *call*, a hashable object with

- `reference`: a function of flat arrays to a flat list of arrays, not pipelined: what the equation
  is wherever meshwise does not partition it, and what it is differentiated and batched as;
- `result_types`: the types of its results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax
from jax._src import ad_util as _ad_util
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.ad_checkpoint import name_p as _name_p
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.extend.core import Primitive
from jax.sharding import NamedSharding

from meshwise._jax.bodies import constraint_of
from meshwise._jax.hints import hint_p
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    bodies_of,
    is_jaxpr,
    new_eqn,
    new_var,
    opened,
    rewritten,
    source_summary,
)

stage_boundary_p = Primitive("stage_boundary")
pipeline_p = Primitive("mw_pipeline")
pipeline_p.multiple_results = True


stage_boundary_p.def_impl(lambda x, *, leads: x)
stage_boundary_p.def_abstract_eval(lambda x, *, leads: x)
_mlir.register_lowering(stage_boundary_p, lambda ctx, x, *, leads: [x])
_batching.defvectorized(stage_boundary_p)


def _boundary_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, leads: bool) -> Any:
    return stage_boundary_p.bind(*primals, leads=leads), tangents[0]


_ad.primitive_jvps[stage_boundary_p] = _boundary_jvp


@pipeline_p.def_impl
def _impl(*args: Any, call: Any) -> list[Any]:
    return list(jax.jit(call.reference)(*args))


pipeline_p.def_abstract_eval(lambda *avals, call: list(call.result_types))


def _reference(*args: Any, call: Any) -> list[Any]:
    return list(call.reference(*args))


_mlir.register_lowering(pipeline_p, _mlir.lower_fun(_reference, multiple_results=True))


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: Any) -> tuple[list[Any], list[int]]:
    mapped = tuple([d if isinstance(d, int) else None for d in dims])
    outs = list(jax.vmap(call.reference, mapped)(*args))
    return outs, [0] * len(outs)


_batching.primitive_batchers[pipeline_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Any) -> tuple[Any, list[Any]]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not _ad_util.Zero]

    def along(*moved: Any) -> list[Any]:
        args = list(primals)
        for i, x in zip(moving, moved, strict=True):
            args[i] = x
        return list(call.reference(*args))

    outs = pipeline_p.bind(*primals, call=call)
    directions = [tangents[i] for i in moving]
    return outs, list(jax.jvp(along, [primals[i] for i in moving], directions)[1])


_ad.primitive_jvps[pipeline_p] = _jvp


def without_names(jaxpr: Any) -> Any:
    """The same jaxpr, open or closed, its equations in no name scope; they keep their lines."""
    nowhere = _source_info_util.NameStack()

    def nameless(eqn: JaxprEqn) -> JaxprEqn:
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=nowhere))

    return _each_equation(jaxpr, nameless)


def hints_as_specs(jaxpr: Any) -> Any:
    """The same jaxpr, open or closed, with hints that name axes but no mesh."""

    def meshless(eqn: JaxprEqn) -> JaxprEqn:
        sharding = eqn.params["sharding"] if eqn.primitive is hint_p else constraint_of(eqn)
        if not isinstance(sharding, NamedSharding):
            return eqn
        params = {"reshards": True, **(eqn.params if eqn.primitive is hint_p else {})}
        params["sharding"] = sharding.spec
        return new_eqn(hint_p, eqn.invars, eqn.outvars, params, eqn)

    return _each_equation(jaxpr, meshless)


def hints_in(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Where the hints of a jaxpr stand, bodies included, and what they say."""
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive is hint_p:
            yield f"the value at {source_summary(eqn)}", eqn.params["sharding"]
        for body in bodies_of(eqn):
            yield from hints_in(body)


def _each_equation(jaxpr: Any, function: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """A jaxpr with every equation replaced, those of bodies too."""

    def inside(value: Any) -> Any:
        if isinstance(value, tuple | list):
            if not any(map(is_jaxpr, value)):
                return value
            return getattr(type(value), "_make", type(value))(map(inside, value))
        return _each_equation(value, function) if is_jaxpr(value) else value

    eqns = [
        function(eqn.replace(params={k: inside(v) for k, v in eqn.params.items()}))
        for eqn in opened(jaxpr).eqns
    ]
    return rewritten(jaxpr, eqns=eqns)


def without_literal_results(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr, its results made by equations, also those that are numbers."""
    eqns, results = list(closed.jaxpr.eqns), []
    for atom in closed.jaxpr.outvars:
        result = atom
        if isinstance(atom, Literal):
            result = new_var(atom.aval)
            named = {"name": "number"}
            here, context = _source_info_util.current(), _core.JaxprEqnContext()
            what = [atom], [result], _name_p, named, _core.no_effects, here, context
            eqns.append(_core.new_jaxpr_eqn(*what))
        results.append(result)
    return rewritten(closed, eqns=eqns, outvars=results)


def without_last_casts(closed: ClosedJaxpr, dtypes: Mapping[int, str]) -> ClosedJaxpr:
    """The same jaxpr, some results as they are, of given dtypes, before they are cast to others."""
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    results = list(closed.jaxpr.outvars)
    for i, dtype in dtypes.items():
        eqn = None if isinstance(results[i], Literal) else made.get(results[i])
        if eqn is not None and eqn.primitive is lax.convert_element_type_p:
            (before,) = eqn.invars
            if before.aval.dtype == dtype != results[i].aval.dtype:
                results[i] = before
    return rewritten(closed, outvars=results)


def same_place() -> Callable[[], AbstractContextManager[None]]:
    """For the body of a loop: a context in which equations have the line and names of here."""
    names = _source_info_util.current_name_stack()
    traceback = _source_info_util.current().traceback
    return lambda: _source_info_util.user_context(traceback, name_stack=names)
