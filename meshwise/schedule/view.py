"""What moves ask of a per-device program: who makes and reads a value, and what is known of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var, named_axes
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.per_device import PerDeviceProgram, Reason
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.ir.source import place
from meshwise.schedule.layouts import Known, Layout, layouts_of, replicated
from meshwise.schedule.slices import Positions
from meshwise.schedule.tiling import one_dim

GATHERS = frozenset({"all_gather", "all_gather_invariant"})
SUMS = frozenset({"psum", "psum_invariant"})


@dataclass(frozen=True)
class Tile:
    """A value as tiles: `whole` is cut over axes along one dim, `tile` is this device's part."""

    whole: Any
    tile: Any
    dim: int
    axes: Axes

    @property
    def sharding(self) -> Sharding:
        """The tile's place in the whole."""
        return one_dim(len(shape_of(self.whole)), self.dim, self.axes)


@dataclass(frozen=True, eq=False)
class View:
    """A per-device program and what is found out about it, each when it is first asked for.

    Programs that moves make of one share what is `known` of their equations.
    """

    program: PerDeviceProgram
    known: Known = field(default_factory=Known)

    @property
    def eqns(self) -> list[JaxprEqn]:
        """The equations in order."""
        return self.program.jaxpr.jaxpr.eqns

    @property
    def mesh(self) -> Mesh:
        """The mesh whose axes collectives go over."""
        return self.program.mesh

    @property
    def inputs(self) -> list[Var]:
        """The arguments."""
        return self.program.jaxpr.jaxpr.invars

    @property
    def outputs(self) -> list[Any]:
        """The results."""
        return self.program.jaxpr.jaxpr.outvars

    @cached_property
    def maker(self) -> dict[Var, int]:
        """The equation that makes each value."""
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The equations that read each value, none of some."""
        jaxpr = self.program.jaxpr.jaxpr
        values = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in self.eqns for v in eqn.outvars)]
        found: dict[Var, list[int]] = {v: [] for v in values}
        for i, eqn in enumerate(self.eqns):
            for atom in dict.fromkeys(a for a in eqn.invars if not isinstance(a, Literal)):
                found[atom].append(i)
        return found

    @cached_property
    def returned(self) -> frozenset[Var]:
        """Values that are results."""
        return frozenset(a for a in self.outputs if not isinstance(a, Literal))

    @cached_property
    def layouts(self) -> dict[Var, Layout]:
        """Every value's layout."""
        return layouts_of(self.program, self.known)

    def layout(self, atom: Any) -> Layout:
        """A value's layout; a literal is replicated."""
        return replicated(0) if isinstance(atom, Literal) else self.layouts[atom]

    @cached_property
    def slices(self) -> dict[Var, Tile]:
        """Values that are this device's part of a replicated one, by the part."""
        positions = Positions(self.mesh.axis_size)
        found = {}
        for eqn in self.eqns:
            positions.read(eqn)
            cut = positions.slice_of(eqn)
            if cut is None or isinstance(cut.whole, Literal):
                continue
            if not {*cut.axes} & self.layout(cut.whole).varying:
                found[eqn.outvars[0]] = Tile(cut.whole, eqn.outvars[0], cut.dim, cut.axes)
        return found

    @cached_property
    def gathers(self) -> dict[Var, Tile]:
        """Values that are gathered from tiles, by the whole; padding cut off where it was."""
        found: dict[Var, Tile] = {}
        for eqn in self.eqns:
            name = eqn.primitive.name
            if name in GATHERS and eqn.params.get("tiled") and _is_plain(eqn):
                dim = eqn.params["all_gather_dimension"]
                whole = eqn.outvars[0]
                found[whole] = Tile(whole, eqn.invars[0], dim, named_axes(eqn))
            elif name == "slice" and (cut := self._cut_of(eqn, found)):
                found[eqn.outvars[0]] = cut
        return found

    def _cut_of(self, eqn: JaxprEqn, gathers: dict[Var, Tile]) -> Tile | None:
        """A gathered value without the padding at the end of the gathered dim."""
        of, params = gathers.get(eqn.invars[0]), eqn.params  # type: ignore[arg-type]
        if of is None or any(params["start_indices"]) or {*(params["strides"] or (1,))} != {1}:
            return None
        shape, kept = shape_of(eqn.invars[0]), params["limit_indices"]
        count = self.mesh.size(of.axes)
        others = all(
            n == k for d, (n, k) in enumerate(zip(shape, kept, strict=True)) if d != of.dim
        )
        if not others or -(-kept[of.dim] // count) * count != shape[of.dim]:
            return None
        return Tile(eqn.outvars[0], of.tile, of.dim, of.axes)

    def with_jaxpr(
        self,
        jaxpr: ClosedJaxpr,
        reasons: Sequence[Reason] = (),
        in_shardings: Sequence[Sharding] | None = None,
        out_shardings: Sequence[Sharding] | None = None,
    ) -> "View":
        """The program with another jaxpr, and the reasons of its new collectives."""
        program = self.program
        changed = replace(
            program,
            jaxpr=jaxpr,
            reasons=(*program.reasons, *reasons),
            in_shardings=program.in_shardings if in_shardings is None else tuple(in_shardings),
            out_shardings=program.out_shardings if out_shardings is None else tuple(out_shardings),
        )
        return View(changed, self.known)

    def text(self, atom: Any) -> str:
        """A value in words: its type, what makes it, and the user's line."""
        short = atom.aval.str_short(short_dtypes=True)
        if isinstance(atom, Literal):
            return f"{short} {atom.val}"
        if atom not in self.maker:
            return f"{short}, argument {self.inputs.index(atom)}" if atom in self.inputs else short
        eqn = self.eqns[self.maker[atom]]
        return f"{short} of {eqn.primitive.name} at {short_line(eqn)}"


def short_line(eqn: JaxprEqn) -> str:
    """The user's line of an equation, its path short."""
    return place(_jax.source_summary(eqn))


def _is_plain(eqn: JaxprEqn) -> bool:
    return eqn.params.get("axis_index_groups") is None
