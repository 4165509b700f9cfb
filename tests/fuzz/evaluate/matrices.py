"""Solves and decompositions of stacks of matrices."""

from typing import Any

import numpy as np
from scipy import linalg

from tests.fuzz.evaluate.elementwise import Function


def _triangular_solve(params: Any, matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    if params["conjugate_a"] or not matrix.size or not right.size:
        raise NotImplementedError("triangular_solve")
    out = np.zeros_like(right)
    for at in np.ndindex(*matrix.shape[:-2]):
        one, other = matrix[at], right[at]
        flip = params["transpose_a"]
        if not params["left_side"]:  # x a = b where a' x' = b'
            flip, other = not flip, other.T
        try:
            found = linalg.solve_triangular(
                one,
                other,
                trans=int(flip),
                lower=params["lower"],
                unit_diagonal=params["unit_diagonal"],
                check_finite=False,
            )
        except linalg.LinAlgError:  # padding, say
            found = np.full_like(other, np.nan)
        out[at] = found if params["left_side"] else found.T
    return out


def _cholesky(params: Any, matrix: np.ndarray) -> np.ndarray:
    above = np.triu(matrix, 1)  # as LAPACK leaves it
    try:
        return np.linalg.cholesky(matrix) + above
    except np.linalg.LinAlgError:
        raise NotImplementedError("cholesky of what has none") from None


MATRICES: dict[str, Function] = {"triangular_solve": _triangular_solve, "cholesky": _cholesky}
