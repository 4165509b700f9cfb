"""What a device holds at once under a placement of all nodes: the values between them, in order.

Counted are the arguments and what lies on the edges of the cost graph: each value as it is made,
from there to its last reader, and each copy in another sharding, from its first reader to its last.
What a loop reads from around it is held until the loop ends. What each reader makes for itself is
held where it is no element-wise one: zeros that are scattered into. Of a stack of which each device
reads its own steps only these are held. What is cut, joined or laid otherwise, and so only read
once more, is made as it is read, and what it is of is held until then.
So are its parts, where nothing else is read of it.
What stays inside a region is not counted, as it is mostly fused, but for what a loop carries and
stacks, which is written in each of its steps; nor is what a reshard takes on its way. So this
serves to compare plans of one program; `cost/memory.py` counts the program that is emitted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from meshwise import _jax
from meshwise.choose.graph import Graph, Value
from meshwise.choose.search import Search
from meshwise.cost.fusion import is_laid
from meshwise.ir.bodies import nest
from meshwise.ir.factors import result_sharding
from meshwise.ir.program import itemsize_of, shape_of
from meshwise.ir.sharding import Sharding, is_part, is_part_of_rows, local_bytes

Span = tuple[int, int]  # positions of the first and last mark of a loop or choice


@dataclass(frozen=True)
class _Order:
    """Where values are made and read, and where loops and choices begin and end.

    `made` has the equation of each value that no argument is, `read` for each node the equations
    in it that read a value, `through` the values that may be made as they are read. `inside` are
    marks of loops whose results stay in a region, with the first and last position where they are
    held.
    """

    made: Mapping[_jax.Var, int]
    read: Mapping[tuple[int, _jax.Var], Set[int]]
    spans: Sequence[Span]
    through: Set[_jax.Var]
    inside: Sequence[tuple[int, Span]]


def peak_bytes(search: Search) -> int:
    """The most bytes that a device holds at once, arguments included."""
    graph = search.graph
    changes: dict[int, int] = defaultdict(int)
    order = graph.once(("order",), lambda: _order(graph))
    alive = 0
    for value in graph.values.values():
        for sharding, first, last in _lifetimes(search, value, order):
            size = local_bytes(value.shape, value.itemsize, sharding, graph.mesh)
            changes[first] += size
            changes[last + 1] -= size
    for mark, (first, last) in order.inside:
        size = _bytes_of_mark(search, mark)
        changes[first] += size
        changes[last + 1] -= size
    peak = 0
    for position in sorted(changes):
        alive += changes[position]
        peak = max(peak, alive)
    return peak


def argument_bytes(graph: Graph) -> int:
    """The bytes of the arguments that a device holds, and of constants: the same in every plan."""
    return sum(
        local_bytes(value.shape, value.itemsize, value.fixed, graph.mesh)
        for value in graph.values.values()
        if value.fixed is not None
    )


def result_bytes(graph: Graph) -> int:
    """The bytes of the results that a device holds, but of arguments: the same in every plan."""
    return sum(
        local_bytes(value.shape, value.itemsize, sharding, graph.mesh)
        for value in graph.values.values()
        for sharding in (value.returned if value.fixed is None else ())
    )


def _bytes_of_mark(search: Search, mark: int) -> int:
    """What a device holds of the result of a mark that is inside of a node."""
    graph = search.graph
    ((node, member),) = graph.nodes_of[mark]
    own = member.strategy(search.placed[node].strategy.axes)
    (var,) = graph.program.equations[mark].outvars
    sharding = result_sharding(graph.rules[mark].factors, own, 0)
    return local_bytes(shape_of(var), itemsize_of(var), sharding, graph.mesh)


def _lifetimes(search: Search, value: Value, order: _Order) -> Iterator[tuple[Sharding, int, int]]:
    """Each sharding in which a value is held, with the first and last position where it is."""
    graph = search.graph
    if value.remade:
        for node, operand in value.uses:
            for position in order.read.get((node, value.var), ()):
                if _is_read_whole(graph, position):
                    yield search.placed[node].operands[operand], position, position
        return
    if value.var in order.through and search.wanted(value) == {search.produced(value)}:
        return
    end = len(graph.program.equations)
    made = -1 if value.maker is None else order.made[value.var]
    readers: dict[Sharding, set[int]] = defaultdict(set)
    for node, operand in value.uses:
        readers[search.placed[node].operands[operand]] |= order.read.get((node, value.var), set())
    for sharding in value.returned:
        readers[sharding].add(end)
    around = [span for span in order.spans if span[0] > made]
    held = {
        sharding: (
            min(_before(p, around) for p in read),
            max(_after(p, around) for p in read),
        )
        for sharding, read in readers.items()
        if read
    }
    produced = search.produced(value)
    if _keeps_own_steps(search, value, produced, held):
        ((part, (_, last)),) = held.items()
        yield part, made, last
        return
    if produced in held or not _is_cut_as_made(search, value, produced, held):
        _, last = held.pop(produced, (made, made))
        last = max([last, *(first for first, _ in held.values())])
        yield produced, made, end if value.fixed is not None else last
    for sharding, (first, last) in held.items():
        yield sharding, first, last


def _keeps_own_steps(
    search: Search, value: Value, produced: Sharding, wanted: Collection[Sharding]
) -> bool:
    """Whether of what a loop stacks a device puts only its own steps in their place."""
    stacked = search.graph.once(("stacked",), lambda: _stacked(search.graph))
    if value.var not in stacked or len(wanted) != 1:
        return False
    (part,) = wanted
    return is_part_of_rows(produced, part)


def _stacked(graph: Graph) -> set[_jax.Var]:
    """What loops stack."""
    stacks = (e for e in graph.program.equations if e.primitive is _jax.stack_p)
    return {v for eqn in stacks for v in eqn.outvars}


def _is_cut_as_made(
    search: Search, value: Value, produced: Sharding, wanted: Collection[Sharding]
) -> bool:
    """Whether parts alone are read of what is only laid otherwise, so that not all is made."""
    if value.maker is None or not wanted:
        return False
    graph = search.graph
    own = graph.nodes[value.maker].members
    is_laid_alone = len(own) == 1 and is_laid(graph.program.equations[own[0].equation])
    return is_laid_alone and all(is_part(produced, sharding) for sharding in wanted)


def _is_read_whole(graph: Graph, equation: int) -> bool:
    """Whether an equation reads its operands in memory, not as they are made."""
    factors = graph.rules[equation].factors
    shapes = [shape_of(a) for a in graph.program.equations[equation].invars if shape_of(a)]
    is_product = len(shapes) > 1 and bool(factors.reductions)
    return is_product or len(set(shapes)) > 1 or bool(factors.whole or factors.permuted)


def _order(graph: Graph) -> _Order:
    equations = graph.program.equations
    made: dict[_jax.Var, int] = {}
    read: dict[tuple[int, _jax.Var], set[int]] = defaultdict(set)
    through = {
        var
        for var, value in graph.values.items()
        if value.maker is not None and not value.returned and _is_read_through(graph, value)
    }
    when: dict[_jax.Var, set[int]] = defaultdict(set)  # what is read through, when that is
    for index in reversed(range(len(equations))):
        eqn = equations[index]
        own = {place for var in through.intersection(eqn.outvars) for place in when[var]} or {index}
        made.update(dict.fromkeys(eqn.outvars, index))
        for var in {a for a in eqn.invars if isinstance(a, _jax.Var)}:
            when[var] |= own
            for node, _ in graph.nodes_of[index]:
                read[node, var] |= own
    spans, inside = _spans(graph), list[tuple[int, Span]]()
    for mark, held in _held_by_loops(equations, spans):
        (var,) = equations[mark].outvars
        if var not in graph.values:
            inside.append((mark, held))
        elif equations[mark].primitive is _jax.stack_p:
            made[var] = held[0]
    return _Order(made, read, spans, through, inside)


def _held_by_loops(
    equations: Sequence[_jax.JaxprEqn], spans: Sequence[Span]
) -> Iterator[tuple[int, Span]]:
    """The marks of what loops carry and stack, and from where to where that is held.

    What is carried is held in all steps, a stack from before the first to its last reader.
    """
    last = {a: i for i, e in enumerate(equations) for a in e.invars if isinstance(a, _jax.Var)}
    waiting = nest(equations)
    while waiting:
        loop = waiting.pop()
        if isinstance(loop, int):
            continue
        waiting += [item for items in loop.bodies.values() for item in items]
        (start,), end = loop.of(_jax.open_p), loop.of(_jax.end_p)[-1]
        yield from ((mark, (start, end)) for mark in loop.of(_jax.carry_p))
        for mark in loop.of(_jax.stack_p):
            read = last.get(equations[mark].outvars[0], mark)
            yield mark, (start, _after(read, [span for span in spans if span[0] > mark]))


def _is_read_through(graph: Graph, value: Value) -> bool:
    """Whether a value is only laid otherwise, or joined of others, and so is what is made of it."""
    assert value.maker is not None
    equations = graph.program.equations
    own = graph.nodes[value.maker].members
    return (
        len(own) == 1
        and is_laid(equations[own[0].equation])
        and all(
            is_laid(equations[member.equation])
            for node, _ in value.uses
            for member in graph.nodes[node].members
            if value.var in equations[member.equation].invars
        )
    )


def _spans(graph: Graph) -> list[Span]:
    """Where loops and choices begin and end, outer ones before inner ones."""
    spans: list[Span] = []
    opened: list[int] = []
    for position, eqn in enumerate(graph.program.equations):
        if eqn.primitive is _jax.open_p:
            opened.append(position)
        elif eqn.primitive is _jax.close_p:
            spans.append((opened.pop(), position))
    return sorted(spans)


def _before(position: int, spans: Sequence[Span]) -> int:
    """Where a copy is made that is read at a position: before the outermost loop around it."""
    return min((a for a, b in spans if a < position < b), default=position)


def _after(position: int, spans: Sequence[Span]) -> int:
    """How long a copy is held that is read at a position: until the outermost loop ends."""
    return max((b for a, b in spans if a < position < b), default=position)
