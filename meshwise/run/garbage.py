"""When Python looks for cycles of garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_later() -> Iterator[None]:
    """Cycles of garbage are looked for afterwards, not meanwhile, if they are looked for at all.

    A plan is tens of thousands of small objects without cycles, held until it is done: looking
    through them, and through all else there is, again and again took a fifth of the time. What
    no cycle holds is freed at once, as ever; the user's function is traced outside.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
