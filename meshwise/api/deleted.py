"""Arrays whose buffers are gone: donated to an earlier call, or read twice in a donating one.

XLA finds them when the call is already under way, and with jax 0.10 a process whose mesh has
several devices does not survive that. So what a call donates is deleted after it, and is found
before anything runs; calls are looked at when they fail, those that donate before as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

from meshwise import _jax
from meshwise.errors import DeletedArrayError, message
from meshwise.run.uneven import UnevenArray, deleted_error

_KINDS = (*_jax.ARRAY_CLASSES, UnevenArray)


def base_of(leaf: Any) -> Any:
    """The `jax.Array` of numbers that an argument is on the devices; None of other arguments."""
    return _jax.base_array(leaf.padded if type(leaf) is UnevenArray else leaf)


def refuse_gone(
    name: str,
    leaves: Sequence[Any],
    paths_of: Callable[[], Sequence[str]],
    donated: Sequence[int] = (),
) -> None:
    """An error that names every array whose buffers are deleted, or donated and read twice."""
    arrays = [(i, leaf) for i, leaf in enumerate(leaves) if type(leaf) in _KINDS]
    gone = [i for i, leaf in arrays if leaf.is_deleted()]
    twice = _jax.sharing([base_of(leaf) for leaf in leaves]) if donated else []
    shared = [at for at in twice if not set(at).isdisjoint(donated)]
    if not gone and not shared:
        return
    paths = paths_of()
    if gone:
        asked = f"{name} was called with arrays whose buffers are gone"
        raise deleted_error(asked, [(f"{paths[i]}: ", leaves[i]) for i in gone])
    raise DeletedArrayError(
        message(
            f"{name} donates an array that it reads twice",
            [_of_one([paths[i] for i in at], [leaves[i] for i in at]) for at in shared],
            "The buffers of a donated argument become those of a result, and cannot be read as "
            "another argument, or as what the function closes over.",
            "Pass a copy (x.copy()) in one of the places, or do not donate it.",
        )
    )


def _of_one(paths: Sequence[str], arrays: Sequence[Any]) -> str:
    is_one = len(set(map(id, arrays))) == 1
    return f"{' and '.join(paths)} are {'one array' if is_one else 'of the same buffers'}"
