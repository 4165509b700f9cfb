"""A per-device program: what every device runs, and how its arguments and results lie."""

from dataclasses import dataclass
from typing import Any

from meshwise._jax import ClosedJaxpr
from meshwise.ir.collectives import Collective
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Sharding


@dataclass(frozen=True, eq=False)
class PerDeviceProgram:
    """A closed jaxpr of local arrays with explicit collectives over the axes of a refined mesh.

    `in_types` and `out_types` are the global abstract values; shardings say which part of each a
    device holds. `loop_reads` says of each value that a loop reads in another sharding whether it
    is made once before the loop or in each step. `whole` lists operators that had no rule and are
    computed whole on every device, as `name at file:line`.
    """

    jaxpr: ClosedJaxpr
    mesh: Mesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    in_types: tuple[Any, ...]
    out_types: tuple[Any, ...]
    collectives: tuple[Collective, ...]
    whole: tuple[str, ...]
    loop_reads: tuple[str, ...] = ()
