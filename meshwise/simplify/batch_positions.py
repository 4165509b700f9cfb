"""Positions that count along a batch: `x[arange(n), i]` reads each row's own element.

A gather or scatter has a dim of its operand paired with one of its indices where the positions in
that dim are 0, 1, 2, ... along the indices. Written as a batch the two are one dim: it can be
sharded, and nothing is sent. (GSPMD's index-parallel dims, arXiv 2105.04663 section 4.2, are
found in its compiler the same way.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Var
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.counts import Count, Counts


def pair_batches(eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any]) -> list[JaxprEqn]:
    """The equations, with counted positions of gathers and scatters written as batches."""
    counts = Counts(eqns, constants)
    found: list[JaxprEqn] = []
    for eqn in eqns:
        numbers = _Numbers.read(eqn)
        if numbers is None:
            found.append(eqn)
        else:
            found += _paired(eqn, numbers, counts)
    return found


@dataclass(frozen=True)
class _Numbers:
    """The dimension numbers of a gather or a scatter, by names that serve both."""

    names: tuple[str, str, str, str]  # positions' dims, single dims, batch of operand, of indices

    @staticmethod
    def read(eqn: JaxprEqn) -> "_Numbers | None":
        """Of a gather or scatter with more positions than one; None for anything else."""
        name = eqn.primitive.name
        if name == "gather":
            names = (
                "start_index_map",
                "collapsed_slice_dims",
                "operand_batching_dims",
                "start_indices_batching_dims",
            )
        elif name == "scatter" or name.startswith("scatter-"):
            names = (
                "scatter_dims_to_operand_dims",
                "inserted_window_dims",
                "operand_batching_dims",
                "scatter_indices_batching_dims",
            )
        else:
            return None
        return _Numbers(names) if shape_of(eqn.invars[1])[-1] > 1 else None

    def of(self, eqn: JaxprEqn) -> list[tuple[int, ...]]:
        """The four, as an equation has them."""
        return [getattr(eqn.params["dimension_numbers"], name) for name in self.names]


def _paired(eqn: JaxprEqn, numbers: _Numbers, counts: Counts) -> list[JaxprEqn]:
    """A gather or scatter with its counted positions as batches, and what makes its indices."""
    columns = index_columns(eqn.invars[1], counts)
    if columns is None:
        return [eqn]
    dims, single, batch, partners = (list(n) for n in numbers.of(eqn))
    pairs = dict(zip(batch, partners, strict=True))
    kept = []
    for column, d in zip(columns, dims, strict=True):
        b = _counted_dim(counts.of(column), shape_of(column))
        if b is None or d not in single or b in pairs.values():
            kept.append((column, d))
        elif shape_of(column)[b] != shape_of(eqn.invars[0])[d]:
            kept.append((column, d))
        else:
            pairs[d] = b
    if len(kept) == len(columns) or not kept:
        return [eqn]
    values = (
        [d for _, d in kept],
        [d for d in single if d not in pairs],
        sorted(pairs),
        [pairs[d] for d in sorted(pairs)],
    )
    changed = {n: tuple(v) for n, v in zip(numbers.names, values, strict=True)}
    params = {
        **eqn.params,
        "dimension_numbers": eqn.params["dimension_numbers"]._replace(**changed),
        "indices_are_sorted": False,
    }
    made, indices = _joined([column for column, _ in kept], eqn)
    invars = [eqn.invars[0], indices, *eqn.invars[2:]]
    return [*made, eqn.replace(invars=invars, params=params)]


def index_columns(indices: Any, counts: Counts) -> list[Any] | None:
    """The components of index vectors, where they were laid side by side one by one."""
    eqn = counts.maker(indices)
    last = len(shape_of(indices)) - 1
    if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != last:
        return None
    return eqn.invars if all(shape_of(v)[last] == 1 for v in eqn.invars) else None


def _counted_dim(count: Count | None, shape: Sequence[int]) -> int | None:
    """The only dim along which numbers count 0, 1, 2, ..."""
    if count is None or count.offset:
        return None
    moving = [d for d, (s, n) in enumerate(zip(count.strides, shape, strict=True)) if s and n > 1]
    return moving[0] if len(moving) == 1 and count.strides[moving[0]] == 1 else None


def _joined(columns: Sequence[Any], like: JaxprEqn) -> tuple[list[JaxprEqn], Any]:
    """Columns side by side again, and the equation that lays them so."""
    if len(columns) == 1:
        return [], columns[0]
    shape, dtype = shape_of(columns[0]), type_of(columns[0]).dtype
    aval = _jax.array_type(jax.ShapeDtypeStruct((*shape[:-1], len(columns)), dtype))
    joined = _jax.new_var(aval)
    last = {"dimension": len(shape) - 1}
    return [_jax.new_eqn(lax.concatenate_p, columns, [joined], last, like)], joined
