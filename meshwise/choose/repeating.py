"""Work so small that every device may do all of it, where collectives take longer.

A plan is held to the work that shardings suggest, as what is small in a test is large in use. Where
figures are those of devices, sizes are what they are: a transform that takes a fifth of the time of
a launch is better done by all than exchanged. Such a plan has to be clearly faster: what work takes
is known less well than what a launch does.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshwise.choose.around import values_around
from meshwise.choose.candidates import natural_candidates
from meshwise.choose.found import Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, nominal
from meshwise.choose.pricing import node_seconds
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start, whole_start
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.ir.sharding import local_bytes

# Of the time of a launch, what is hardly any work.
HARDLY = 0.25
# How many times faster a plan has to be that repeats work.
CLEARLY = 1.5
# How much more a search pays for work.
DEARER = 2.0
# Of the time that memory takes for all that nodes read and write, what is left of it where kernels
# are fused and arrays lie in caches.
TOUCHED = 1 / 8


def with_work_repeated(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where every device may do what hardly takes time, if it is clearly faster.

    From completion on, and from where every device does all of that: what is gathered once for many
    nodes is gathered for none of them alone.
    """
    if graph.hardware.least_bytes:
        return []
    work = [
        IMPOSSIBLE if _is_hardly_any(graph, node) else most
        for node, most in zip(graph.nodes, limits.work, strict=True)
    ]
    if work == list(limits.work):
        return []
    wider = replace(limits, work=work, known={})
    repeated = frozenset(i for i, most in enumerate(work) if most == IMPOSSIBLE)
    starts = completion_start(graph, wider), whole_start(graph, wider, repeated)
    ones = [descended(Search(graph, one, dearer_work=DEARER), wider) for one in starts]
    least = min(ones, key=_with_memory)
    is_faster = CLEARLY * _with_memory(least) < min(map(_with_memory, found))
    return [least] if is_faster else []


def _with_memory(found: Found) -> float:
    """Seconds of a plan, with those in which its nodes read and write."""
    graph, placed, touched = found.search.graph, found.search.placed, 0.0
    for node, own in zip(graph.nodes, placed, strict=True):
        values = [graph.values[v] for v in (*node.operands, *node.results)]
        shardings = zip(values, (*own.operands, *own.results), strict=True)
        touched += _runs(graph, node) * sum(
            local_bytes(value.shape, value.itemsize, sharding, graph.mesh)
            for value, sharding in shardings
            if not value.remade
        )
    return found.seconds + TOUCHED * touched / graph.hardware.memory_bytes_per_s


def _runs(graph: Graph, node: Node) -> float:
    return max(graph.program.runs[member.equation] for member in node.members)


def _is_hardly_any(graph: Graph, node: Node) -> bool:
    """Whether all of a node's work, with what it reads and writes, is far below a launch.

    Or takes no longer than a share of it with what is exchanged for that, if all of it is done one
    after the other: that is known better than what vector units do.
    """
    hardware = graph.hardware
    moved = sum(v.bytes for v in values_around(graph, node))
    runs = _runs(graph, node)
    computing = hardware.compute_s(node.flops, node.serial_flops, node.calls) / max(runs, 1)
    whole = computing + moved / hardware.memory_bytes_per_s
    if whole <= HARDLY * hardware.launch_s:
        return True
    natural = natural_candidates(graph, node, nominal(graph, node))
    split = min((node_seconds(graph, node, axes) for axes in natural), default=0.0)
    return 0 < node.serial_flops == node.flops and whole * runs <= split
