"""The cost graph as data: nodes, the values between them, and what is fixed at the boundary."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshwise._jax import Literal, Var, open_p
from meshwise.choose.carries import Carries, find_carries
from meshwise.choose.parts import TOGETHER, Apart
from meshwise.choose.regions import Member, Node, build_nodes
from meshwise.choose.remade import remade_equations
from meshwise.cost.hardware import Hardware
from meshwise.ir.bodies import Path, paths, places_to_read, scopes
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.program import Hint, Program, itemsize_of, shape_of
from meshwise.ir.sharding import DimAxes, Reduction, Sharding, replicated, unreduced
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule

T = TypeVar("T")


@dataclass(frozen=True)
class AtHome:
    """What devices have of what moves in an equation before anything is sent.

    Over `axes` each of them has all that the others have. Where an operand lies over more, it has
    its shard of that, if dims stay as they are `kept`: of factors, what they lie over.
    """

    axes: frozenset[str]
    kept: tuple[tuple[int, Axes], ...]

    def has(self, moved: Collection[str], axes_of: Callable[[int], Axes]) -> bool:
        """Whether a device can cut what moves over some axes; `axes_of` says what factors have."""
        return self.axes.issuperset(moved) and all(
            axes_of(factor)[: len(own)] == own for factor, own in self.kept
        )


@dataclass(eq=False, slots=True)
class Value:
    """One value: who makes it, who wants it, and how large it is.

    fixed: its sharding where no node decides it (inputs, constants);
    remade: each device computes whichever part is wanted, and no sharding of it costs anything
        (`remade.py`);
    uses: (node, operand position); returned: shardings in which the program returns it;
    trips: how often it is made in a call on average, and with it what is made of it;
    read_in: for each of its uses the bodies that it is read in, seen from where it is made; None
        where no use is in a branch.
    """

    var: Var
    shape: tuple[int, ...]
    itemsize: int
    maker: int | None
    result: int
    fixed: Sharding | None
    remade: bool
    trips: float
    uses: list[tuple[int, int]] = field(default_factory=list)
    returned: tuple[Sharding, ...] = ()
    read_in: list[list[Path]] | None = None

    @property
    def by_itself(self) -> tuple[Any, ...]:
        """What it is, whoever makes and reads it: values that are alike have the same."""
        return self.shape, self.itemsize, self.trips, self.remade, self.fixed, self.returned

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is an argument, or a constant, that every device has all of."""
        return self.fixed is not None and not self.fixed.used_axes


@dataclass(frozen=True, eq=False)
class Graph:
    """What is to be decided, and the figures to decide it by.

    `remade` are the equations that each device computes for itself, and of how many elements
    (`remade.py`); `nodes_of` gives for each equation the nodes it is in, and its part there.
    `alike` numbers the nodes so that those of repeated layers have the same number: the same
    strategies of them cost the same where their values lie alike. `at_home` are, for each equation
    of a node, what devices have of its operands, so that an exchange of that sends nothing
    (`partition/at_home.py`). `apart` says what is decided by itself. `known` is what was worked out
    for one of several that are alike.
    """

    program: Program
    mesh: Mesh
    rules: Sequence[OpRule]
    carries: Carries
    remade: Mapping[int, int]
    nodes: list[Node]
    values: dict[Var, Value]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    completion: Completion
    hardware: Hardware
    nodes_of: dict[int, tuple[tuple[int, Member], ...]]
    alike: Sequence[int]
    at_home: Sequence[tuple[AtHome, ...]]
    apart: Apart = TOGETHER
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives for a key, made once; a key begins with the name of what it is."""
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = make()
        return found

    def nominal(self, var: Var) -> DimAxes:
        """The dims' axes that completion gave a value."""
        return self.completion.dims[var]

    def completed_as(self, dims: dict[Var, DimAxes]) -> "Graph":
        """The same with values lying as completion might have them."""
        return replace(self, completion=replace(self.completion, dims=dims))

    def priced_by(self, hardware: Hardware) -> "Graph":
        """The same by other figures, of which nothing is worked out yet."""
        return replace(self, hardware=hardware, known={})


