"""Arguments whose buffers are gone: donated to an earlier call, or used twice in a donating one.

XLA finds them when the call is already under way. With jax 0.10 a process whose mesh has several
devices does not survive that, so there the arguments are looked at before each call; with later
versions the call is tried first, and looked at when it fails.
"""

from collections.abc import Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise.errors import DeletedArrayError, message
from meshwise.run.uneven import UnevenArray

_KINDS = (*_jax.ARRAY_CLASSES, UnevenArray)


def any_gone(leaves: Sequence[Any]) -> bool:
    """Whether the buffers of an argument are deleted."""
    return any([leaf.is_deleted() for leaf in leaves if type(leaf) in _KINDS])


def refuse_gone(name: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """An error that names every argument whose buffers are deleted."""
    offenders = [
        f"{path}: Array has been deleted with shape={jax.typeof(leaf).str_short()}."
        for leaf, path in zip(leaves, paths, strict=True)
        if any_gone([leaf])
    ]
    if offenders:
        raise DeletedArrayError(
            message(
                f"{name} was called with arrays whose buffers are gone",
                offenders,
                "A call that donates an argument (donate_argnums, donate_argnames) gives its "
                "buffers to the results.",
                "Go on with the results of that call, or do not donate what is needed again.",
            )
        )


def refuse_shared(
    name: str, leaves: Sequence[Any], paths: Sequence[str], donated: Sequence[int]
) -> None:
    """An error that names every donated argument that is an argument a second time."""
    places: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        if type(leaf) in _KINDS:
            places.setdefault(id(leaf), []).append(position)
    offenders = [
        " and ".join(paths[i] for i in at) + " are one array"
        for at in places.values()
        if len(at) > 1 and not set(at).isdisjoint(donated)
    ]
    if offenders:
        raise DeletedArrayError(
            message(
                f"{name} donates an array that it is given twice",
                offenders,
                "The buffers of a donated argument become those of a result, and cannot be read as "
                "another argument.",
                "Pass a copy (x.copy()) in one of the places, or do not donate it.",
            )
        )
