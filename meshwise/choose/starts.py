"""Where a descent begins: from completion, and from the program's own order."""

from collections.abc import Callable, Mapping, Sequence, Set
from heapq import heappop, heappush

from meshwise._jax import Var
from meshwise.choose.candidates import candidates, natural_candidates
from meshwise.choose.graph import Graph, Value
from meshwise.choose.limits import Limits, fixed_axes, nominal
from meshwise.choose.placement import produced
from meshwise.choose.pricing import node_seconds
from meshwise.choose.regions import Node
from meshwise.ir.factors import Strategy, dims_sharding, operand_sharding
from meshwise.ir.sharding import DimAxes, sharding_of
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import reshard_bound, reshard_cost


def completion_start(graph: Graph, limits: Limits) -> list[DimAxes]:
    """Every node as completion suggests: cheapest against the values' own shardings."""
    fixed = fixed_axes(graph)
    return [
        fixed[node.index]
        if node.index in fixed
        else _cheapest(graph, node, nominal(graph, node), limits, keep_results=True)
        for node in graph.nodes
    ]


def whole_start(graph: Graph, limits: Limits, repeated: Set[int]) -> list[DimAxes]:
    """As completion suggests, but some nodes by every device, as far as hints let them."""
    fixed, start = fixed_axes(graph), completion_start(graph, limits)
    return [
        ((),) * len(axes) if node.index in repeated and node.index not in fixed else axes
        for node, axes in zip(graph.nodes, start, strict=True)
    ]


def forward_start(
    graph: Graph,
    limits: Limits,
    moved: Mapping[Var, DimAxes] | None = None,
    rest_anyhow: bool = False,
) -> list[DimAxes]:
    """Nodes in the program's order, each where its operands already are.

    What is not placed yet is taken as completion has it, or does not count (`rest_anyhow`), and
    arguments that are `moved` as these say.
    """
    fixed, moved = fixed_axes(graph), moved or {}
    placed: list[DimAxes] = []
    for node in graph.nodes:
        sources: list[DimAxes | None] = [*nominal(graph, node)]
        for k, var in enumerate(node.operands):
            value = graph.values[var]
            if value.fixed is not None:
                sources[k] = moved.get(var, value.fixed.dims)
            elif value.maker is not None and value.maker < len(placed):
                maker = graph.nodes[value.maker]
                sources[k] = dims_sharding(maker.rule.results[value.result], placed[value.maker])
            elif value.maker is not None and rest_anyhow:
                sources[k] = None
        placed.append(
            fixed[node.index]
            if node.index in fixed
            else _cheapest(graph, node, sources, limits, keep_results=False)
        )
    return placed


def moved_starts(graph: Graph, limits: Limits) -> list[tuple[DimAxes, ...]]:
    """The same where arguments are moved to other dims first: to the first one free, or the last.

    What is exchanged along a dim again and again is then whole in each shard. So is all that goes
    round a loop, where what the loop computes of it later does not hold it back.
    """
    given = {v.var: v.fixed.dims for v in graph.values.values() if v.fixed is not None}
    found = []
    for last in (False, True):
        moved = {
            v: _on_another_dim(graph, graph.values[v], dims, last) for v, dims in given.items()
        }
        if moved != given:
            anyhow = (False, True) if graph.program.has_loops else (False,)
            found += [tuple(forward_start(graph, limits, moved, own)) for own in anyhow]
    return list(dict.fromkeys(found))


def _on_another_dim(graph: Graph, value: Value, dims: DimAxes, last: bool) -> DimAxes:
    """A sharding with all axes on one dim that had none and that they divide, if there is one."""
    axes = tuple(a for own in dims for a in own)
    sizes = enumerate(zip(value.shape, dims, strict=True))
    free = [d for d, (size, own) in sizes if not own and size % graph.mesh.size(axes) == 0]
    if not axes or not free:
        return dims
    to = free[-1 if last else 0]
    return tuple(axes if d == to else () for d in range(len(dims)))


