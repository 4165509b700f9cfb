"""What it takes to gather once where devices would exchange again and again.

A Fourier transform along a sharded dim exchanges what it is of, or moves the dim's axes to another
one, and so does the next. XLA's partitioner gathers the first time, and from there on every device
does all of it. Each transform by itself is better exchanged than gathered, and its work is limited
to that (`limits.py`); so no descent comes to gather for several. But nobody should send more with
us: where gathering once sends less than the plan, what is found from there on bounds the cost.

So too where rows of a table in shards are looked up, which XLA sums for every device; and where
something is gathered for one node, and what follows is done in parts: each by itself is, as its
neighbours are. But no stack of a loop: what a hint in each step gathers of it is held while the
step lasts.
"""

from collections.abc import Sequence, Set
from math import prod

from meshwise._jax import Var
from meshwise.choose.found import Found, as_placed, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, fixed_axes, is_light, is_of_pairs, read_bytes
from meshwise.choose.pricing import exchanges_of
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.tree import IMPOSSIBLE, Edge
from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.sharding import DimAxes, Sharding

# Of what a device reads, as good as all.
ABOUT_ALL = 0.5


def gathered_once(best: Found, limits: Limits) -> tuple[Found, float] | None:
    """What is found where a plan's exchanges are gathers, and seconds of these as they stand.

    So too where what follows a gather is done by every device, which else cuts what was gathered,
    and then exchanges or sums parts. None where that is no less than the plan's, or seconds are a
    machine's.
    """
    graph = best.search.graph
    if not graph.hardware.least_bytes:
        return None
    for is_one in (_exchanges_all, _is_gathered_for, _is_moved_for, _looks_up):
        nodes = {node.index for node in graph.nodes if is_one(best, node)}
        all_that_follows = is_one in (_exchanges_all, _looks_up)
        found = _with_whole(best, nodes, limits, all_that_follows)
        if found is not None:
            return found
    return None


def _with_whole(
    best: Found, nodes: Set[int], limits: Limits, all_that_follows: bool
) -> tuple[Found, float] | None:
    """What is found where some nodes, and what comes of them, are done by every device.

    That is little work, or `all_that_follows`: of what XLA's partitioner gathers as it cannot split
    what reads it, and of what every device has, it does not split products either.
    """
    if not nodes:
        return None
    graph = best.search.graph
    gathering = _with_before(best, nodes)
    if all_that_follows:
        held = _held(graph, _moving(best, gathering))
        whole = _with_makers(graph, gathering | _after(graph, nodes, held), held)
    else:
        whole = gathering | _after(graph, nodes)
    moving = _moving(best, whole)
    whole = _without_sharded(best, whole, moving, gathering)
    given = best.search.axes
    start = [_without(axes, moving) if i in whole else axes for i, axes in enumerate(given)]
    placed = zip(graph.nodes, start, strict=True)
    if start == given or not all(limits.allow_held(graph, *one) for one in placed):
        return None
    as_it_stands = as_placed(Search(graph, start))
    seconds = as_it_stands.seconds
    if seconds >= best.seconds or as_it_stands.sent_bytes >= best.sent_bytes:
        return None
    work = [IMPOSSIBLE if i in whole else most for i, most in enumerate(limits.work)]
    return descended(as_it_stands.search, Limits(work, limits.held)), seconds


def _is_gathered_for(best: Found, node: Node) -> bool:
    """Whether a node is done whole by every device, of what is gathered for it."""
    if any(best.search.placed[node.index].strategy.axes):
        return False
    read = {*node.operands}
    return any(
        source.used_axes and not target.used_axes
        for var in read & best.copies.keys()
        for source, target in best.copies[var][1]
    )


def _is_moved_for(best: Found, node: Node) -> bool:
    """Whether a node of little work reads what moves to other dims for it."""
    graph = best.search.graph
    return _may_be_whole(graph, node) and any(_moved(*edge) for edge in _edges(best, node))


def _exchanges_all(best: Found, node: Node) -> bool:
    """Whether a node of little work sends about all that it reads, or has a part of one that does.

    What takes rows from beside, or sums of those before, sends little of it.
    """
    if not _might_exchange(best.search.graph, node):
        return False
    return _sends_all(best, node) or _is_part(best, node)


