"""Decompositions and solves: the batch passes through, the matrix is whole.

The columns that a triangular or tridiagonal system is solved for pass through as well.
"""

import math
from collections.abc import Sequence

from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.registry import Application, OpRule, register

# Rank of one matrix of the first operand, and about how many operations a matrix of m by n takes
# in units of m * n * min(m, n) (Golub and Van Loan, Matrix Computations; LAPACK's counts).
_DECOMPOSITIONS = {
    "cholesky": (2, 1 / 3),
    "cholesky_update": (2, 2.0),
    "eig": (2, 25.0),
    "eigh": (2, 9.0),
    "geqp3": (2, 4.0),
    "geqrf": (2, 2.0),
    "hessenberg": (2, 10 / 3),
    "householder_product": (2, 2.0),
    "lu": (2, 2 / 3),
    "lu_pivots_to_permutation": (1, 1.0),
    "ormqr": (2, 4.0),
    "qr": (2, 2.0),
    "schur": (2, 25.0),
    "svd": (2, 20.0),
    "symmetric_product": (2, 1.0),
    "tridiagonal": (2, 4 / 3),
}


def _batched(factoring: Factoring, application: Application, batch: int) -> list[list[Dim]]:
    """Dims of operands and results: a shared batch, then whole dims of each."""
    tensors = shapes((*application.operands, *application.results))
    shared = factoring.dims(tensors[0][:batch])
    return [shared + factoring.dims(shape[batch:], "whole") for shape in tensors]


def _rule(
    factoring: Factoring,
    application: Application,
    tensors: Sequence[list[Dim]],
    flops: float,
    linear: tuple[tuple[int, ...], ...] = (),
) -> OpRule:
    count = len(application.operands)
    factors = factoring.rule(tensors[:count], tensors[count:])
    return OpRule(factors, linear=linear, flops=flops)


@register(*_DECOMPOSITIONS)
def _decomposition_rule(application: Application) -> OpRule:
    rank, weight = _DECOMPOSITIONS[application.eqn.primitive.name]
    shape = application.operands[0].shape
    factoring = Factoring()
    tensors = _batched(factoring, application, len(shape) - rank)
    flops = weight * math.prod(shape) * min(shape[-rank:])
    linear = ((2,),) if application.eqn.primitive.name == "ormqr" else ()
    return _rule(factoring, application, tensors, flops, linear)


@register("triangular_solve")
def _triangular_solve_rule(application: Application) -> OpRule:
    matrix, right = shapes(application.operands)
    factoring = Factoring()
    tensors = _batched(factoring, application, len(matrix) - 2)
    free = -1 if application.params["left_side"] else -2
    columns = factoring.new(right[free])
    tensors[1][free] = tensors[2][free] = columns
    return _rule(factoring, application, tensors, float(math.prod(right) * matrix[-1]), ((1,),))


@register("tridiagonal_solve")
def _tridiagonal_solve_rule(application: Application) -> OpRule:
    operands = shapes(application.operands)
    factoring = Factoring()
    tensors = _batched(factoring, application, len(operands[0]) - 1)
    tensors[3][-1] = tensors[4][-1] = factoring.new(operands[3][-1])
    return _rule(factoring, application, tensors, 8.0 * math.prod(operands[3]), ((3,),))