def backward_start(graph: Graph, limits: Limits) -> list[DimAxes]:
    """Nodes from the last one to the first, each where its results are wanted.

    Where results are hinted otherwise than arguments, it may be cheapest to move arguments before
    anything is computed of them. Operands do not count.
    """
    fixed = fixed_axes(graph)
    placed: dict[int, DimAxes] = {}
    for node in reversed(graph.nodes):
        if node.index in fixed:
            placed[node.index] = fixed[node.index]
            continue
        wanted: list[DimAxes | None] = [None] * len(node.operands)
        for var in node.results:
            value = graph.values[var]
            users = [(user, k) for user, k in value.uses if user in placed]
            if value.returned:
                wanted.append(value.returned[0].dims)
            elif users:
                (user, k), *_ = users
                rule = graph.nodes[user].rule
                wanted.append(operand_sharding(rule, Strategy(placed[user]), k).dims)
            else:
                wanted.append(None if value.uses else graph.nominal(var))
        if all(dims is None for dims in wanted):
            wanted = [*wanted[: len(node.operands)], *map(graph.nominal, node.results)]
        placed[node.index] = _cheapest(graph, node, wanted, limits, keep_results=True)
    return [placed[node.index] for node in graph.nodes]


def _cheapest(
    graph: Graph,
    node: Node,
    tensors: Sequence[DimAxes | None],
    limits: Limits,
    keep_results: bool,
) -> DimAxes:
    """The candidate that is cheapest with operands (and results) lying as given, if they are."""
    within = limits.work[node.index], limits.held.get(node.index), limits.reach
    lying = tuple(tensors), tuple(nominal(graph, node)), keep_results
    key = "cheapest", graph.alike[node.index], lying, within
    return graph.once(key, lambda: _find_cheapest(graph, node, tensors, limits, keep_results))


def _find_cheapest(
    graph: Graph,
    node: Node,
    tensors: Sequence[DimAxes | None],
    limits: Limits,
    keep_results: bool,
) -> DimAxes:
    own = nominal(graph, node)
    lying = [own[k] if dims is None else dims for k, dims in enumerate(tensors)]
    # What suits neighbours may hold too much of a stack; what suits completion is within limits.
    allowed = _allowed(graph, node, lying, limits) or _allowed(graph, node, own, limits)
    return _least(
        allowed,
        [
            lambda axes: node_seconds(graph, node, axes),
            lambda axes: _price(graph, node, axes, tensors, keep_results, reshard_bound),
            lambda axes: _price(graph, node, axes, tensors, keep_results, reshard_cost),
        ],
    )


def _allowed(graph: Graph, node: Node, tensors: Sequence[DimAxes], limits: Limits) -> list[DimAxes]:
    """The strategies within limits that shardings of a node's values, and completion, suggest."""
    operands = [sharding_of(dims) for dims in tensors[: len(node.operands)]]
    found = candidates(graph, node, operands, (), tensors, None, limits.reach)
    found += natural_candidates(graph, node, nominal(graph, node))
    return [axes for axes in dict.fromkeys(found) if limits.allow(graph, node, axes)]


def _least(options: Sequence[DimAxes], prices: Sequence[Callable[[DimAxes], float]]) -> DimAxes:
    """The first of the cheapest by the last of the prices, which are ever closer from below.

    Each option is priced only as closely as it takes to see that another one is cheaper, or as
    cheap and before it. The first price is a part of the others, as the last one adds it up.
    """
    queue = [(0.0, k, 0) for k in range(len(options))]
    while True:
        _, k, priced = heappop(queue)
        if priced == len(prices):
            return options[k]
        price = prices[priced](options[k])
        is_exact = priced in (0, len(prices) - 1)
        heappush(queue, (price if is_exact else price * (1 - 1e-9), k, priced + 1))


def _price(
    graph: Graph,
    node: Node,
    axes: DimAxes,
    tensors: Sequence[DimAxes | None],
    keep_results: bool,
    cost: Callable[[Reshard], float],
) -> float:
    """Work, reshards of operands from the given shardings, and perhaps of results to them.

    `cost` is that of a reshard, or what it is not below. An operand is resharded where it is made,
    or in the branch that reads it. What every device can make a part of is free; but with results
    not what is computed of such: completion has no device compute all of it.
    """
    total = node_seconds(graph, node, axes)
    runs = max(graph.program.runs[member.equation] for member in node.members)
    strategy = Strategy(axes)
    for k, (var, dims) in enumerate(zip((*node.operands, *node.results), tensors, strict=True)):
        value, result = graph.values[var], k - len(node.operands)
        is_computed = value.maker is not None and bool(graph.nodes[value.maker].operands)
        is_free = value.remade and not (keep_results and is_computed)
        if dims is None or is_free or (result >= 0 and not keep_results):
            continue
        if result < 0:
            source, target = sharding_of(dims), operand_sharding(node.rule, strategy, k)
        else:
            source, target = produced(node, strategy, result), sharding_of(dims)
        if source == target:
            continue
        what = value.shape, value.itemsize, graph.mesh
        total += min(value.trips, runs) * cost(Reshard(*what, source, target, graph.hardware))
    return total
