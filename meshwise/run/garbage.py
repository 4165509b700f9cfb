"""When Python looks for cycles of garbage."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """How many plans are being made, in all threads, and whether garbage was looked for before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_enabled = False

    def begin(self) -> None:
        """The first one stops the search for cycles."""
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        """The last one lets it go on."""
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


_PAUSES = _Pauses()  # Python has one such switch for all threads


@contextmanager
def garbage_later() -> Iterator[None]:
    """Cycles of garbage are looked for afterwards, not meanwhile, if they are looked for at all.

    A plan is tens of thousands of small objects without cycles, held until it is done: looking
    through them, and through all else there is, again and again took a fifth of the time. What
    no cycle holds is freed at once, as ever; the user's function is traced outside.
    """
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()
