"""Results that nobody hinted are returned as they are made, where that saves sending.

Completion leaves a result whole that no hint reaches, as through an equation whose dims lie on no
axis. Where the plan makes it in shards all the same, to share the work, gathering it in the end is
for nobody: who wants it whole can say so. Neither a result whose sharding completion has found is
moved to another, nor is a sum left in terms or in shards; and what is returned is in equal parts,
over whole axes of the user's mesh, as any array of JAX.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from meshwise._jax import Literal, Var
from meshwise.choose.found import Found, as_placed
from meshwise.choose.graph import Graph, Value
from meshwise.choose.search import Search
from meshwise.ir.mesh import Mesh
from meshwise.ir.program import Program
from meshwise.ir.sharding import Sharding


def returned_as_made(found: Found) -> Found:
    """The plan without gathers that only unhinted results want."""
    graph = found.search.graph
    hinted = _hinted(graph.program)
    lie = tuple(_lies(found.search, k, hinted) for k in range(len(graph.out_shardings)))
    if lie == graph.out_shardings:
        return found
    one = as_placed(Search(returning(graph, lie), found.search.axes))
    return one if one.seconds < found.seconds else found


def _hinted(program: Program) -> set[Var]:
    """The values that have hints, where they are made or as any of the results that they are."""
    found = {v for index in program.hints for v in program.equations[index].outvars}
    results = zip(program.outputs, program.out_hints, strict=True)
    return found | {v for v, hint in results if hint is not None and not isinstance(v, Literal)}


def _lies(search: Search, position: int, hinted: Set[Var]) -> Sharding:
    """How a result is returned: as it is made, if nobody reads it as it was to be."""
    graph, program = search.graph, search.graph.program
    var, given = program.outputs[position], graph.out_shardings[position]
    if isinstance(var, Literal):
        return given
    value = graph.values[var]
    if value.maker is None or value.remade or var in hinted or value.returned != (given,):
        return given
    made = search.produced(value)
    is_read = any(search.placed[node].operands[operand] == given for node, operand in value.uses)
    if is_read or not _named(program).issuperset(made.used_axes):
        return given
    return made if _may_stand_for(made, given, value, graph.mesh) else given


def _named(program: Program) -> set[str]:
    """The axes that hints name."""
    hints = (*program.in_hints, *program.out_hints, *program.hints.values())
    return {a for hint in hints if hint is not None for axes in hint.dims for a in axes or ()}


def _may_stand_for(lies: Sharding, given: Sharding, value: Value, mesh: Mesh) -> bool:
    """Whether a value that lies so needs only be gathered to lie as given, and is an array."""
    pairs = zip(lies.dims, given.dims, strict=True)
    is_more = lies != given and all(own[: len(axes)] == axes for own, axes in pairs)
    is_plain = not (lies.unreduced or lies.turned) and all(
        size % mesh.size(axes) == 0 and mesh.restore(axes) is not None
        for size, axes in zip(value.shape, lies.dims, strict=True)
    )
    return is_more and is_plain


def returning(graph: Graph, lie: Sequence[Sharding]) -> Graph:
    """The same graph with other shardings of results, of which nothing is worked out yet."""
    values = dict(graph.values)
    for var, sharding in zip(graph.program.outputs, lie, strict=True):
        if not isinstance(var, Literal) and sharding not in values[var].returned:
            values[var] = replace(values[var], returned=(sharding,))
    return replace(graph, values=values, out_shardings=tuple(lie), known={})
