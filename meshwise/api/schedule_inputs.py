"""What moves of a schedule are asked for: kinds, handles, numbers; an error for what is none."""

from collections.abc import Iterable, Sequence
from typing import Any

from meshwise.errors import ArgumentError, message
from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.numbers import whole_number
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


def number_of_bytes(move: str, max_bytes: Any) -> int | None:
    """The number, None for no limit. Raises ArgumentError for what is no number of bytes."""
    (number,) = whole_numbers(move, max_bytes=max_bytes)
    if number is not None and number < 0:
        raise ArgumentError(
            message(
                f"{move} was given less than no room",
                [f"max_bytes={max_bytes!r}"],
                "max_bytes is a whole number of bytes a device, and not negative.",
                "Leave it out for no limit.",
            )
        )
    return number


def whole_numbers(move: str, **given: Any) -> list[int | None]:
    """Whole numbers as Python has them; None for what is left out.

    Raises ArgumentError for what is given in their place.
    """
    numbers = [None if n is None else whole_number(n) for n in given.values()]
    pairs = zip(given.items(), numbers, strict=True)
    problems = [f"{name}={n!r}" for (name, n), number in pairs if n is not None and number is None]
    if problems:
        raise ArgumentError(
            message(
                f"{move} was given numbers that are none",
                problems,
                "Dims, operands, parts and bytes are whole numbers.",
                "Leave them out for what is done by default.",
            )
        )
    return numbers


def names_of(asker: str, given: Any) -> list[str]:
    """One name, or several, as a list. Raises ArgumentError for what is none."""
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(
            message(
                f"{asker} was given names that are none",
                [f"{given!r:.60}"],
                "Axes, and arguments of a program, are named by text: one, or a list of them.",
                "Name one or more; print the schedule to see what there is.",
            )
        )
    return names


def refuse_no_text(asker: str, **given: Any) -> None:
    """Raise ArgumentError for what is given in the place of text; None is left out."""
    problems = [f"{k}={v!r:.60}" for k, v in given.items() if not isinstance(v, str | None)]
    if problems:
        raise ArgumentError(
            message(
                f"{asker} was given what is no text",
                problems,
                "A source is a part of a line as file.py:12, a name that of a fused equation.",
                "Leave it out for all, or for a name of the equation's own.",
            )
        )


def refuse_taken_name(name: Any, view: View) -> None:
    """Raise ArgumentError for what cannot name a fused equation: `find` would confuse it."""
    refuse_no_text("fuse", name=name)
    primitives = {eqn.primitive.name for eqn in view.eqns}
    if name is not None and (not name or name in {*CollectiveKind, *REGISTRY.rules, *primitives}):
        raise ArgumentError(
            message(
                "fuse was given a name by which its equation could not be found",
                [f"name={name!r}"],
                "s.find finds values by their kind: that of a collective, a primitive's name, or "
                "that of a fused equation.",
                "Give a name that is no kind and no primitive's, or leave it out.",
            )
        )
