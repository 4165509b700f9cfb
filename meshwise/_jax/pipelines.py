"""The primitives of pipelines: a cut in a model, and a pipelined loss and its gradients.

`stage_boundary` is the identity of one array. Of the arrays that one call of `mw.stage_boundary`
marks, the first *leads*: as many equations lead as a model has cuts. Derivatives are not marked.

An equation of `mw_pipeline` holds a *call*, a hashable object with

- `reference`: a function of flat arrays to a flat list of arrays, not pipelined: what the equation
  is wherever meshwise does not partition it, and what it is differentiated and batched as;
- `result_types`: the types of its results.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.extend.core import Primitive

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
