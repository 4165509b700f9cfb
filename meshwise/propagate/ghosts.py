"""Rows with few others beside them, as ghosts of a grid: computed where the rows of the grid are.

A scheme in fluxes lays ghosts beside its rows and computes of pairs of neighbours: of `n` rows with
two on either side come `n + 1` fluxes, and of these `n` differences. By itself each of these arrays
is shared out anew, its rows a few places from where their neighbours are, and most rows travel
every time. So `n` of the rows, the main ones, are computed where the rows of the grid lie, and
those before and after them by themselves. Where two arrays are a few places apart, the main rows of
one are shifted, which sends as many rows.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.bodies import is_visible, scopes
from meshwise.ir.operators import ELEMENTWISE, JOINS, REDUCTIONS, SPREADS, is_among
from meshwise.ir.program import Program, bytes_of, shape_of
from meshwise.propagate.completion import Completion
from meshwise.propagate.grids import Grids
from meshwise.propagate.parted import Writing, size_of
from meshwise.propagate.rewriting import rewritten, without_unread
from meshwise.rules.registry import OpRule

# Operators that treat each row alone, if the rows' dim is none that they are about.
_BY_ROWS = (
    ELEMENTWISE | REDUCTIONS | SPREADS | JOINS | {"stack", "squeeze", "transpose", "set_rows"}
)


# So many rows beside the main ones are few: of each all is computed by itself.
FEW = 8


@dataclass(frozen=True)
class _Rows:
    """Rows along a dim as parts side by side: the main ones, and single ones before and after.

    `region` is all that is computed of the same grids: the equations that laid rows beside them.
    Where all `goes_round`, those before the main ones are the last of these, and those after them
    the first.
    """

    dim: int
    parts: tuple[Any, ...]
    first: int
    region: frozenset[int]
    goes_round: bool = False

    @property
    def count(self) -> int:
        """How many main rows there are."""
        return size_of(self.parts[self.first], self.dim)


def rows_beside(
    program: Program, rules: Sequence[OpRule], completion: Completion, shifted: float = inf
) -> tuple[Program, float]:
    """The program with such rows in parts, and what is shifted for it; itself where there are none.

    What somebody reads in another way than row by row stays as it is, with all that it is of. So
    does that for which more from outside is shifted, as a part of what it lays.
    """
    if not any(is_among(eqn, JOINS) for eqn in program.equations):
        return program, 0.0
    as_they_are: set[int] = set()
    while True:
        ghosts = _Ghosts(program, rules, completion, as_they_are)
        for index, eqn in enumerate(program.equations):
            ghosts.visit(index, eqn)
        instead = without_unread(program, ghosts.instead, set())
        together = ghosts.grids.together(program, instead)
        dear = set[int]().union(*(one.laid for one in together if one.is_dear(shifted)))
        left = ghosts.left() or dear
        if not left:
            return rewritten(program, instead), max((one.shifted for one in together), default=0.0)
        as_they_are |= left


@dataclass
class _Ghosts:
    """What is known of rows in parts, and what is written in their place.

    `as_they_are` are the equations that lay rows beside others in vain.
    """

    given: Program
    rules: Sequence[OpRule]
    completion: Completion
    as_they_are: Set[int]
    rows: dict[Var, _Rows] = field(default_factory=dict)
    instead: dict[int, Sequence[JaxprEqn]] = field(default_factory=dict)
    grids: Grids = field(default_factory=Grids)

    def __post_init__(self) -> None:
        """Nothing is written yet."""
        equations = self.given.equations
        self.write = Writing(self.given)
        self._scopes = scopes(equations)
        made_in = zip(equations, self._scopes, strict=True)
        self._scope_of = {v: scope for eqn, scope in made_in for v in eqn.outvars}
        self._read_otherwise: set[int] = set()
        self._laid: set[int] = set()
        self._computed: set[int] = set()

    def left(self) -> set[int]:
        """The equations that laid rows beside others, and had better not."""
        flat = self.given.jaxpr.jaxpr
        self._leave(a for a in flat.outvars if not isinstance(a, Literal))
        return (self._laid - self._computed) | self._read_otherwise

    def _leave(self, atoms: Iterable[Any]) -> None:
        for atom in atoms:
            if isinstance(atom, Var) and atom in self.rows:
                self._read_otherwise |= self.rows[atom].region

    def visit(self, index: int, eqn: JaxprEqn) -> None:
        """Write an equation in parts, if it lays rows beside others or is of such, row by row."""
        self.write.begin(self._scopes[index])
        is_plain = not eqn.effects and index not in self.given.hints and not _jax.is_mark(eqn)
        # What is computed in another body stays there.
        is_here = all(is_visible(self._scope_of[a], self._scopes[index]) for a in self._read(eqn))
        is_written = is_plain and is_here and (self._lay(index, eqn) or self._follow(index, eqn))
        if is_written:
            self.instead[index] = self.write.made
            regions = [self.rows[a].region for a in self._read(eqn)] or [{index}]
            self.grids.region_of[index] = frozenset[int]().union(*regions)
        else:
            self._leave(eqn.invars)
            self.write.keep(eqn)

    def _lay(self, index: int, eqn: JaxprEqn) -> bool:
        """Begin with rows that an equation lays beside others that are in shards."""
        if index in self.as_they_are or self._read(eqn):
            return False
        found = self._joined(eqn) or self._padded(eqn)
        if found is None:
            return False
        dim, parts, count, first = found
        self._laid.add(index)
        goes_round = self.write.merging.goes_round(eqn, count)
        self._keep(eqn, dim, parts, count, first, frozenset({index}), goes_round)
        return True

    def _joined(self, eqn: JaxprEqn) -> tuple[int, list[Any], int, int] | None:
        """Along which dim rows are joined; these, how many are main ones, and the first of them."""
        if eqn.primitive is not lax.concatenate_p:
            return None
        dim = eqn.params["dimension"]
        sizes = [size_of(a, dim) for a in eqn.invars]
        most = sizes.index(max(sizes))
        grid, start = self._cut_of(eqn.invars[most], dim)
        count, total = size_of(grid, dim), sum(sizes)
        if not self._is_few(grid, dim, total - count):
            return None
        first = min(max(sum(sizes[:most]) - start, 0), total - count)
        return dim, list(eqn.invars), count, first

    def _padded(self, eqn: JaxprEqn) -> tuple[int, list[Any], int, int] | None:
        """The same where rows are padded."""
        if eqn.primitive is not lax.pad_p or isinstance(eqn.invars[0], Literal):
            return None
        config = [tuple(map(int, amounts)) for amounts in eqn.params["padding_config"]]
        if any(min(amounts) < 0 or amounts[2] for amounts in config):
            return None
        operand, fill = eqn.invars
        few = (d for d, own in enumerate(config) if self._is_few(operand, d, sum(own)))
        dim = next(few, None)
        if dim is None:
            return None
        low, high, _ = config[dim]
        if any(any(own) for d, own in enumerate(config) if d != dim):
            others = tuple([(0, 0, 0) if d == dim else own for d, own in enumerate(config)])
            shape = [n + sum(own) for n, own in zip(shape_of(operand), others, strict=True)]
            what = lax.pad_p, [operand, fill], {"padding_config": others}
            operand = self.write.emit(eqn, *what, _jax.var_like(operand, shape))
        row = self.write.row_of(eqn, fill, operand, dim)
        parts = [*[row] * low, operand, *[row] * high]
        return dim, parts, size_of(operand, dim), low

    def _is_few(self, grid: Any, dim: int, rows: int) -> bool:
        """Whether so many rows beside an array are few: at most half as many as a full shard has.

        Each device computes them, beside those of its own.
        """
        axes = () if isinstance(grid, Literal) else self.completion.dims[grid][dim]
        shards = self.given.mesh.size(axes)
        return shards > 1 and 0 < rows <= min(FEW, -(-size_of(grid, dim) // shards) // 2)

    def _cut_of(self, atom: Any, dim: int) -> tuple[Any, int]:
        """Of what something is a part along one dim, and from which row on; maybe of itself."""
        cut = _jax.rows_cut(self.write.merging.maker(atom), dim)
        return cut[:2] if cut is not None and cut[0] in self.completion.dims else (atom, 0)

    def _follow(self, index: int, eqn: JaxprEqn) -> bool:
        """Go on with rows in parts that an equation reads."""
        read = self._read(eqn)
        if not read or len(eqn.outvars) > 1 or 0 in shape_of(eqn.outvars[0]):
            return False
        rows = self.rows[read[0]]
        if _jax.is_plain_slice(eqn):
            return self._sliced(eqn, rows)
        if eqn.primitive is lax.pad_p and any(eqn.params["padding_config"][rows.dim]):
            return self._padded_more(eqn, rows)
        return self._by_rows(index, eqn, read)

    def _read(self, eqn: JaxprEqn) -> list[Var]:
        return [a for a in eqn.invars if isinstance(a, Var) and a in self.rows]

    def _sliced(self, eqn: JaxprEqn, rows: _Rows) -> bool:
        starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
        start, limit = starts[rows.dim], limits[rows.dim]
        more = limit - start - rows.count
        first = min(max(rows.first - start, 0), more)
        is_round = rows.goes_round and more >= 0
        parts = self._from(eqn, rows, start + first) if is_round else rows.parts
        parts = self.write.cut(eqn, parts, rows.dim, start, limit)
        shape = shape_of(eqn.outvars[0])
        for k, part in enumerate(parts):
            starts[rows.dim], limits[rows.dim] = 0, size_of(part, rows.dim)
            own = [*shape[: rows.dim], limits[rows.dim], *shape[rows.dim + 1 :]]
            if list(shape_of(part)) != own:
                parts[k] = self.write.slice(eqn, part, starts, limits)
        if more > 0:
            self._keep(eqn, rows.dim, parts, rows.count, first, rows.region, rows.goes_round)
        else:
            self.write.join(eqn, parts, rows.dim, eqn.outvars[0])
        return True

    def _padded_more(self, eqn: JaxprEqn, rows: _Rows) -> bool:
        config = [tuple(map(int, amounts)) for amounts in eqn.params["padding_config"]]
        low, high, gap = config.pop(rows.dim)
        is_few = len(rows.parts) + low + high <= FEW + 1
        if min(low, high) < 0 or gap or any(map(any, config)) or not is_few:
            return False
        row = self.write.row_of(eqn, eqn.invars[1], rows.parts[rows.first], rows.dim)
        parts = [*[row] * low, *rows.parts, *[row] * high]
        self._keep(eqn, rows.dim, parts, rows.count, rows.first + low, rows.region)
        return True

    def _by_rows(self, index: int, eqn: JaxprEqn, read: Sequence[Var]) -> bool:
        """An operator that treats each row alone, of each of the parts."""
        rule = self.rules[index]
        if not is_among(eqn, _BY_ROWS) or rule.opaque:
            return False
        found = [self.rows[a] for a in read]
        factors = rule.factors
        pairs = zip(eqn.invars, factors.operands, strict=True)
        along = {
            dims[self.rows[a].dim] for a, dims in pairs if isinstance(a, Var) and a in self.rows
        }
        special = {*factors.reduction_of, *factors.whole, *factors.permuted, *factors.compound}
        dim = next(iter(along))
        if len(along) > 1 or len(dim) != 1 or dim[0] in special or dim not in factors.results[0]:
            return False
        count, at = found[0].count, factors.results[0].index(dim)
        if any(rows.count != count for rows in found):
            return False
        total = size_of(eqn.outvars[0], at)
        first = _between([rows.first for rows in found], total - count)
        operands: list[Sequence[Any]] = []
        goes_round = all(rows.goes_round for rows in found)
        for atom, dims in zip(eqn.invars, factors.operands, strict=True):
            if isinstance(atom, Var) and atom in self.rows:
                operands.append(self._from(eqn, self.rows[atom], first))
            elif dim in dims:
                own = dims.index(dim)
                operands.append(self.write.parted(eqn, [atom], own, count, first))
                self.grids.cut_bytes[index] += self._own_bytes(atom)
                goes_round &= self._is_spread(atom, own)
            else:
                operands.append((atom,) * (total - count + 1))
        made = [
            self._part(eqn, part, at, count if k == first else 1)
            for k, part in enumerate(zip(*operands, strict=True))
        ]
        region = frozenset[int]().union(*(rows.region for rows in found))
        self.rows[eqn.outvars[0]] = _Rows(at, tuple(made), first, region, goes_round)
        self._computed |= region
        return True

    def _own_bytes(self, atom: Any) -> int:
        """Of an array; of one that repeats another, that of this one."""
        maker = self.write.merging.maker(atom)
        is_spread = maker is not None and is_among(maker, SPREADS)
        return bytes_of(maker.invars[0] if maker is not None and is_spread else atom)

    def _part(self, eqn: JaxprEqn, operands: Sequence[Any], dim: int, rows: int) -> Any:
        """An operator of one of the parts."""
        shape = list(shape_of(eqn.outvars[0]))
        shape[dim] = rows
        params = dict(eqn.params)
        if eqn.primitive is lax.broadcast_in_dim_p:
            params["shape"] = tuple(shape)
        return self.write.emit(
            eqn, eqn.primitive, operands, params, _jax.var_like(eqn.outvars[0], shape)
        )

    def _keep(
        self,
        eqn: JaxprEqn,
        dim: int,
        parts: Sequence[Any],
        count: int,
        first: int,
        region: frozenset[int],
        goes_round: bool = False,
    ) -> None:
        made = self.write.parted(eqn, parts, dim, count, first)
        self.rows[eqn.outvars[0]] = _Rows(dim, made, first, region, goes_round)

    def _from(self, eqn: JaxprEqn, rows: _Rows, first: int) -> tuple[Any, ...]:
        """The parts of rows where the main ones are those from another one on.

        Of what goes round they are the same ones, which go on round.
        """
        main = rows.parts[rows.first]
        main = self.write.roll(eqn, main, rows.dim, rows.first - first) if rows.goes_round else None
        return self.write.parted(eqn, rows.parts, rows.dim, rows.count, first, main)

    def _is_spread(self, atom: Any, dim: int) -> bool:
        """Whether an array has the same row of a dim again and again."""
        maker = self.write.merging.maker(atom)
        if maker is None or not is_among(maker, SPREADS):
            return False
        dims = maker.params["broadcast_dimensions"]
        return dim not in dims or size_of(maker.invars[0], dims.index(dim)) == 1


def _between(firsts: Sequence[int], most: int) -> int:
    """Of some numbers of rows before the main ones that from which others are least away.

    In the middle, if several are; there are at `most` so many before them.
    """
    away = {one: sum(abs(one - first) for first in firsts) for one in firsts}
    return min(away, key=lambda one: (away[one], abs(most - 2 * one), one))
