"""What a device holds at once under a placement of all nodes: the values between them, in order.

Counted are the arguments and what lies on the edges of the cost graph: each value as it is made,
from there to its last reader, and each copy in another sharding, from its first reader to its last.
What a loop reads from around it is held until the loop ends. What stays inside a region is not
counted, as it is mostly fused; nor is what a reshard takes on its way. So this serves to compare
plans of one program; `cost/memory.py` counts the program that is emitted.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwise import _jax
from meshwise.choose.graph import Graph, Value
from meshwise.choose.search import Search
from meshwise.ir.sharding import Sharding, local_bytes

Span = tuple[int, int]  # positions of the first and last mark of a loop or choice


def peak_bytes(search: Search) -> int:
    """The most bytes that a device holds at once, arguments included."""
    graph = search.graph
    changes: dict[int, int] = defaultdict(int)
    spans = _spans(graph)
    alive = 0
    for value in graph.values.values():
        for sharding, first, last in _lifetimes(search, value, spans):
            size = local_bytes(value.shape, value.itemsize, sharding, graph.mesh)
            changes[first] += size
            changes[last + 1] -= size
    peak = 0
    for position in sorted(changes):
        alive += changes[position]
        peak = max(peak, alive)
    return peak


def _lifetimes(
    search: Search, value: Value, spans: Sequence[Span]
) -> Iterator[tuple[Sharding, int, int]]:
    """Each sharding in which a value is held, with the first and last position where it is."""
    if value.remade:
        return
    graph = search.graph
    end = len(graph.program.equations)
    made = _made_at(graph, value)
    readers: dict[Sharding, list[int]] = defaultdict(list)
    for node, operand in value.uses:
        readers[search.placed[node].operands[operand]] += _positions(graph, node, value)
    for sharding in value.returned:
        readers[sharding].append(end)
    around = [span for span in spans if span[0] > made]
    held = {
        sharding: (
            min(_before(p, around) for p in read),
            max(_after(p, around) for p in read),
        )
        for sharding, read in readers.items()
        if read
    }
    produced = search.produced(value)
    _, last = held.pop(produced, (made, made))
    last = max([last, *(first for first, _ in held.values())])
    yield produced, made, end if value.fixed is not None else last
    for sharding, (first, last) in held.items():
        yield sharding, first, last


def _made_at(graph: Graph, value: Value) -> int:
    """The equation that makes a value; -1 for an argument."""
    if value.maker is None:
        return -1
    return min(
        m.equation
        for m in graph.nodes[value.maker].members
        if value.var in graph.program.equations[m.equation].outvars
    )


def _positions(graph: Graph, node: int, value: Value) -> list[int]:
    """The equations of a node that read a value."""
    eqns = graph.program.equations
    members = graph.nodes[node].members
    return [m.equation for m in members if any(a is value.var for a in eqns[m.equation].invars)]


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
