"""Whole numbers as users write them: of Python, NumPy or JAX."""

import operator
from typing import Any


def whole(number: Any) -> int | None:
    """The whole number that something is, as Python has it; None where it is none, as a bool.

    >>> import numpy as np
    >>> whole(np.int64(3)), whole(3.0), whole(True)
    (3, None, None)
    """
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
