"""Whole numbers as users write them: of Python, NumPy or JAX."""

import operator
from typing import Any


def whole_number(number: Any) -> int | None:
    """The whole number that something is, as Python has it; None where it is none, as a bool.

    >>> import numpy as np
    >>> whole_number(np.int64(3)), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