def _looks_up(best: Found, node: Node) -> bool:
    """Whether rows of what lies in shards are looked up at places that every device has.

    XLA's partitioner sums what each shard has of them, so that every device has all.
    """
    graph, summed = best.search.graph, {f for over in node.reduced for f, _ in over}
    if node.is_region or node.own_flops or not summed:
        return False
    places_sharded = looked_up = False
    for var, dims in zip(node.operands, node.rule.operands, strict=True):
        lies = best.search.produced(graph.values[var])
        places_sharded |= bool(lies.used_axes) and summed.isdisjoint(f for dim in dims for f in dim)
        rows = zip(dims, lies.dims, strict=True)
        looked_up |= any(axes and not summed.isdisjoint(dim) for dim, axes in rows)
    return looked_up and not places_sharded


def _sends_all(best: Found, node: Node) -> bool:
    """Whether a node itself sends about all that it reads, and has no other dim for its axes.

    XLA's partitioner, too, moves them to one that every row has to itself. What goes to neighbours
    are borders, however short the shards are: it sends these as well.
    """
    graph, axes = best.search.graph, best.search.placed[node.index].strategy.axes
    moved = graph.mesh.size([a for f in node.rule.permuted for a in axes[f]])
    others = {f for dims in node.rule.operands for own in dims for f in own} - node.rule.permuted
    if any(node.rule.sizes[f] >= moved and not axes[f] for f in others):
        return False
    exchanges = exchanges_of(graph, node, axes, leaves_turned=True) or ()
    sent = sum(one.wire_bytes for _, one in exchanges if one.kind is not CollectiveKind.PERMUTE)
    return sent >= ABOUT_ALL * read_bytes(graph, node, axes) > 0


def _is_part(best: Found, node: Node) -> bool:
    """Whether axes go to another dim between a node and one like it, with a turn in between.

    So a transform along several dims is written, of which some are sharded: one along each.
    """
    graph = best.search.graph
    for turn in _beside(graph, node):
        if _only_turns(turn) and any(_moved(*edge) for edge in _edges(best, turn)):
            others = (other for other in _beside(graph, turn) if other is not node)
            if any(_might_exchange(graph, other) for other in others):
                return True
    return False


def _beside(graph: Graph, node: Node) -> list[Node]:
    """The nodes that read what a node makes, or make what it reads."""
    makers = [graph.values[var].maker for var in node.operands]
    found = [*makers, *sorted(_readers(graph, node))]
    return [graph.nodes[index] for index in found if index is not None]


def _readers(graph: Graph, node: Node) -> set[int]:
    """The nodes that read what a node makes."""
    return {user for var in node.results for user, _ in graph.values[var].uses}


def _with_before(best: Found, nodes: Set[int]) -> set[int]:
    """Some nodes, and what only these read, if it takes no more to gather what it is of.

    That is what is only turned, or made of less, as complex numbers of real ones; and what might be
    exchanged but is not: a transform along several dims is one along each in turn. And what is made
    of values that every device has.
    """
    graph, found = best.search.graph, set(nodes)
    for node in reversed(graph.nodes):
        readers = _readers(graph, node)
        if not readers or not readers <= found or not _may_be_whole(graph, node):
            continue
        read = [best.search.produced(graph.values[v]) for v in node.operands]
        is_held = not any(sharding.used_axes for sharding in read)
        is_more = _bytes(graph, node.operands) < _bytes(graph, node.results)
        if is_held or is_more or _only_turns(node) or _might_exchange(graph, node):
            found.add(node.index)
    return found


def _bytes(graph: Graph, values: Sequence[Var]) -> int:
    return sum(graph.values[v].bytes for v in values)


def _held(graph: Graph, axes: frozenset[str]) -> set[Var]:
    """Arguments and constants in no shards over some axes, and what little work makes of these."""
    values = graph.values.values()
    found = {v.var for v in values if v.fixed is not None and axes.isdisjoint(v.fixed.used_axes)}
    for node in graph.nodes:
        if _may_be_whole(graph, node) and _reads_only(node, found):
            found.update(node.results)
    return found


