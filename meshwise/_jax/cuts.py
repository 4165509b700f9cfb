"""Exchanges whose pieces XLA on CPU cuts with one kernel.

XLA on CPU makes a slice of each piece of an all_to_all, and a kernel of each slice, each of which
takes as long to compile as any other. It compiles equal kernels once, though: so the pieces are
cut here, all by the same slice, each at a place that is read from an array. XLA cuts them out of
what joins them again, and nothing more is copied or sent.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from meshwise._jax.jaxprs import JaxprEqn, Primitive, Var, new_eqn, opened, rewritten, with_bodies

# An array, as its pieces along a dim joined again.
cut_and_joined_p = Primitive("cut_and_joined")


def cut_alike(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    """The same per-device jaxpr over axes of some sizes; itself where nothing is exchanged."""
    before = opened(jaxpr).eqns
    inner = [with_bodies(eqn, lambda body: cut_alike(body, sizes)) for eqn in before]
    eqns = [new for eqn in inner for new in _cut(eqn, sizes)]
    same = len(eqns) == len(before) and all(map(lambda new, old: new is old, eqns, before))
    return jaxpr if same else rewritten(jaxpr, eqns=eqns)


def _cut(eqn: JaxprEqn, sizes: Mapping[str, int]) -> list[JaxprEqn]:
    """An exchange of what was cut and joined; of anything else the equation itself."""
    if eqn.primitive is not lax.all_to_all_p:
        return [eqn]
    (x,) = eqn.invars
    aval: Any = x.aval
    pieces = _group_size(eqn, sizes)
    if pieces == 1 or 0 in aval.shape:
        return [eqn]
    joined = Var(aval)
    params = {"dim": eqn.params["split_axis"], "pieces": pieces}
    return [new_eqn(cut_and_joined_p, [x], [joined], params, eqn), eqn.replace(invars=[joined])]


def _group_size(eqn: JaxprEqn, sizes: Mapping[str, int]) -> int:
    """How many devices exchange with one another."""
    groups = eqn.params["axis_index_groups"]
    names = eqn.params["axis_name"]
    names = names if isinstance(names, tuple | list) else (names,)
    return len(groups[0]) if groups else prod(sizes[name] for name in names)


def _lowered(context: Any, x: Any, *, dim: int, pieces: int) -> Any:
    """The slices, at places behind a barrier, and their concatenation."""
    shape = context.avals_in[0].shape
    size = shape[dim] // pieces
    sizes = mlir.dense_int_array([size if d == dim else n for d, n in enumerate(shape)])
    # A number, or an array that one number and a step make, would become part of the kernel.
    firsts = [np.array([piece * size, -1, -1], np.int32) for piece in range(pieces)]
    zero = mlir.ir_constant(np.int32(0))
    one_at = [mlir.dense_int_array([n]) for n in (0, 1, 1)]
    cut = []
    for first in stablehlo.OptimizationBarrierOp([mlir.ir_constant(f) for f in firsts]).results:
        place = stablehlo.ReshapeOp(zero.type, stablehlo.SliceOp(first, *one_at).result).result
        starts = [place if d == dim else zero for d in range(len(shape))]
        cut.append(stablehlo.DynamicSliceOp(x, starts, sizes).result)
    return [stablehlo.ConcatenateOp(cut, dim).result]


def _itself(context: Any, x: Any, **_: Any) -> Any:
    return [x]


def _batched(args: Any, dims: Any, **_: Any) -> Any:
    return args[0], dims[0]


cut_and_joined_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(cut_and_joined_p, _itself)
mlir.register_lowering(cut_and_joined_p, _lowered, platform="cpu")
ad.deflinear2(cut_and_joined_p, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[cut_and_joined_p] = _batched
