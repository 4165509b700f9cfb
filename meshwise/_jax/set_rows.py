"""The primitive of few rows at a known place that are made of few rows at known places.

Walls of a simulation are written so (`u.at[0].set(u[1])`, `v.at[-1].set(-v[-2])`), and stages that
hand on what they made. Tracing writes the slices, what is computed of them and the update as one
equation, as only all together say that the rows may be where they are needed already. It stands in
no program that is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax.jaxprs import JaxprEqn, Literal, Primitive, Var, bind

set_rows_p = Primitive("set_rows")
set_rows_p.def_abstract_eval(lambda x, *operands, **params: x)


@dataclass(frozen=True, eq=False)
class OfRows:
    """What is computed of some rows, element by element: equations of `inputs` that make `made`.

    Rows may be of any shape, the same for all of them, and may be reversed; others are numbers.
    """

    inputs: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    made: Any

    def __call__(self, *given: Any) -> Any:
        """The rows that are made of some."""
        (shape,) = {x.shape for x in given if x.shape}
        known = dict(zip(self.inputs, given, strict=True))

        def full(atom: Any) -> Any:
            aval: Any = atom.aval
            x = np.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else known[atom]
            return x if x.shape else lax.broadcast(x, shape)

        for eqn in self.eqns:
            (known[eqn.outvars[0]],) = bind(eqn, [full(atom) for atom in eqn.invars])
        return full(self.made)


def set_rows(
    x: Any,
    *operands: Any,
    dims: Sequence[int],
    at: Sequence[int],
    rows: Sequence[int],
    starts: Sequence[Sequence[int] | None],
    function: OfRows,
) -> Any:
    """Write `rows` of some dims, from row `at` of each on: a function of as many of each operand.

    Of an operand they are those from its own starts on; without any it is these, or a number.
    """

    def cut(operand: Any, start: Sequence[int] | None) -> Any:
        for d, first, count in zip(dims, start, rows, strict=True) if start is not None else ():
            operand = lax.slice_in_dim(operand, first, first + count, axis=d)
        return operand

    place = [0] * x.ndim
    for d, first in zip(dims, at, strict=True):
        place[d] = first
    given = [cut(operand, start) for operand, start in zip(operands, starts, strict=True)]
    return lax.dynamic_update_slice(x, function(*given), place)


set_rows_p.def_impl(set_rows)
