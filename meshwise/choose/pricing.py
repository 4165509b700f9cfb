"""What a device takes for a node under a strategy: its work, and what local rules exchange."""

from meshwise._jax import Literal
from meshwise.choose.graph import Graph
from meshwise.choose.regions import Member, Node
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.cost.communication import wire_seconds
from meshwise.ir.factors import Strategy
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
    return node.flops * share / graph.hardware.flops_per_s


def node_seconds(graph: Graph, node: Node, axes: DimAxes, leaves_turned: bool = False) -> float:
    """Time each device takes for a node: its work, and what its local rules exchange.

    Where results may be left turned, those shards move that do not lie turned then.
    """

    def seconds() -> float:
        sent = _exchange_seconds(graph, node, axes, leaves_turned)
        return work_seconds(graph, node, axes) + sent

    key = "seconds", graph.alike[node.index], axes, leaves_turned, rows_at_home(graph, node)
    return graph.once(key, seconds)


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
    for member, at_home in zip(node.members, rows_at_home(graph, node), strict=True):
        rule = graph.rules[member.equation]
        if rule.exchanges is None:
            continue
        context = _context(graph, node, member, axes, leaves_turned)
        sent = rule.exchanges(context)
        if sent is None:
            return None
        is_sent = not at_home.issuperset(context.strategy.used_axes())
        runs = graph.program.runs[member.equation]
        found += [(runs, exchange) for exchange in sent if is_sent or not exchange.of_rows]
    return found


def rows_at_home(graph: Graph, node: Node) -> tuple[frozenset[str], ...]:
    """For each equation of a node the axes over which all that moves in it is on every device.

    Where it is known: of arguments with a sharding, that no loop or branch reads.
    """

    def find() -> tuple[frozenset[str], ...]:
        return tuple([_at_home(graph, member.equation) for member in node.members])

    return graph.once(("at home", node.index), find)


def _at_home(graph: Graph, equation: int) -> frozenset[str]:
    rule, eqn = graph.rules[equation].factors, graph.program.equations[equation]
    axes = frozenset(graph.mesh.names if graph.program.outermost[equation] else ())
    for atom, dims in zip(eqn.invars, rule.operands, strict=True):
        if isinstance(atom, Literal) or rule.permuted.isdisjoint(f for dim in dims for f in dim):
            continue
        fixed = graph.values[atom].fixed
        axes -= frozenset(graph.mesh.names) if fixed is None else fixed.used_axes
    return axes


def _context(
    graph: Graph, node: Node, member: Member, axes: DimAxes, leaves_turned: bool
) -> LocalContext:
    """An equation of a node under a strategy. Only what is decided by itself is left turned."""
    rule, eqn = graph.rules[member.equation], graph.program.equations[member.equation]
    own = Strategy(tuple(axes[f] if f >= 0 else () for f in member.factors))
    turned = leaves_turned and len(node.members) == 1
    return LocalContext(eqn, rule.factors, own, graph.mesh, leaves_turned=turned)


def turned_along(graph: Graph, node: Node, axes: DimAxes) -> Axes:
    """Axes along which a node leaves its results turned."""
    first, *others = node.members
    turned = graph.rules[first.equation].turned
    if turned is None or others:
        return ()
    return turned(_context(graph, node, first, axes, True))
