"""The instructions that XLA on CPU makes of steps, as far as memory depends on them.

Most steps are one. More are:

- Products, which want operands as rows of what is contracted: batch, free and contracted dims on
  the left; batch, contracted and free ones on the right. What lies otherwise is put in order first.
  A matrix is read either way, and matrices along leading dims of a batch; and a product that only
  a transpose reads is made transposed. Dims of one element are left out, and what is of another
  shape is not written in place. Of more dims a matrix is shown, which may make what it shows.
- Sums over devices of short floats, and until JAX 0.11 products, computed in floats twice as long.
- Cumulative sums, which go along the minor dim.
- Exchanges, of which the pieces are cut and what came is joined; gathers and scatters of a minor
  dim, which are of a leading one (`_jax/minor_dims.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from jax import numpy as jnp

from meshwise._jax import WIDENS_PRODUCTS, Literal, is_short_float
from meshwise.cost.cpu.fusion import CHEAP
from meshwise.cost.cpu.instruction import Instruction, Use
from meshwise.cost.cpu.known import is_made_by_library, is_reduced_by_library
from meshwise.cost.cpu.products import (
    convolution_in_order,
    dims_in_order,
    is_in_order,
    is_of_matrices,
    is_product,
    shape_as_matrix,
    shape_of,
)
from meshwise.cost.fusion import is_elementwise, is_reduction, is_view
from meshwise.cost.steps import LITERAL, Step, Steps, Value, fused_name, longest
from meshwise.ir.collectives import is_collective
from meshwise.ir.operators import JOINS, is_among
from meshwise.rules import describe_all
from meshwise.rules.registry import OpRule

_REARRANGING = JOINS | {"rev", "slice", "dynamic_slice"}
# Other reductions of more than a window in a dim are made by windows first, which take in nothing.
_WINDOW = 32
# An exchange among more devices is counted as one of so many, in longer pieces.
_MOST_PIECES = 16


def instructions_of(
    steps: Steps, scanned: Sequence[int] = (), products_alone: bool = False
) -> tuple[list[Instruction], list[Value]]:
    """The instructions of steps, each after what it reads; and all values, with those between.

    Of a loop's body, `scanned` are the inputs that are cut of an array in each step.
    """
    ruled = [step for step in steps.steps if _has_rule(step)]
    rules = iter(describe_all([step.eqn for step in ruled]))
    made = _Made(list(steps.values), Counter(steps.outputs), products_alone)
    for step in steps.steps:
        made.readers.update(step.reads)
    for value in scanned if steps.steps else ():
        made.add_cut(steps.steps[0], value)
    for step in steps.steps:
        made.add(step, next(rules) if _has_rule(step) else None)
    return _wanted(made.instructions, steps.outputs), made.values


def _wanted(instructions: Sequence[Instruction], results: Sequence[int]) -> list[Instruction]:
    """The instructions without those that others were made in the place of."""
    read, found = set(results), []
    for own in reversed(instructions):
        if not own.is_fusible or not read.isdisjoint(own.writes):
            read.update(own.reads)
            found.append(own)
    return found[::-1]


def _has_rule(step: Step) -> bool:
    return not (step.bodies or is_collective(step.eqn) or fused_name(step.eqn))


@dataclass
class _Made:
    """What is found so far. `readers` counts those of each value among steps and results."""

    values: list[Value]
    readers: Counter[int]
    products_alone: bool
    instructions: list[Instruction] = field(default_factory=list)
    transposes: dict[int, Step] = field(default_factory=dict)
    products: dict[int, Instruction] = field(default_factory=dict)
    widened: dict[int, int] = field(default_factory=dict)
    ordered: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)  # for products
    matrices: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)  # shown as such
    masks: set[int] = field(default_factory=set)  # numbers made of truth values
    spread: dict[int, int] = field(default_factory=dict)  # and what they are spread of

    def add_cut(self, near: Step, value: int) -> None:
        """Add what cuts a value of a stack, whose bytes are not counted here."""
        self.values.append(Value(0, 0))
        step = replace(near, bodies=())
        self._add_cheap(step, [len(self.values) - 1], [Use.ONCE], [value])

    def add(self, step: Step, rule: OpRule | None) -> None:
        """Add the instructions of a step; what has no rule is a collective, or has bodies."""
        eqn, name = step.eqn, step.eqn.primitive.name
        if name in _OF_THEIR_OWN:
            _OF_THEIR_OWN[name](self, step)
        elif rule is None:
            self._add_alone(step)
        elif is_among(eqn, _REARRANGING):
            self._add_cheap(step, step.reads, [Use.ONCE] * len(step.reads), step.writes)
        elif is_reduction(eqn):
            self._add_reduction(step)
        elif is_view(eqn) or is_elementwise(eqn, rule):
            uses = [self._spread(step, i) for i in range(len(step.reads))]
            is_cheap = name in CHEAP or is_view(eqn)
            self._add(step, step.reads, uses, step.writes, True, True, is_cheap)
        else:
            self._add_alone(step)

    def _add_alone(self, step: Step) -> None:
        self._add(step, step.reads, [Use.AGAIN] * len(step.reads), step.writes)

    def _add_joined(self, step: Step, sent: int) -> None:
        came = self._new(step.writes[0])
        self._add(step, [sent], [Use.ONCE], [came])
        self._add_cheap(step, [came], [Use.ONCE], step.writes)

    def _add_reduction(self, step: Step) -> None:
        eqn, name = step.eqn, step.eqn.primitive.name
        shape = shape_of(eqn.invars[0])
        axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
        begins = not self.products_alone and is_reduced_by_library(eqn, longest(step, self.values))
        is_place = name.startswith("arg")
        is_fusible = not begins and not is_place and all(shape[d] <= _WINDOW for d in axes)
        uses = [Use.ONCE] * len(step.reads)
        self._add(step, step.reads, uses, step.writes, is_fusible or is_place, is_fusible)
        self.instructions[-1].of_library = self.instructions[-1].begins = begins

    def dot(self, step: Step) -> None:
        """A product; one of each two elements, or of none twice, is element by element."""
        if not is_product(step.eqn):
            uses = [max(Use.ONCE, self._spread(step, i)) for i in (0, 1)]
            self._add_cheap(step, step.reads, uses, step.writes)
            return
        (left, of_library), (right, _) = (self._for_product(step, i) for i in (0, 1))
        if WIDENS_PRODUCTS and _is_of_short_floats(step.eqn):
            long = [self._widened(step, v) for v in (left, right)]
            made = self._new(step.writes[0], 2)
            self._add(step, long, [Use.AGAIN] * 2, [made])
            self._add_cheap(step, [made], [Use.SAME], step.writes)
            return
        self._add(step, [left, right], [Use.AGAIN] * 2, step.writes)
        self.products[step.writes[0]] = self.instructions[-1]
        self.instructions[-1].of_library = of_library
        known = zip((*step.eqn.invars, *step.eqn.outvars), (left, right, *step.writes), strict=True)
        self.instructions[-1].reshapes = frozenset(v for atom, v in known if 1 in shape_of(atom))

    def convolved(self, step: Step) -> None:
        """A convolution, which is made of images and windows whose channels come last."""
        *lie_so, is_made_so = convolution_in_order(step.eqn)
        given = [
            read if is_lying else self._moved(step, read, Use.ONCE)
            for read, is_lying in zip(step.reads, lie_so, strict=True)
        ]
        made = step.writes[0] if is_made_so else self._new(step.writes[0])
        self._add(step, given, [Use.AGAIN] * 2, [made])
        if not is_made_so:
            self._add_cheap(step, [made], [Use.ONCE], step.writes)

    def transpose(self, step: Step) -> None:
        """A transpose, which products read through, and XLA may make with a product."""
        if self._is_product_turned(step):
            product = self.products[step.reads[0]]
            product.writes, product.of_library = step.writes, False
            return
        self.transposes[step.writes[0]] = step
        self._add_cheap(step, step.reads, [Use.ONCE], step.writes)

    def split(self, step: Step) -> None:
        """A slice for each part."""
        for part in step.writes:
            self._add_cheap(step, step.reads, [Use.ONCE], [part])

    def updated(self, step: Step) -> None:
        """What is written into in place."""
        uses = [Use.SAME] + [Use.ONCE] * (len(step.reads) - 1)
        self._add_cheap(step, step.reads, uses, step.writes)

    def multiplied(self, step: Step) -> None:
        """A product element by element; that with a mask is a choice, which the library lacks."""
        uses = [self._spread(step, i) for i in (0, 1)]
        self._add_cheap(step, step.reads, uses, step.writes)
        if any(
            v in self.masks and use is Use.SAME for v, use in zip(step.reads, uses, strict=True)
        ):
            self.instructions[-1].of_library = False

    def converted(self, step: Step) -> None:
        """A value of another type."""
        self._add_cheap(step, step.reads, [self._spread(step, 0)], step.writes)
        given: Any = step.eqn.invars[0].aval
        if given.dtype == bool:
            self.masks.update(step.writes)

    def divided(self, step: Step) -> None:
        """A division, by a known number, or what is spread, a product with the reciprocal of it."""
        made: Any = step.eqn.outvars[0].aval
        uses = [self._spread(step, i) for i in (0, 1)]
        number, by = step.reads
        source, is_inexact = self.spread.get(by, by), jnp.issubdtype(made.dtype, jnp.inexact)
        if source == LITERAL or not is_inexact:
            is_cheap = source == LITERAL and is_inexact
            self._add(step, step.reads, uses, step.writes, True, True, is_cheap)
        elif self._elements(source) < self._elements(step.writes[0]):
            reciprocal = self._new(source)
            self._add(step, [source], [Use.SAME], [reciprocal], True, True)
            self.instructions[-1].of_library &= is_made_by_library(step.eqn, self._elements(source))
            self._add_cheap(step, [number, reciprocal], [uses[0], Use.AGAIN], step.writes)
        else:
            self._add(step, step.reads, uses, step.writes, True, True)

    def broadcast(self, step: Step) -> None:
        """What is spread."""
        uses = [self._spread(step, i) for i in range(len(step.reads))]
        self._add_cheap(step, step.reads, uses, step.writes)
        if step.reads:
            (self.spread[step.writes[0]],) = step.reads

    def greater(self, step: Step) -> None:
        """The greater of two; of the least number and another it is that, and costs nothing."""
        uses = [self._spread(step, i) for i in (0, 1)]
        self._add_cheap(step, step.reads, uses, step.writes)
        if any(isinstance(a, Literal) and np.all(a.val == -np.inf) for a in step.eqn.invars):
            self.instructions[-1].of_library = True

    def gather(self, step: Step) -> None:
        """A gather, which reads each place once, and any element."""
        self._add(step, step.reads, [Use.AGAIN, Use.ONCE], step.writes, True, True)

    def cumulative(self, step: Step) -> None:
        """A cumulative sum, along the minor dim."""
        moved = self._moved(step, step.reads[0], Use.ONCE)
        summed = self._new(step.writes[0])
        self._add(step, [moved], [Use.AGAIN], [summed])
        self._add_cheap(step, [summed], [Use.ONCE], step.writes)

    def exchanged(self, step: Step) -> None:
        """An exchange of pieces, each of which is cut by itself; what came is joined."""
        n = min(step.devices, _MOST_PIECES)
        sent, came = ([self._new(step.writes[0], 1, parts=n) for _ in range(n)] for _ in (0, 1))
        for piece in sent:
            self._add_cheap(step, step.reads, [Use.AGAIN], [piece])
        self._add(step, sent, [Use.ONCE] * n, came)
        self._add_cheap(step, came, [Use.ONCE] * n, step.writes)
        self.instructions[-1].branches = True

    def gathered(self, step: Step) -> None:
        """An all_gather; what came of a minor dim is put in order."""
        if _is_minor(step.eqn, step.eqn.params["all_gather_dimension"]):
            self._add_joined(step, step.reads[0])
        else:
            self._add_alone(step)

    def summed(self, step: Step) -> None:
        """A sum over devices, of short floats in longer ones; what is scattered put in order."""
        reads, writes = list(step.reads), list(step.writes)
        dim = step.eqn.params.get("scatter_dimension")
        if dim is not None and _is_minor(step.eqn, dim):
            reads = [self._moved(step, read, Use.ONCE) for read in reads]
        is_long = _is_of_short_floats(step.eqn)
        if is_long:
            reads = [self._widened(step, read) for read in reads]
            writes = [self._new(out, 2) for out in step.writes]
        self._add(step, reads, [Use.AGAIN] * len(reads), writes)
        for own, out in zip(writes, step.writes, strict=True) if is_long else ():
            self._add_cheap(step, [own], [Use.SAME], [out])

    def _for_product(self, step: Step, operand: int) -> tuple[int, bool]:
        """An operand as a product wants it: as it is, or what puts it in order; and if in rows."""
        read, shape = step.reads[operand], shape_of(step.eqn.invars[operand])
        made, order = self.transposes.get(read), range(len(shape))
        if made is not None and shape_of(made.eqn.outvars[0]) == shape:
            source = made.eqn.params["permutation"]
            if is_in_order(step.eqn, operand, source):
                in_rows = is_in_order(step.eqn, operand, source, may_turn=False)
                return self._as_matrix(step, operand, source, made.reads[0]), in_rows
        may_turn = made is None or is_of_matrices(step.eqn)  # what is transposed is so once
        if read == LITERAL or is_in_order(step.eqn, operand, order, may_turn):
            in_rows = is_in_order(step.eqn, operand, order, may_turn=False)
            return self._as_matrix(step, operand, order, read), in_rows
        key = read, dims_in_order(step.eqn, operand)
        if key not in self.ordered:  # equal ones are one to XLA
            turned = self._moved(step, read, Use.ONCE)  # and then copied as it lies
            self.ordered[key] = self._moved(step, turned, Use.SAME)
        return self.ordered[key], True

    def _as_matrix(self, step: Step, operand: int, order: Sequence[int], read: int) -> int:
        """An operand of a product, or where it has more dims than a matrix, that as one."""
        shape = shape_as_matrix(step.eqn, operand, order)
        if read == LITERAL or len(shape) == len(order):
            return read
        if (read, shape) not in self.matrices:
            self.matrices[read, shape] = self._new(read)
            self._add_cheap(step, [read], [Use.SAME], [self.matrices[read, shape]])
            self.instructions[-1].is_view = self.instructions[-1].of_library = True
        return self.matrices[read, shape]

    def _is_product_turned(self, step: Step) -> bool:
        """Whether a transpose alone reads a product, whose two free dims change places."""
        product = self.products.get(step.reads[0])
        if product is None or self.readers[step.reads[0]] > 1:
            return False
        order, shape = step.eqn.params["permutation"], shape_of(step.eqn.invars[0])
        (_, _), (batch, _) = product.step.eqn.params["dimension_numbers"]
        turned = (*range(len(batch)), len(batch) + 1, len(batch))
        return tuple(order) == turned and shape_of(product.step.eqn.outvars[0]) == shape

    def _spread(self, step: Step, operand: int) -> Use:
        """How an operand is read of which each element may be wanted for several."""
        read = step.reads[operand]
        is_same = read == LITERAL or self._elements(read) == self._elements(step.writes[0])
        return Use.SAME if is_same else Use.AGAIN

    def _elements(self, value: int) -> int:
        return self.values[value].elements

    def _moved(self, step: Step, read: int, use: Use) -> int:
        """A value put in another order, or cut."""
        if read == LITERAL:
            return read
        out = self._new(read)
        self._add_cheap(step, [read], [use], [out])
        return out

    def _widened(self, step: Step, read: int) -> int:
        """A value in floats of twice the length."""
        if read != LITERAL and read not in self.widened:
            self.widened[read] = self._new(read, 2)
            self._add_cheap(step, [read], [Use.SAME], [self.widened[read]])
        return self.widened.get(read, LITERAL)

    def _new(self, like: int, times: int = 1, parts: int = 1) -> int:
        value = self.values[like]
        self.values.append(Value(value.elements // parts, times * value.bytes // parts))
        return len(self.values) - 1

    def _add_cheap(
        self, step: Step, reads: Sequence[int], uses: Sequence[Use], writes: Sequence[int]
    ) -> None:
        self._add(step, reads, uses, writes, True, True, True)

    def _add(
        self,
        step: Step,
        reads: Sequence[int],
        uses: Sequence[Use],
        writes: Sequence[int],
        fuses: bool = False,
        is_fusible: bool = False,
        is_cheap: bool = False,
    ) -> None:
        known = [(v, use) for v, use in zip(reads, uses, strict=True) if v != LITERAL]
        own, how = tuple(v for v, _ in known), tuple(use for _, use in known)
        of_library = is_fusible and is_made_by_library(step.eqn, longest(step, self.values))
        more = fuses, is_fusible, is_cheap, is_among(step.eqn, JOINS), of_library
        self.instructions.append(Instruction(step, own, how, tuple(writes), *more))


def _is_of_short_floats(eqn: Any) -> bool:
    return all(is_short_float(var.aval.dtype) for var in eqn.outvars)


def _is_minor(eqn: Any, dim: int) -> bool:
    return prod(shape_of(eqn.invars[0])[:dim]) > 1


# Operators that are more than one instruction, or read what they do in ways of their own.
_OF_THEIR_OWN: Mapping[str, Callable[[_Made, Step], None]] = {
    "dot_general": _Made.dot,
    "conv_general_dilated": _Made.convolved,
    "transpose": _Made.transpose,
    "split": _Made.split,
    "dynamic_update_slice": _Made.updated,
    "mul": _Made.multiplied,
    "convert_element_type": _Made.converted,
    "div": _Made.divided,
    "broadcast_in_dim": _Made.broadcast,
    "max": _Made.greater,
    "gather": _Made.gather,
    "all_to_all": _Made.exchanged,
    "all_gather": _Made.gathered,
    "reduce_scatter": _Made.summed,
    "psum": _Made.summed,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _Made.cumulative),
}
