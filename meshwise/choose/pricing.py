"""What a device takes for a node under a strategy: its work, and what local rules exchange."""

from meshwise.choose.graph import Graph
from meshwise.choose.regions import Member, Node
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.cost.communication import wire_seconds
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes
from meshwise.rules.registry import Exchange, LocalContext


def work_seconds(graph: Graph, node: Node, axes: DimAxes, padded: bool = True) -> float:
    """Time each device computes a node: its share of the flops, work on padding included."""
    share = 1.0
    for size, own in zip(node.rule.sizes, axes, strict=True):
        if own and size:
            shards = graph.mesh.size(own)
            share *= -(-size // shards) / size if padded else 1 / shards
    return share * graph.hardware.compute_s(node.flops, node.serial_flops, node.calls)


def node_seconds(graph: Graph, node: Node, axes: DimAxes, leaves_turned: bool = False) -> float:
    """Time each device takes for a node: its work, and what its local rules exchange.

    Where results may be left turned, those shards move that do not lie turned then.
    """

    def seconds() -> float:
        sent = _exchange_seconds(graph, node, axes, leaves_turned)
        return work_seconds(graph, node, axes) + sent

    return graph.once(("node seconds", graph.alike[node.index], axes, leaves_turned), seconds)


def _exchange_seconds(graph: Graph, node: Node, axes: DimAxes, leaves_turned: bool) -> float:
    """Time of what local rules exchange; impossible where one cannot follow the strategy."""
    sent = exchanges_of(graph, node, axes, leaves_turned)
    if sent is None:
        return IMPOSSIBLE
    return sum(
        runs * wire_seconds(one.kind, one.wire_bytes, graph.hardware, one.launches)
        for runs, one in sent
    )


def exchanges_of(
    graph: Graph, node: Node, axes: DimAxes, leaves_turned: bool = False
) -> list[tuple[float, Exchange]] | None:
    """What local rules exchange, and how often; None where one cannot follow the strategy."""
    found: list[tuple[float, Exchange]] = []
    for member, at_home in zip(node.members, graph.at_home[node.index], strict=True):
        rule = graph.rules[member.equation]
        if rule.exchanges is None:
            continue
        context = _context(graph, node, member, axes, leaves_turned)
        sent = rule.exchanges(context)
        if sent is None:
            return None
        moved = [a for f in rule.factors.permuted for a in context.axes(f)]
        is_sent = not at_home.has(moved, context.axes)
        runs = graph.program.runs[member.equation]
        found += [(runs, exchange) for exchange in sent if is_sent or not exchange.of_rows]
    return found


def _context(
    graph: Graph, node: Node, member: Member, axes: DimAxes, leaves_turned: bool
) -> LocalContext:
    """An equation of a node under a strategy. Only what is decided by itself is left turned."""
    rule, eqn = graph.rules[member.equation], graph.program.equations[member.equation]
    own = member.strategy(axes)
    turned = leaves_turned and len(node.members) == 1
    return LocalContext(eqn, rule.factors, own, graph.mesh, leaves_turned=turned)


def turned_along(graph: Graph, node: Node, axes: DimAxes) -> Axes:
    """Axes along which a node leaves its results turned."""
    first = node.members[0]
    turned = graph.rules[first.equation].turned
    if turned is None or len(node.members) > 1:
        return ()
    return turned(_context(graph, node, first, axes, True))
