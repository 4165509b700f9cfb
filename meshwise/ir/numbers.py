"""Numbers as users write them, of Python, NumPy or JAX; and as they are shown."""

import operator
from typing import Any

import numpy as np


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


def number_of_bytes(number: Any) -> int | None:
    """The whole number that something is, written as a float or not: large ones are, as `80e9`.

    >>> number_of_bytes(80e9), number_of_bytes(7), number_of_bytes(0.5), number_of_bytes(True)
    (80000000000, 7, None, None)
    """
    whole, real = whole_number(number), real_number(number)
    return int(real) if whole is None and real is not None and real.is_integer() else whole


def real_number(number: Any) -> float | None:
    """The real number that something is, as Python has it; None where it is none, as a bool.

    >>> import numpy as np
    >>> real_number(np.float32(0.5)), real_number(1j), real_number(True)
    (0.5, None, None)
    """
    is_real = not isinstance(number, bool | str | bytes) and np.ndim(number) == 0
    if not is_real or np.iscomplexobj(number) or np.asarray(number).dtype == np.bool_:
        return None
    try:
        return float(number)
    except (TypeError, ValueError):
        return None


def microseconds(seconds: float) -> str:
    """Seconds as microseconds with three digits, e.g. `12.3 us`."""
    value = seconds * 1e6
    return f"{value:,.0f} us" if value >= 100 else f"{value:.3g} us"
