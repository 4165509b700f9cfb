"""How a node is placed: by which strategy, and what that wants of values and makes."""

from dataclasses import dataclass

from meshwise._jax import stack_p
from meshwise.choose.graph import Graph
from meshwise.choose.regions import Node
from meshwise.ir.factors import Strategy, made_sharding
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import Sharding


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A strategy, the shardings it wants of operands and produces, and its work in seconds.

    Searches of a graph make each once, so that one is another only where it is the same object.
    """

    strategy: Strategy
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float


def produced(node: Node, strategy: Strategy, result: int, turned: Axes = ()) -> Sharding:
    """The sharding of a result: unreduced over what is carried and the axes it is reduced over."""
    return made_sharding(node.rule.results[result], node.reduced[result], strategy, turned)


def scattered_axes(graph: Graph, node: Node) -> frozenset[str]:
    """Axes that shard the finished stack, over which a row is reduce-scattered in its own step.

    Otherwise every device would hold the whole stack.
    """
    eqn = graph.program.equations[node.members[0].equation]
    if eqn.primitive is not stack_p:
        return frozenset()
    return frozenset(a for axes in graph.nominal(eqn.outvars[0]) for a in axes)
