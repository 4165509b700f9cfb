"""Stacks of a loop: of what is made a device keeps its own steps, of what is read the padding.

A loop stacks what its steps make, and along the steps a stack is whole. Where all that is read of
it is each device's part of the steps, the rest is never held: each row is put where it belongs by
the device whose step it is.

What a loop goes through may have been gathered of shards that do not divide it. Cut to its size it
would be held once more while the loop runs. So where only loops read it, they take their rows of
what was gathered, with the padding behind them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.mesh import Mesh
from meshwise.ir.program import shape_of, type_of
from meshwise.ir.sharding import Sharding, is_part_of_rows, local_shape


def parts_kept(plan: Plan) -> dict[int, Sharding]:
    """The sharding over its steps of each stack that is read in no other, by its mark."""
    program = plan.program
    wanted: dict[Var, set[Sharding | None]] = defaultdict(set)
    for eqn, decided in zip(program.equations, plan.equations, strict=True):
        for atom, sharding in zip(eqn.invars, decided.operands, strict=True):
            if not isinstance(atom, Literal):
                wanted[atom].add(None if decided.remade else sharding)
    for atom, sharding in zip(program.outputs, plan.out_shardings, strict=True):
        if not isinstance(atom, Literal):
            wanted[atom].add(sharding)
    found = {}
    for mark, eqn in enumerate(program.equations):
        if eqn.primitive is _jax.stack_p and len(read := wanted[eqn.outvars[0]]) == 1:
            (part,) = read
            if part and _is_part(plan, eqn.outvars[0], plan.equations[mark].results[0], part):
                found[mark] = part
    return found


def _is_part(plan: Plan, stack: Var, whole: Sharding, part: Sharding) -> bool:
    """Whether one sharding is cut out of the other along the steps, and there are any."""
    return (
        is_part_of_rows(whole, part)
        and (whole, part) in plan.copies.get(stack, ())
        and 0 not in shape_of(stack)
        and not jnp.issubdtype(type_of(stack).dtype, _jax.extended)
    )


def kept_with_padding(plan: Plan) -> set[tuple[Var, Sharding]]:
    """The copies of values that only loops read, row by row, and nothing else is made of."""
    program = plan.program
    read: dict[tuple[Var, Sharding], bool] = {}
    for eqn, decided in zip(program.equations, plan.equations, strict=True):
        for atom, sharding in zip(eqn.invars, decided.operands, strict=True):
            if not isinstance(atom, Literal):
                by_rows = eqn.primitive is _jax.step_p
                read[atom, sharding] = by_rows and read.get((atom, sharding), True)
    for atom, sharding in zip(program.outputs, plan.out_shardings, strict=True):
        if not isinstance(atom, Literal):
            read[atom, sharding] = False
    for var, edges in plan.copies.items():
        read.update({(var, source): False for source, _ in edges})
    return {copy for copy, by_rows in read.items() if by_rows}


def row_of(stack: Any, shape: Sequence[int], step: Any) -> Any:
    """The row of a step of a stack of some shape, behind which there may be padding."""
    starts = [step, *[np.int32(0)] * (len(shape) - 1)]
    row = lax.dynamic_slice(stack, starts, (1, *shape[1:]), allow_negative_indices=False)
    return lax.squeeze(row, (0,))


class Part:
    """A device's part of a stack: its steps begin at one of all, and rows are put in their place.

    Made before the loop, as where the part begins does not depend on the step.
    """

    def __init__(self, stack: Var, sharding: Sharding, mesh: Mesh):
        """Of a stack [steps, ...] in a sharding over its steps."""
        shape = local_shape(shape_of(stack), sharding, mesh)
        self.start = lax.full(shape, 0, type_of(stack).dtype)
        self._first = lax.axis_index(sharding.dims[0]) * np.int32(shape[0])

    def with_row(self, held: Any, row: Any, step: Any) -> Any:
        """The part with the row of a step, or a number, in it, if the step is its own."""
        steps, row = held.shape[0], jnp.asarray(row, held.dtype)
        place = step - self._first
        is_own = (place >= 0) & (place < steps)
        place = lax.clamp(np.int32(0), place, np.int32(steps - 1))
        old = lax.dynamic_index_in_dim(held, place, keepdims=False)
        new = lax.select(lax.broadcast(is_own, row.shape), row, old)
        return lax.dynamic_update_index_in_dim(held, new, place, 0)
