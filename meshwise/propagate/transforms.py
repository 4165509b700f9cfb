"""Fourier transforms over several dims, some of them sharded, become one after the other.

A transform over several dims is one over some of them, and then one over the others. What is
sharded along one dim can be transformed along all others without sending anything; an all_to_all
moves the axes to a dim that is done, and the rest follows (slabs and pencils: Foster and Worley
1997; Takahashi 2010). Apart, each is an equation with a sharding of its own, so the plan finds
where the axes go and whether they have to come back.

Of two transforms in a row, the first has its sharded dims last and the second has them first: the
values between them stay as the first leaves them (Dalcin et al. 2019).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.lax import FftType

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, shape_of, type_of
from meshwise.propagate.completion import Completion
from meshwise.propagate.rewriting import rewritten


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the transforms that a larger one is made of: some dims, the last one last."""

    kind: FftType
    dims: tuple[int, ...]


def split_transforms(program: Program, completion: Completion) -> Program:
    """The program with transforms over sharded dims taken apart; itself where there are none."""
    depth: dict[Var, int] = {}  # how many transforms of these have gone into a value
    apart: dict[int, list[JaxprEqn]] = {}
    for index, eqn in enumerate(program.equations):
        before = max((depth.get(a, 0) for a in eqn.invars if not isinstance(a, Literal)), default=0)
        sharded = _sharded_dims(eqn, completion)
        if sharded:
            parts = _parts(eqn, sharded if before % 2 == 0 else sharded[::-1], before % 2 == 1)
            apart[index] = _one_by_one(eqn, parts)
            before += 1
        depth.update(dict.fromkeys(eqn.outvars, before))
    return rewritten(program, apart)


def _sharded_dims(eqn: JaxprEqn, completion: Completion) -> list[int]:
    """The sharded dims of a transform over several; those of its operand after the others."""
    if eqn.primitive is not lax.fft_p or len(eqn.params["fft_lengths"]) < 2:
        return []
    before, after = (
        () if isinstance(v, Literal) else completion.dims[v] for v in (*eqn.invars, *eqn.outvars)
    )
    rank = len(shape_of(eqn.outvars[0]))
    transformed = range(rank - len(eqn.params["fft_lengths"]), rank)
    found = [d for d in transformed if (before and before[d]) or after[d]]
    return sorted(found, key=lambda d: bool(before and before[d]))


def _parts(eqn: JaxprEqn, sharded: Sequence[int], sharded_first: bool) -> list[_Part]:
    """Unsharded dims together, sharded ones one by one; of real numbers the last dim is fixed."""
    kind = FftType(eqn.params["fft_type"])
    rank = len(shape_of(eqn.outvars[0]))
    last = rank - 1
    real = kind in (FftType.RFFT, FftType.IRFFT)
    inverse = kind in (FftType.IFFT, FftType.IRFFT)
    whole = tuple(d for d in range(rank - len(eqn.params["fft_lengths"]), rank) if d not in sharded)
    groups: list[tuple[int, ...]] = [(d,) for d in sharded if not (real and d == last)]
    if kind == FftType.IRFFT or (sharded_first and kind != FftType.RFFT):
        groups.append(whole)
    else:
        groups.insert(0, whole)
    if real and last in sharded:
        groups.insert(0 if kind == FftType.RFFT else len(groups), (last,))
    others = FftType.IFFT if inverse else FftType.FFT
    return [_Part(kind if real and last in g else others, g) for g in groups if g]


def _one_by_one(eqn: JaxprEqn, parts: Sequence[_Part]) -> list[JaxprEqn]:
    """The equations of the parts in place of a transform's own."""
    operand = type_of(eqn.invars[0])
    first = operand.ndim - len(eqn.params["fft_lengths"])
    lengths = dict(enumerate(eqn.params["fft_lengths"], first))

    def transform(x: Any) -> Any:
        order = list(range(operand.ndim))  # the dims as they lie
        for part in parts:
            wanted = [d for d in order if d not in part.dims] + list(part.dims)
            x = _in_order(x, [order.index(d) for d in wanted])
            order = wanted
            own = {"fft_type": part.kind, "fft_lengths": tuple(lengths[d] for d in part.dims)}
            (x,) = _jax.bind(eqn, [x], own)
        return _in_order(x, [order.index(d) for d in range(operand.ndim)])

    with _jax.at_source(eqn):
        struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
        body = _jax.make_jaxpr_over_axes(transform, (), [struct])
    return _jax.in_place_of(eqn, body, eqn.invars)


def _in_order(x: Any, order: Sequence[int]) -> Any:
    return x if list(order) == list(range(x.ndim)) else lax.transpose(x, order)
