"""Where a model without marks is cut: into stages that take alike long, and send each other little.

Alpa (arXiv 2201.12023, section 5) cuts a model in the same way between its operators, by dynamic
programming over what devices each stage could have. Here all stages have alike many, and in each
tick all wait for the slowest stage and for the largest message, whoever sends it. So for each size
that messages may have the best balance is found, and of these the fastest is taken.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.cost.hardware import Hardware
from meshwise.cost.kernels import kernels_of
from meshwise.cost.timeline import kernel_seconds
from meshwise.ir.program import bytes_of

# Of what a forward of a stage takes: it is computed again, and its derivative is twice as much.
TIMES_FORWARD, TIMES_SENT = 4, 2
TRIED = 64  # of the sizes of messages at most so many
STEPS = 50  # halvings of the bounds of the longest stage


def beginnings(
    seconds: Sequence[float], crossing: Sequence[float], stages: int, byte_s: float
) -> list[int] | None:
    """Before which equations the later stages begin; None where there are too few to cut between.

    `seconds` are those of each equation; `crossing[i]` are the bytes that are sent if a stage
    begins with equation `i`, each of which takes `byte_s`.

    >>> beginnings([1, 1, 1, 1, 2], [0, 8, 0, 8, 0], 3, 1.0)
    [2, 4]
    """
    if stages == 1:
        return []
    passed = [0.0]
    for taken in seconds:
        passed.append(passed[-1] + taken)
    places: dict[float, int] = {}  # of places between which nothing takes time the smallest
    for place in range(1, len(seconds)):
        other = places.get(passed[place])
        if 0 < passed[place] < passed[-1] and (other is None or crossing[place] < crossing[other]):
            places[passed[place]] = place
    best: tuple[float, list[int]] | None = None
    sizes = sorted({crossing[place] for place in places.values()}, reverse=True)
    for size in sizes[:: max(1, -(-len(sizes) // TRIED))]:
        allowed = [place for place in places.values() if crossing[place] <= size]
        if len(allowed) < stages - 1:
            continue
        marks = [passed[place] for place in allowed]
        chosen = _balanced([0.0, *marks, passed[-1]], stages)
        bounds = [0.0, *(marks[i - 1] for i in chosen), passed[-1]]
        longest = max(end - start for start, end in pairwise(bounds))
        took = TIMES_FORWARD * longest + TIMES_SENT * size * byte_s
        if best is None or took < best[0]:
            best = took, [allowed[i - 1] for i in chosen]
    return best[1] if best else None


def _balanced(marks: Sequence[float], stages: int) -> list[int]:
    """Which of increasing marks, the first and last of them ends, bound the later stages.

    The longest stage is as short as it can be, and each mark as near to its even share as that
    allows.
    """
    low, high = marks[-1] / stages, marks[-1]
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _reach(marks, stages, middle) else (middle, high)
    high *= 1 + 1e-9  # differences of marks are rounded
    last = len(marks) - 1
    first: list[int] = [last]  # where each stage may begin at the earliest, from the last one on
    for left in range(stages - 1, 0, -1):
        first.insert(0, max(bisect_left(marks, marks[first[0]] - high), left))
    chosen = [0]
    for stage in range(1, stages):
        furthest = bisect_right(marks, marks[chosen[-1]] + high) - 1
        lowest = max(first[stage - 1], chosen[-1] + 1)
        highest = max(min(furthest, last - (stages - stage)), lowest)
        share = marks[-1] * stage / stages
        near = range(lowest, highest + 1)
        chosen.append(min(near, key=lambda i: abs(marks[i] - share)))
    return chosen[1:]


def _reach(marks: Sequence[float], stages: int, longest: float) -> bool:
    """Whether so many stages, none longer than that, come to the end."""
    place = 0
    for _ in range(stages):
        place = bisect_right(marks, marks[place] + longest) - 1
    return place == len(marks) - 1


def by_first_reader(
    eqns: Sequence[JaxprEqn], remade: Sequence[bool], results: Sequence[Any]
) -> dict[int, list[int]]:
    """For each equation that is made in one stage, those that are made with it, by their numbers.

    That is itself, and of those that each stage makes for itself the ones that it is the first to
    read, through others too. What nobody reads is left out; results are read by the last, and all
    is made with the last equation where each is one that stages make for themselves.
    """
    groups: dict[int, list[int]] = {i: [] for i, again in enumerate(remade) if not again}
    groups = groups or {len(eqns) - 1: []}
    last = max(groups)
    first = {a: last for a in results if not isinstance(a, Literal)}
    for i in reversed(range(len(eqns))):
        readers = [first[v] for v in eqns[i].outvars if v in first] if remade[i] else [i]
        if readers:
            reader = min(readers)
            groups[reader].append(i)
            read = [a for a in eqns[i].invars if not isinstance(a, Literal)]
            first.update({a: min(reader, first.get(a, reader)) for a in read})
    return {i: group[::-1] for i, group in groups.items()}


def seconds_of(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], results: Sequence[Any], hardware: Hardware
) -> list[float]:
    """Seconds of each equation on one device; those of a kernel of several count with its last.

    What is sent in regions by hand, or over axes in context, is left out.
    """
    found = [0.0] * len(eqns)
    jaxpr = _jax.close_jaxpr([], list(inputs), list(results), list(eqns), [])
    sizes = dict(jax.sharding.get_abstract_mesh().shape) | _jax.axis_sizes_in(jaxpr)
    for kernel in kernels_of(jaxpr, sizes).kernels:
        found[kernel.equation] += kernel_seconds(kernel.work, hardware)
    return found


def crossing_bytes(
    eqns: Sequence[JaxprEqn], sent: Sequence[bool], results: Sequence[Any]
) -> list[float]:
    """For each equation the bytes that a stage is sent which begins with it.

    Values are sent on from where they are made to where they are last read; those of equations of
    which none is `sent` every stage makes for itself.
    """
    last = {a: i for i, eqn in enumerate(eqns) for a in eqn.invars if not isinstance(a, Literal)}
    last.update({a: len(eqns) - 1 for a in results if not isinstance(a, Literal)})
    change = [0.0] * (len(eqns) + 2)
    for index, (eqn, is_sent) in enumerate(zip(eqns, sent, strict=True)):
        for var in eqn.outvars:
            if is_sent and last.get(var, index) > index:
                change[index + 1] += bytes_of(var)
                change[last[var] + 1] -= bytes_of(var)
    found = [0.0]
    for more in change[1 : len(eqns)]:
        found.append(found[-1] + more)
    return found