def build_graph(
    program: Program,
    rules: Sequence[OpRule],
    completion: Completion,
    hardware: Hardware,
    apart: Apart = TOGETHER,
) -> Graph:
    """The cost graph of a completed program; some of it is decided `apart`."""
    carries = find_carries(program, rules)
    remade = remade_equations(program, rules, carries, completion.dims)
    nodes = build_nodes(program, rules, carries, completion.dims, remade, apart)
    in_shardings = tuple(
        Sharding(_filled(hint, completion.dims[var]))
        for var, hint in zip(program.inputs, program.in_hints, strict=True)
    )
    out_shardings = tuple(
        _out_sharding(var, hint, completion)
        for var, hint in zip(program.outputs, program.out_hints, strict=True)
    )
    values = _values(program, remade, nodes, in_shardings, out_shardings)
    at_home = [_at_home(program, rules, node, values) for node in nodes]
    return Graph(
        program,
        program.mesh,
        rules,
        carries,
        remade,
        nodes,
        values,
        in_shardings,
        out_shardings,
        completion,
        hardware,
        _nodes_of(nodes),
        _alike(program, rules, nodes, values, at_home),
        at_home,
        apart,
    )


def decided_apart(graph: Graph, apart: Apart) -> Graph | None:
    """The same program with something decided by itself, if that is another graph."""
    program, rules = graph.program, graph.rules
    lying = graph.completion.dims
    nodes = build_nodes(program, rules, graph.carries, lying, graph.remade, apart)
    if [node.members for node in nodes] == [node.members for node in graph.nodes]:
        return None
    values = _values(program, graph.remade, nodes, graph.in_shardings, graph.out_shardings)
    at_home = [_at_home(program, rules, node, values) for node in nodes]
    return replace(
        graph,
        nodes=nodes,
        values=values,
        nodes_of=_nodes_of(nodes),
        alike=_alike(program, rules, nodes, values, at_home),
        at_home=at_home,
        apart=apart,
        known={},
    )


def _nodes_of(nodes: Sequence[Node]) -> dict[int, tuple[tuple[int, Member], ...]]:
    found: dict[int, tuple[tuple[int, Member], ...]] = {}
    for node in nodes:
        for member in node.members:
            found[member.equation] = (*found.get(member.equation, ()), (node.index, member))
    return found


def _alike(
    program: Program,
    rules: Sequence[OpRule],
    nodes: Sequence[Node],
    values: Mapping[Var, Value],
    at_home: Sequence[tuple[AtHome, ...]],
) -> list[int]:
    """Numbers of nodes by what their costs depend on; equations of one signature share a rule."""
    numbers: dict[Any, int] = {}
    found = []
    for node in nodes:
        around = [values[v] for v in (*node.operands, *node.results)]
        members = [
            (id(rules[m.equation]), m.factors, program.runs[m.equation]) for m in node.members
        ]
        key = (
            (node.rule, node.reduced, node.carries, node.adopts, node.together, node.is_region),
            (tuple(members), node.bound),
            tuple([(v.shape, v.itemsize, v.trips, v.remade) for v in around]),
            at_home[node.index],
        )
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _at_home(
    program: Program, rules: Sequence[OpRule], node: Node, values: Mapping[Var, Value]
) -> tuple[AtHome, ...]:
    """For each equation of a node what devices have of what moves in it.

    Where it is known: of arguments, read in no loop or branch.
    """
    found = []
    for member in node.members:
        rule, eqn = rules[member.equation].factors, program.equations[member.equation]
        axes = frozenset(program.mesh.names if program.outermost[member.equation] else ())
        kept: dict[int, Axes] = {}
        for atom, dims in zip(eqn.invars, rule.operands, strict=True):
            moves = not rule.permuted.isdisjoint(f for dim in dims for f in dim)
            if moves and not isinstance(atom, Literal):
                fixed = values[atom].fixed if atom in values else None  # made inside the node
                axes = axes - fixed.used_axes if fixed else frozenset()
                over = zip(dims, fixed.dims, strict=True) if fixed else ()
                kept |= {dim[0]: own for dim, own in over if own and dim}
        found.append(AtHome(axes, tuple(kept.items())))
    return tuple(found)


