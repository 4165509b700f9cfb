"""The table: one row an operator variant, with its factor rule as text."""

from tests.rules.cases_contraction import CASES as CONTRACTION
from tests.rules.cases_elementwise import CASES as ELEMENTWISE
from tests.rules.cases_fourier import CASES as FOURIER
from tests.rules.cases_indexing import CASES as INDEXING
from tests.rules.cases_like import CASES as LIKE
from tests.rules.cases_loops import CASES as LOOPS
from tests.rules.cases_matrices import CASES as MATRICES
from tests.rules.cases_ordering import CASES as ORDERING
from tests.rules.cases_shape import CASES as SHAPE
from tests.rules.cases_windows import CASES as WINDOWS

CASES = [
    *ELEMENTWISE,
    *CONTRACTION,
    *SHAPE,
    *WINDOWS,
    *INDEXING,
    *MATRICES,
    *FOURIER,
    *LOOPS,
    *ORDERING,
    *LIKE,
]
