"""How products and convolutions of XLA on CPU read their operands."""

from collections.abc import Sequence
from math import prod
from typing import Any


def is_product(eqn: Any) -> bool:
    """Whether it sums over elements, and is more than a sum of products element by element."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    summed = prod(shape_of(eqn.invars[0])[d] for d in contracted)
    return summed > 1 and any(free_dims(eqn, operand) for operand in (0, 1))


def free_dims(eqn: Any, operand: int) -> tuple[int, ...]:
    """The dims of an operand that are neither summed over nor of the batch."""
    contracted, batch = (dims[operand] for dims in eqn.params["dimension_numbers"])
    rank = len(shape_of(eqn.invars[operand]))
    return tuple(d for d in range(rank) if d not in contracted and d not in batch)


def shape_as_matrix(eqn: Any, operand: int, order: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a product reads an operand that lies in an order: of a matrix.

    Beside dims of the batch, those that are free are one, and so are those that are contracted.
    """
    shape, free = shape_of(eqn.invars[operand]), free_dims(eqn, operand)
    contracted, batch = (tuple(dims[operand]) for dims in eqn.params["dimension_numbers"])
    parts = [*((d,) for d in batch), *(dims for dims in (free, contracted) if dims)]
    parts.sort(key=lambda dims: min(order[d] for d in dims))
    return tuple(prod(shape[d] for d in dims) for dims in parts)


def dims_in_order(eqn: Any, operand: int, turned: bool = False) -> tuple[int, ...]:
    """The dims of an operand as a product wants them where they are put in order for it.

    `turned` as the other operand's are.
    """
    contracted, batch = (tuple(dims[operand]) for dims in eqn.params["dimension_numbers"])
    free = free_dims(eqn, operand)
    is_left = (operand == 0) is not turned
    return (*batch, *free, *contracted) if is_left else (*batch, *contracted, *free)


def is_in_order(eqn: Any, operand: int, order: Sequence[int], may_turn: bool = True) -> bool:
    """Whether a product reads an operand where it lies, its dims being those of `order` there."""
    contracted, batch = (tuple(dims[operand]) for dims in eqn.params["dimension_numbers"])
    shape = shape_of(eqn.invars[operand])

    def lying(dims: Sequence[int]) -> list[int]:
        return [order[d] for d in dims if shape[d] > 1]

    ways = [dims_in_order(eqn, operand)]
    # Else all dims are put in order, those of one too.
    is_plain = not batch or _is_matrix(eqn, operand)
    if (
        may_turn
        and is_plain
        and all(len(lying(d)) <= 1 for d in (free_dims(eqn, operand), contracted))
    ):
        ways.append(dims_in_order(eqn, operand, turned=True))
    return any(lying(way) == sorted(lying(way)) for way in ways)


def is_of_matrices(eqn: Any) -> bool:
    """Whether a product of batches takes both operands as they are, each of matrices."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    return not batch or all(_is_matrix(eqn, operand) for operand in (0, 1))


def _is_matrix(eqn: Any, operand: int) -> bool:
    """Whether the batch leads in an operand, with one free and one contracted dim at most."""
    contracted, batch = (tuple(dims[operand]) for dims in eqn.params["dimension_numbers"])
    leads = batch == tuple(range(len(batch)))
    return leads and max(len(free_dims(eqn, operand)), len(contracted)) <= 1


def convolution_in_order(eqn: Any) -> list[bool]:
    """Whether the images, the windows and the result of a convolution lie as it wants them.

    That is batch, places, channels, and for windows places, channels of the one and the other.
    """
    numbers = eqn.params["dimension_numbers"]
    image, window, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    lying = (
        (image[0], *image[2:], image[1]),
        (*window[2:], window[1], window[0]),
        (result[0], *result[2:], result[1]),
    )
    return [
        (own := [d for d in dims if shape_of(atom)[d] > 1]) == sorted(own)
        for dims, atom in zip(lying, (*eqn.invars, *eqn.outvars), strict=True)
    ]


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of what an equation reads or writes."""
    return tuple(atom.aval.shape)