def _filled(hint: Hint | None, completed: DimAxes) -> DimAxes:
    """A hint with its open dims filled in by completion."""
    if hint is None:
        return completed
    used = {a for axes in hint.dims if axes for a in axes}
    return tuple(
        axes if axes is not None else tuple(a for a in found if a not in used)
        for axes, found in zip(hint.dims, completed, strict=True)
    )


def _out_sharding(var: Var | Literal, hint: Hint | None, completion: Completion) -> Sharding:
    if isinstance(var, Literal):
        dims: DimAxes = ((),) * len(shape_of(var))
    else:
        dims = completion.dims[var]
    return unreduced(_filled(hint, dims), hint.unreduced if hint else (), Reduction.SUM)


def _values(
    program: Program,
    remade: Mapping[int, int],
    nodes: Sequence[Node],
    in_shardings: Sequence[Sharding],
    out_shardings: Sequence[Sharding],
) -> dict[Var, Value]:
    values: dict[Var, Value] = {}

    trips = {v: n for e, n in zip(program.equations, program.runs, strict=True) for v in e.outvars}

    def add(var: Var, maker: int | None, result: int, fixed: Sharding | None, remade: bool) -> None:
        what = var, shape_of(var), itemsize_of(var)
        values[var] = Value(*what, maker, result, fixed, remade, trips.get(var, 1))

    for var, sharding in zip(program.inputs, in_shardings, strict=True):
        add(var, None, 0, sharding, False)
    for var in program.jaxpr.jaxpr.constvars:
        add(var, None, 0, replicated(len(shape_of(var))), False)
    for node in nodes:
        is_remade = node.members[0].equation in remade
        for result, var in enumerate(node.results):
            add(var, node.index, result, None, is_remade)
    for node in nodes:
        for operand, var in enumerate(node.operands):
            values[var].uses.append((node.index, operand))
    _note_branches(program, nodes, values)
    returned: dict[Var, list[Sharding]] = defaultdict(list)
    for var, sharding in zip(program.outputs, out_shardings, strict=True):
        if not isinstance(var, Literal):
            returned[var].append(sharding)
    for var, shardings in returned.items():
        values[var].returned = tuple(dict.fromkeys(shardings))
    return values


def _note_branches(program: Program, nodes: Sequence[Node], values: Mapping[Var, Value]) -> None:
    """Note where values are read that are read in branches: there they are resharded, too."""
    eqns = program.equations
    around = paths(eqns)
    if all(body.branches == 1 for path in around for body in path):
        return
    places = places_to_read(eqns)
    # What comes into a loop stands before its body, but is made in each step, as what is in it.
    opened = [sum(eqns[k].primitive is open_p for k in scope) for scope in scopes(eqns)]
    made = {v: bodies for e, bodies in zip(eqns, opened, strict=True) for v in e.outvars}
    read: dict[tuple[int, Var], list[Path]] = defaultdict(list)
    for node in nodes:
        for member in node.members:
            for position, atom in enumerate(eqns[member.equation].invars):
                if not isinstance(atom, Literal):
                    at = places.get((member.equation, position), member.equation)
                    read[node.index, atom].append(around[at][made.get(atom, 0) :])
    for var, value in values.items():
        found = [read[node, var] for node, _ in value.uses]
        if any(body.branches > 1 for each in found for path in each for body in path):
            value.read_in = found
