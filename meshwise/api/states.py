"""The states of a program, by name: arguments that a step makes anew, and what hints forbid."""

from collections.abc import Sequence
from typing import Any

from meshwise.api.spmd_program import SpmdProgram
from meshwise.errors import ArgumentError, IllegalMove, message
from meshwise.schedule.handles import next_values, own_states, path_of, type_key
from meshwise.schedule.moves.slice_state import State
from meshwise.schedule.view import View


def states_of(program: SpmdProgram) -> dict[int, int]:
    """Arguments that a program makes anew, by position, and the results they become."""
    known = program.per_device
    return dict(program.states) or next_values(
        program.in_paths, program.out_paths, known.in_types, known.out_types
    )


def kept_trees(args: Any, results: Any, ins: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
    """Leaves of arguments that a function makes anew, and of the results that they become.

    Those are trees, of more than an array alone, of an argument and of a result, or of a part of
    one, whose structures and types are equal; of several the first that is left.
    """
    parts, start = [], 0
    for tree in args.children():
        parts.append((tree, start))
        start += tree.num_leaves
    tied: dict[int, int] = {}

    def tie(tree: Any, first: int) -> None:
        if tree.node_data() is None:
            return
        types = list(map(type_key, outs[first : first + tree.num_leaves]))
        for part in parts:
            known, at = part
            if known == tree and list(map(type_key, ins[at : at + tree.num_leaves])) == types:
                tied.update({at + k: first + k for k in range(tree.num_leaves)})
                parts.remove(part)
                return
        for child in tree.children():
            tie(child, first)
            first += child.num_leaves

    tie(results, 0)
    return tied


def own_state_names(program: SpmdProgram, view: View) -> tuple[str, ...]:
    """The states that a policy may keep in slices: those that a step makes for itself."""
    return tuple([program.in_paths[i] for i in own_states(view, states_of(program))])


def state_of(program: SpmdProgram, name: str, result: int | str | None) -> State:
    """The state that a user names, its next value by `result` where the program does not say.

    Raises ArgumentError for what is none, IllegalMove where a hint says how it lies.
    """
    argument = _position(program, name, program.in_paths, "argument")
    following = _next_value(program, argument, result)
    _check_open(program, argument, following, name)
    return State(argument, following, name)


def _position(program: SpmdProgram, name: str, paths: Sequence[str], what: str) -> int:
    positions = path_of(paths, name)
    if len(positions) != 1:
        shown = [paths[i] for i in positions] or list(paths)
        raise ArgumentError(
            message(
                f"{name!r} is {'more than one' if positions else 'no'} {what} of {program.name}",
                shown[:12],
                f"A name is the path of one {what}, or the end of one.",
                "Name one of these.",
            )
        )
    return positions[0]


def _next_value(program: SpmdProgram, argument: int, result: int | str | None) -> int:
    if isinstance(result, str):
        return _position(program, result, program.out_paths, "result")
    following = states_of(program).get(argument) if result is None else result
    shown = ", ".join(f"{i} ({path})" for i, path in enumerate(program.out_paths[:12]))
    if following is None or not 0 <= following < len(program.out_paths):
        raise ArgumentError(
            message(
                f"{program.in_paths[argument]} has no next value that is known",
                [f"result={result}"],
                "A state is an argument that the step makes anew, for the next step.",
                f"Name the result, or its position: {shown}.",
            )
        )
    return following


def _check_open(program: SpmdProgram, argument: int, result: int, name: str) -> None:
    """A hint says how a value lies, and hints hold."""
    ins, outs = program.hints
    hints = [*ins[argument : argument + 1], *outs[result : result + 1]]
    said = [f"{name} is hinted {hint}" for hint in hints if hint is not None]
    if said:
        raise IllegalMove(
            message(
                "slice_state is refused",
                said,
                "A hint says how a value lies, and hints are never changed.",
                "Leave argument and result without a hint, or hint at the slices.",
            )
        )
