"""How a move is refused: which value forbids it, the rule, the way out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshwise._jax import ClosedJaxpr, Var
from meshwise.errors import IllegalMove, message
from meshwise.ir.mesh import Mesh
from meshwise.schedule.rewrite import CycleError, Piece, replace, trace_piece
from meshwise.schedule.tiling import NotTileableError
from meshwise.schedule.view import View


def refuse(move: str, offenders: Iterable[str], rule: str, way_out: str) -> IllegalMove:
    """The error for a move that is not legal."""
    return IllegalMove(message(f"{move} is refused", offenders, rule, way_out))


def replaced(
    view: View,
    move: str,
    removed: Sequence[int],
    pieces: Sequence[Piece],
    renamed: Mapping[Var, Any],
    inputs: Sequence[Var] | None = None,
    outputs: Sequence[Any] | None = None,
) -> ClosedJaxpr:
    """Equations replaced; refused where a value would be needed to compute itself."""
    try:
        return replace(view.program.jaxpr, removed, pieces, renamed, inputs, outputs)
    except CycleError as cycle:
        raise refuse(
            move,
            [f"{v.aval.str_short(short_dtypes=True)}" for v in cycle.args[0][:4]]
            + ["an equation that is not moved reads one of them and makes another"],
            "What is moved together must be convex: no path may leave it and come back, or a value "
            "would be needed to compute itself.",
            "Move the equations on that path too.",
        ) from None


def traced(
    move: str, function: Callable[..., Any], operands: Sequence[Any], mesh: Mesh, position: int
) -> Piece:
    """New equations; refused where a value cannot be cut as they would."""
    try:
        return trace_piece(function, operands, mesh, position)
    except NotTileableError as why:
        raise refuse(
            move,
            [str(why)],
            "A device's part of a dim begins at its number times the part's size.",
            "Cut another dim.",
        ) from None


def equation_of(view: View, var: Var, move: str, kinds: Callable[[str], bool], what: str) -> int:
    """The equation that makes a value, refused where it is not of a kind."""
    index = view.maker.get(var)
    if index is None or not kinds(view.eqns[index].primitive.name):
        raise refuse(
            move,
            [view.text(var)],
            f"This move is for {what}.",
            "s.find lists what there is, by kind.",
        )
    return index
