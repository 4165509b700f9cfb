"""All passes that make a flat program simpler, in their order."""

from collections.abc import Mapping
from typing import Any

from meshwise._jax import JaxprEqn, Var
from meshwise.simplify.batch_positions import pair_batches
from meshwise.simplify.borders.around import merge_windows
from meshwise.simplify.borders.merge import merge_moves
from meshwise.simplify.borders.rows import slice_splits
from meshwise.simplify.broadcast_products import broadcast_after_products
from meshwise.simplify.inner_products import unflatten_products
from meshwise.simplify.inverse_layouts import cancel_inverse_layouts
from meshwise.simplify.known_positions import cut_known_positions
from meshwise.simplify.parts import read_parts
from meshwise.simplify.redundancy import (
    eliminate_common_subexpressions,
    eliminate_dead_code,
    hoist_loop_invariants,
)
from meshwise.simplify.residuals import remake_residuals
from meshwise.simplify.splats import propagate_splats
from meshwise.simplify.turned_products import read_unturned


def simplify(
    eqns: list[JaxprEqn], outputs: list[Any], constants: Mapping[Var, Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a flat program and what it returns, in simpler form.

    `constants` are the values of its constants.
    """
    eqns = hoist_loop_invariants(eqns)
    eqns, outputs = eliminate_common_subexpressions(eqns, outputs)
    eqns = remake_residuals(propagate_splats(eqns, constants), outputs)
    eqns, outputs = read_parts(eqns, outputs)
    eqns, outputs = cancel_inverse_layouts(eqns, outputs)
    eqns = broadcast_after_products(read_unturned(eqns))
    eqns = cut_known_positions(pair_batches(eqns, constants), constants)
    eqns = unflatten_products(eqns)
    eqns = _with_moves_merged(eqns, outputs, constants)
    sliced = slice_splits(eqns)
    if sliced is eqns:
        return eqns, outputs
    return _with_moves_merged(sliced, outputs, constants), outputs


def _with_moves_merged(
    eqns: list[JaxprEqn], outputs: list[Any], constants: Mapping[Var, Any]
) -> list[JaxprEqn]:
    """The equations with each move as one, and those that loops repeat before these.

    Of several equations that move rows some make more than they read, and stay in a loop.
    """
    merged = eliminate_dead_code(merge_moves(eqns, outputs, constants), outputs)
    merged = eliminate_dead_code(merge_windows(merged, outputs), outputs)
    return hoist_loop_invariants(merged)
