"""Orders in which XLA on CPU may run kernels, and which of them would hold less.

By default it runs a kernel as soon as what it reads is there, first come, first served. In the
other order, which is told to hold least, it goes from the results back, and makes each value where
it is first wanted: what is gathered waits for its reader. But so do gradients of weights, which
nobody but the results want: they come last, and all that they are made of is held until then. And
XLA packs what is made late less well, so that the other order has to be worth it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.kernels import KernelProgram, kernels_of, readers_of, waits_of
from meshwise.cost.memory import peak_of

# So many times less held is worth another order than XLA's own. Kernels as they are here are not
# quite XLA's: of 831 programs 21 held more than under `jax.jit` so, and 27 where waiting was chosen
# unless it held a quarter more.
LESS = 1.1


@dataclass(frozen=True)
class Held:
    """Bytes of temporaries where kernels run as soon as they can, and where as late as they may."""

    at_once: int
    waiting: int

    @property
    def is_less_as_wanted(self) -> bool:
        """Whether it is worth it to wait until what a kernel makes is wanted."""
        return self.at_once > 0 and LESS * self.waiting <= self.at_once

    @property
    def as_compiled(self) -> int:
        """Bytes in the order in which a program is compiled."""
        return self.waiting if self.is_less_as_wanted else self.at_once


def held_by_xla(jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int]) -> Held:
    """What a per-device program holds in either order."""
    program = kernels_of(jaxpr, axis_sizes)

    def held(order: Sequence[int]) -> int:
        kernels = tuple([program.kernels[k] for k in order])
        return peak_of(replace(program, kernels=kernels)).temporary_bytes

    return Held(held(_as_ready(program)), held(_as_wanted(program)))


def _as_ready(program: KernelProgram) -> list[int]:
    """First come, first served; what reads arguments alone comes in the order of these."""
    waits = waits_of(program.kernels)
    readers = readers_of(waits)
    given = {v: i for i, v in enumerate((*program.steps.constants, *program.steps.inputs))}
    kernels = program.kernels
    first = [k for k, others in enumerate(waits) if not others]
    first.sort(key=lambda k: max((given.get(v, -1) for v in kernels[k].reads), default=-1))
    missing = [len(others) for others in waits]
    queue, order = deque(first), []
    while queue:
        k = queue.popleft()
        order.append(k)
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                queue.append(reader)
    return order


def _as_wanted(program: KernelProgram) -> list[int]:
    """Back from the results, each after all that it reads."""
    waits = waits_of(program.kernels)
    makers = {v: k for k, kernel in enumerate(program.kernels) for v in kernel.writes}
    wanted = [makers[v] for v in program.steps.outputs if v in makers]
    seen: set[int] = set()
    order: list[int] = []
    for end in (*wanted, *range(len(waits))):
        waiting = [(end, iter(waits[end]))] if end not in seen else []
        seen.add(end)
        while waiting:
            k, others = waiting[-1]
            found = next((other for other in others if other not in seen), None)
            if found is None:
                order.append(k)
                waiting.pop()
            else:
                seen.add(found)
                waiting.append((found, iter(waits[found])))
    return order