def _after(graph: Graph, nodes: Set[int], held: set[Var] | None = None) -> set[int]:
    """Nodes of little work that read what some nodes make, and what comes of it.

    So are products with vectors. And all that reads nothing else but what is `held`, if that is
    said.
    """
    found: set[int] = set()
    made = {v for index in nodes for v in graph.nodes[index].results}
    have = set[Var]() if held is None else made | held
    waiting = sorted(nodes)
    while waiting:
        readers = sorted(_readers(graph, graph.nodes[waiting.pop()]) - found)
        new = [reader for reader in readers if _may_follow(graph, graph.nodes[reader], have)]
        if held is not None:
            have.update(v for index in new for v in graph.nodes[index].results)
        found.update(new)
        waiting += new
    return found


def _with_makers(graph: Graph, nodes: Set[int], held: set[Var]) -> set[int]:
    """Some nodes, and those that make what is `held` of what they read."""
    found, waiting = set(nodes), sorted(nodes)
    while waiting:
        read = held.intersection(graph.nodes[waiting.pop()].operands)
        makers = (graph.values[v].maker for v in read)
        new = {maker for maker in makers if maker is not None} - found
        found |= new
        waiting += sorted(new)
    return found


def _may_be_whole(graph: Graph, node: Node) -> bool:
    """Whether every device may do all of a node, as far as its work and hints go.

    Work on all pairs of elements is like a product's.
    """
    if node.index in graph.once(("fixed",), lambda: fixed_axes(graph)):
        return False
    if node.is_region:
        return not is_of_pairs(graph, node)
    return _is_of_little_work(graph, node)


def _may_follow(graph: Graph, node: Node, have: set[Var]) -> bool:
    """Whether every device may do all of a node, of whose operands it has some, or all."""
    if node.index in graph.once(("fixed",), lambda: fixed_axes(graph)):
        return False
    if _reads_only(node, have):
        return True
    if node.is_region:
        return _may_be_whole(graph, node)
    once = 2 * sum(prod(graph.values[v].shape) for v in node.operands)  # a product, and added
    return is_light(graph, node) and (not any(node.reduced) or node.own_flops <= once)


def _reads_only(node: Node, values: Set[Var]) -> bool:
    """Whether a node reads nothing but some values, and what it makes itself."""
    return all(v in values or v in node.results for v in node.operands)


def _moving(best: Found, nodes: Set[int]) -> frozenset[str]:
    """The axes over which some nodes exchange, and those that dims of their values lose."""
    found = set[str]()
    for index in nodes:
        node, axes = best.search.graph.nodes[index], best.search.placed[index].strategy.axes
        found.update(a for f in node.rule.permuted for a in axes[f])
        for source, target in _edges(best, node):
            dims = zip(source.dims, target.dims, strict=True)
            found.update(a for before, after in dims for a in set(before) - set(after))
    return frozenset(found)


def _without_sharded(
    best: Found, nodes: Set[int], axes: frozenset[str], gathering: Set[int]
) -> set[int]:
    """Nodes that read nothing in shards over some axes from others; or are to gather that."""
    graph, left = best.search.graph, set(nodes)
    waiting = sorted(nodes)
    while waiting:
        index = waiting.pop()
        if index not in left or index in gathering:
            continue
        node = graph.nodes[index]
        outside = [v for v in map(graph.values.__getitem__, node.operands) if v.maker not in left]
        if any(not v.remade and axes & best.search.produced(v).used_axes for v in outside):
            left.discard(index)
            waiting += _readers(graph, node)
    return left


def _might_exchange(graph: Graph, node: Node) -> bool:
    return bool(node.own_flops and node.rule.permuted) and _is_of_little_work(graph, node)


def _is_of_little_work(graph: Graph, node: Node) -> bool:
    """Whether a node is light, and no product or convolution: XLA's partitioner splits these."""
    return is_light(graph, node) and not any(node.reduced)


def _only_turns(node: Node) -> bool:
    return not node.own_flops and not node.rule.permuted


def _edges(best: Found, node: Node) -> list[Edge]:
    """The reshards of what a node touches."""
    around = [value.var for value in best.search.around(node)]
    return [edge for var in around if var in best.copies for edge in best.copies[var][1]]


def _moved(source: Sharding, target: Sharding) -> frozenset[str]:
    """The axes that go from one dim to another."""
    dims = zip(source.dims, target.dims, strict=True)
    kept = [set(before) & set(after) for before, after in dims]
    return (source.used_axes & target.used_axes).difference(*kept)


def _without(dims: DimAxes, axes: frozenset[str]) -> DimAxes:
    return tuple([tuple([a for a in own if a not in axes]) for own in dims])
