"""Programs of which the library that XLA on CPU calls makes something wrong, or ends the process.

What it makes around a long sum or extreme (`cost/cpu/library.py`) is wrong, by any amount, where a
product is in it whose right operand is made there of less than it has elements, as of a number that
is spread: `sum((x @ broadcast(c)) ** 2)`, the norm of a gradient of means. So it is where integers
of 8 bits are computed in it: as floats, of which none wraps and nothing is cut off. Until JAX 0.11
also where an operand of a product has more than 32,768 rows; and what has seven dims ends the
process. Products that it makes each for itself are right. What is told here is more than what goes
wrong: whether it can, by what there is in one body with nothing sent in between, in whatever
kernels.
"""

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

from jax import numpy as jnp

from meshwise._jax import LIBRARY_ERRS_OVER
from meshwise.cost.cpu.known import may_be_reduced_by_library
from meshwise.cost.cpu.products import free_dims, shape_of
from meshwise.cost.steps import LITERAL, Step, Steps, longest
from meshwise.ir.collectives import is_collective
from meshwise.ir.operators import (
    COPIES,
    CUTS,
    JOINS,
    PRODUCTS,
    RECASTS,
    SPREADS,
    TURNS,
    is_among,
)

# What XLA may make where it is read, or simplify to what it is made of.
_MADE = frozenset(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate
    convert_element_type copy copy_p cos div dynamic_slice eq erf exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow
    reduce_max reduce_min reduce_precision reduce_sum rem rev round rsqrt select_n sign sin slice
    split sqrt square sub tan tanh transpose xor
    """.split()
)

_OF_8_BITS = frozenset(map(jnp.dtype, (jnp.int8, jnp.uint8)))
# What is right of them as of floats: they are moved, chosen or compared.
_KEPT = (
    SPREADS | TURNS | CUTS | JOINS | COPIES | RECASTS
    | frozenset(
        """
        and argmax argmin clamp cummax cummin dynamic_update_slice gather max min not or reduce_max
        reduce_min scatter select_n sort top_k xor
        """.split()
    )
)  # fmt: skip


def may_err(steps: Steps, of_less: Collection[int] = ()) -> bool:
    """Whether a kernel of the library around a sum or extreme may be wrong, in some body.

    Inputs `of_less` are made of fewer elements than they have, and may be made again.
    """
    largest = dict.fromkeys((*steps.constants, *of_less), 0)  # a constant may be a number, spread
    place = places_of(steps)
    begun: set[int] = set()
    wrong: set[int] = set()
    for step in steps.steps:
        if any(may_err(*body) for body in _bodies(step, steps, largest)):
            return True
        if not step.writes:
            continue
        is_reduced = may_be_reduced_by_library(step.eqn, longest(step, steps.values))
        is_product = is_among(step.eqn, PRODUCTS) and not is_reduced
        is_wrong = is_product and any(_is_of_less(v, steps, largest) for v in step.reads)
        if is_reduced:
            begun.add(place[step.writes[0]])
        if is_wrong or _is_over(step) or _is_of_8_bits(step):
            wrong.add(place[step.writes[0]])
        if step.name in _MADE:
            own = [_largest(v, steps, largest) for v in step.reads]
            # Of what is joined, each is all there is of its part.
            most = sum(own) if step.name == "concatenate" else max(own, default=0)
            largest.update(dict.fromkeys(step.writes, most))
    return not begun.isdisjoint(wrong)


def places_of(steps: Steps) -> dict[int, int]:
    """A number for each value that is made: the same for all that one kernel may make.

    No kernel has in it what is sent between devices, and what is given to all is made by none.
    """
    next_to: dict[int, int] = {}

    def place(value: int) -> int:
        while next_to[value] != value:
            next_to[value] = value = next_to[next_to[value]]
        return value

    for step in steps.steps:
        next_to.update(dict.fromkeys(step.writes, step.writes[0] if step.writes else 0))
        for value in step.reads if step.writes and step.devices == 1 else ():
            if value in next_to:
                next_to[place(value)] = place(step.writes[0])
    return {value: place(value) for value in next_to}


def _bodies(
    step: Step, steps: Steps, largest: Mapping[int, int]
) -> Iterator[tuple[Steps, list[int]]]:
    """The bodies of a step, each with its inputs of less: XLA sinks constants into loops."""
    first = 0
    for body in step.bodies:
        constants = step.reads[first : first + body.carried[0]]
        given = zip(body.steps.inputs, constants, strict=False)
        yield body.steps, [v for v, read in given if _is_of_less(read, steps, largest)]
        first += body.carried[0]


def _is_of_less(value: int, steps: Steps, largest: Mapping[int, int]) -> bool:
    return value == LITERAL or _largest(value, steps, largest) < steps.values[value].elements


def _largest(value: int, steps: Steps, largest: Mapping[int, int]) -> int:
    """The elements of the largest that a value is made of, where it is made again; else its own."""
    return 0 if value == LITERAL else largest.get(value, steps.values[value].elements)


def _is_over(step: Step) -> bool:
    """Whether a step has more dims, or a product more rows, than the library makes right."""
    most_dims, most_rows = LIBRARY_ERRS_OVER
    atoms = *step.eqn.invars, *step.eqn.outvars
    dims = max((len(getattr(atom.aval, "shape", ())) for atom in atoms), default=0)
    return dims > most_dims or (step.name == "dot_general" and _most_rows(step.eqn) > most_rows)


def _is_of_8_bits(step: Step) -> bool:
    """Whether it computes integers of 8 bits of numbers: booleans are 0 and 1 as floats, too."""
    if step.bodies or is_collective(step.eqn) or is_among(step.eqn, _KEPT):
        return False
    is_made = any(_dtype(atom) in _OF_8_BITS for atom in step.eqn.outvars)
    return is_made and any(_dtype(atom) != jnp.bool_ for atom in step.eqn.invars)


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def _most_rows(eqn: Any) -> int:
    """The most that either operand of a product has in its free dims together."""
    shapes = [shape_of(operand) for operand in eqn.invars]
    return max(prod(shapes[i][d] for d in free_dims(eqn, i)) for i in (0, 1))
