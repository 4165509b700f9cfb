"""Windows over what has borders of its own rows around it: one equation, without what is joined.

`jnp.pad(u, 1, mode="wrap")` before a convolution, or `"reflect"`, `"symmetric"` and `"edge"`: by
itself what is joined is shared out anew over the devices, a few rows more for each, and then
windows read it.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import Border, JaxprEqn, Literal
from meshwise.ir.bodies import scopes
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, equations_of
from meshwise.simplify.borders.shifts import rows_of

# At most so many rows lie before an array, or behind it.
MOST = 8


def merge_windows(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations with each window over such borders as one, where nothing else reads them.

    What is joined would be there for that all the same. Nor where it is joined once, before a loop.
    """
    makers = Makers({v: eqn for eqn in eqns for v in eqn.outvars}, frozenset())
    made_in = [*zip(eqns, scopes(eqns), strict=True)]
    scope_of = {v: scope for eqn, scope in made_in for v in eqn.outvars}
    found: dict[int, tuple[Any, list[JaxprEqn]]] = {}
    for index, (eqn, scope) in enumerate(made_in):
        root = _joined_root(eqn.invars[0], makers) if eqn.primitive in _jax.BORDERED else None
        merged = None if root is None or scope_of[root] != scope else _merged(eqn, makers)
        if merged is not None:
            found[index] = root, merged
    if not found:
        return list(eqns)
    readers: dict[Any, list[int]] = defaultdict(list)
    for index, eqn in enumerate(eqns):
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers[atom].append(index)
    returned = {a for a in outputs if not isinstance(a, Literal)}

    def is_read_otherwise(var: Any) -> bool:
        others = [index for index in readers[var] if index not in found]
        is_spread = all(_places(eqns[index]) is not None for index in others)
        return (
            var in returned
            or not is_spread
            or any(is_read_otherwise(v) for index in others for v in eqns[index].outvars)
        )

    left = {root for root, _ in found.values() if is_read_otherwise(root)}
    return [
        made
        for index, eqn in enumerate(eqns)
        for made in (found[index][1] if index in found and found[index][0] not in left else [eqn])
    ]


def _joined_root(atom: Any, makers: Makers) -> Any | None:
    """What is joined, of which something is no more than the same with dims of one element."""
    eqn = any_maker(atom, makers)
    while eqn is not None and eqn.primitive is not lax.concatenate_p:
        if _places(eqn) is None:
            return None
        eqn = any_maker(eqn.invars[0], makers)
    return None if eqn is None else eqn.outvars[0]


def _merged(eqn: JaxprEqn, makers: Makers) -> list[JaxprEqn] | None:
    """A window over such borders, along dims that it pads with nothing itself."""
    dims = range(len(shape_of(eqn.invars[0])))
    may_have = {d for d in dims if _may_have_border(eqn, d)}
    made, source, borders = _bordered(eqn, eqn.invars[0], may_have, makers)
    return [*made, _jax.with_borders(eqn, source, borders, eqn.outvars)] if borders else None


def _may_have_border(eqn: JaxprEqn, dim: int) -> bool:
    """Whether a window goes along a dim, and pads or dilates nothing there."""
    at = _jax.padded_dim(eqn.primitive, eqn.params, dim)
    if at < 0 or tuple(eqn.params["padding"][at]) != (0, 0):
        return False
    dilations = eqn.params.get("lhs_dilation", eqn.params.get("base_dilation"))
    return dilations is None or dilations[at] == 1


def _bordered(
    eqn: JaxprEqn, atom: Any, dims: Set[int], makers: Makers
) -> tuple[list[JaxprEqn], Any, list[Border]]:
    """What has borders around it along some dims; these, and what is written for it."""
    maker = any_maker(atom, makers)
    if maker is None:
        return [], atom, []
    if maker.primitive is lax.concatenate_p and maker.params["dimension"] in dims:
        dim = maker.params["dimension"]
        source, runs = rows_of(atom, dim, makers)
        border = _around(runs, dim, shape_of(source)[dim])
        if border is None:
            return [], atom, []
        made, source, borders = _bordered(eqn, source, dims - {dim}, makers)
        return made, source, [*borders, border]
    places = _places(maker)
    if places is None:
        return [], atom, []
    inner = {k for k, d in enumerate(places) if d in dims}
    made, source, borders = _bordered(eqn, maker.invars[0], inner, makers)
    if not borders:
        return [], atom, []
    shape = [1] * len(shape_of(atom))
    for n, d in zip(shape_of(source), places, strict=True):
        shape[d] = n
    own = eqn.replace(outvars=[_jax.var_like(atom, shape)])
    made += equations_of(own, [source], lambda x: lax.broadcast_in_dim(x, shape, places)) or ()
    moved = [Border(places[b.dim], b.before, b.after) for b in borders]
    return made, own.outvars[0], moved


def _around(runs: Sequence[tuple[int, int]], dim: int, size: int) -> Border | None:
    """The border of rows of one value, as runs (first, count), of which one is all of it."""
    if runs.count((0, size)) != 1 or len(runs) == 1:
        return None
    at = runs.index((0, size))
    before, after = (
        tuple(first + k for first, count in part for k in range(count))
        for part in (runs[:at], runs[at + 1 :])
    )
    border = Border(dim, before, after)
    is_few = max(len(before), len(after)) <= MOST
    return border if is_few and (border.goes_round(size) or _is_near(border, size)) else None


def _is_near(border: Border, size: int) -> bool:
    """Whether rows are not further from their places than those of what is mirrored there."""
    before = [row - place for place, row in enumerate(border.before, -len(border.before))]
    after = [place - row for place, row in enumerate(border.after, size)]
    return all(0 < away <= 2 * len(side) for side in (before, after) for away in side)


def _places(eqn: JaxprEqn) -> list[int] | None:
    """Where the dims of an operand are in what has dims of one element more, and no other ones."""
    if len(eqn.invars) != 1:
        return None
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.primitive is lax.broadcast_in_dim_p:
        places = [*eqn.params["broadcast_dimensions"]]
    elif eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None:
        # Those that have more than one element, as they come; others anywhere between.
        places, at = list[int](), 0
        for n in before:
            at = next((d for d in range(at, len(after)) if after[d] == n), len(after))
            places.append(at)
            at += 1
    else:
        return None
    others = [n for d, n in enumerate(after) if d not in places]
    kept = len(after) not in places and [after[d] for d in places] == [*before]
    return places if kept and all(n == 1 for n in others) else None
