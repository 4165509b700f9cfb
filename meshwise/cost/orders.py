"""Orders in which a schedule may take its tasks, told by what waits for what and not by times.

A schedule that takes tasks in an order chosen by their times can end sooner when a task takes
longer (Graham's anomalies). In a given order it cannot, nor can the best of several given ones.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# A collective is pretended to take so many times as long as a kernel, in list schedules.
_WEIGHTS = (2, 4)


@dataclass(frozen=True)
class Ordered:
    """What an order depends on: the resources that a task keeps, and the tasks it waits for.

    Tasks that are waited for come earlier in a list of all.
    """

    resources: tuple[str, ...]
    waits: tuple[int, ...]
    is_collective: bool


def orders_of(tasks: Sequence[Ordered]) -> list[list[int]]:
    """Ten orders in which tasks can run; of schedules that take as long the first is wanted.

    The list's own; what waits for fewest collectives first; what most collectives wait for first;
    both together; each of these with every collective right after what it waits for; and two list
    schedules.
    """
    before: list[int] = []  # collectives that must run before each task
    for task in tasks:
        waited = (before[w] + tasks[w].is_collective for w in task.waits)
        before.append(max(waited, default=0))
    after = [0] * len(tasks)  # and after it
    for k in reversed(range(len(tasks))):
        for w in tasks[k].waits:
            after[w] = max(after[w], after[k] + tasks[k].is_collective)
    places = list(range(len(tasks)))
    given = [
        places,
        sorted(places, key=lambda k: (before[k], k)),
        sorted(places, key=lambda k: (-after[k], k)),
        sorted(places, key=lambda k: (before[k], -after[k], k)),
    ]
    early = [_started_early(tasks, order) for order in given]
    return [*given, *early, *(_list_schedule(tasks, weight) for weight in _WEIGHTS)]


def _started_early(tasks: Sequence[Ordered], order: Sequence[int]) -> list[int]:
    """The same order, but each collective right after what it waits for."""
    place: dict[int, tuple[int, int, int]] = {}
    for i, k in enumerate(order):
        major, minor = max((place[w][:2] for w in tasks[k].waits), default=(-1, 0))
        place[k] = (major, minor + 1, i) if tasks[k].is_collective else (i, 0, i)
    return sorted(order, key=lambda k: place[k])


def _list_schedule(tasks: Sequence[Ordered], weight: int) -> list[int]:
    """In the order in which tasks start where what most waits for comes first on free resources."""
    lengths = [weight if task.is_collective else 1 for task in tasks]
    readers: list[list[int]] = [[] for _ in tasks]
    for k, task in enumerate(tasks):
        for w in task.waits:
            readers[w].append(k)
    tails = lengths.copy()  # from the start of each task to the end, by way of its readers
    for k in reversed(range(len(tasks))):
        tails[k] += max((tails[r] for r in readers[k]), default=0)
    missing = [len(task.waits) for task in tasks]
    ready: dict[tuple[str, ...], list[tuple[int, int]]] = {t.resources: [] for t in tasks}
    for k, task in enumerate(tasks):
        if not task.waits:
            heapq.heappush(ready[task.resources], (-tails[k], k))
    order: list[int] = []
    free: dict[str, int] = {}
    running: list[tuple[int, int]] = []
    now = 0
    while len(order) < len(tasks):
        for queue in sorted((q for q in ready.values() if q), key=lambda q: q[0]):
            _, k = queue[0]
            if all(free.get(r, 0) <= now for r in tasks[k].resources):
                heapq.heappop(queue)
                order.append(k)
                free.update(dict.fromkeys(tasks[k].resources, now + lengths[k]))
                heapq.heappush(running, (now + lengths[k], k))
        now = running[0][0]
        while running and running[0][0] == now:
            for reader in readers[heapq.heappop(running)[1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready[tasks[reader].resources], (-tails[reader], reader))
    return order
