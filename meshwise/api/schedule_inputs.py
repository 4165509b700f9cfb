"""What moves of a schedule are asked for: kinds, handles, numbers; an error for what is none."""

import operator
from collections.abc import Sequence
from typing import Any

from meshwise.errors import ArgumentError, message
from meshwise.ir.collectives import CollectiveKind
from meshwise.rules.registry import REGISTRY
from meshwise.schedule.handles import Handle, kind_of
from meshwise.schedule.view import View


def refuse_others(given: Sequence[Any]) -> None:
    """Raise ArgumentError where a move is asked for something else than values."""
    others = [repr(h) for h in given if not isinstance(h, Handle)]
    if not given or others:
        raise ArgumentError(
            message(
                "A move was asked for no values" if not given else "A move takes handles",
                others or ["an empty list"],
                "Handles name values of a program; s.find gives those there are of a kind.",
                "Look what s.find found: print(s) lists every value, by kind.",
            )
        )


def refuse_unknown_kind(kind: Any, view: View) -> None:
    """Raise ArgumentError for a kind that no program has, not for one that just this one lacks."""
    there = list(dict.fromkeys(kind_of(eqn) for eqn in view.eqns))
    if kind is not None and kind not in [*CollectiveKind, *REGISTRY.rules, *there]:
        raise ArgumentError(
            message(
                "A schedule was asked for values of a kind that there is not",
                [f"kind={kind!r}"],
                f"A kind is that of a collective ({', '.join(CollectiveKind)}), the name of a JAX "
                "primitive, or of a fused equation.",
                f"Here are {', '.join(there) or 'none'}; print the schedule to see each value.",
            )
        )


def refuse_no_bytes(move: str, max_bytes: Any) -> None:
    """Raise ArgumentError for what is no number of bytes; None is no limit."""
    refuse_no_numbers(move, max_bytes=max_bytes)
    if max_bytes is not None and max_bytes < 0:
        raise ArgumentError(
            message(
                f"{move} was given less than no room",
                [f"max_bytes={max_bytes!r}"],
                "max_bytes is a whole number of bytes a device, and not negative.",
                "Leave it out for no limit.",
            )
        )


def refuse_no_numbers(move: str, **numbers: Any) -> None:
    """Raise ArgumentError for what is given in the place of whole numbers; None is left out."""
    problems = [f"{name}={n!r}" for name, n in numbers.items() if not (n is None or _is_whole(n))]
    if problems:
        raise ArgumentError(
            message(
                f"{move} was given numbers that are none",
                problems,
                "Dims, operands, parts and bytes are whole numbers.",
                "Leave them out for what is done by default.",
            )
        )


def _is_whole(number: Any) -> bool:
    try:
        operator.index(number)
    except TypeError:
        return False
    return not isinstance(number, bool)
