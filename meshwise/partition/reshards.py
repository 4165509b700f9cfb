"""How a copy of a value is made: the one reshard that all stages of the partitioner speak of."""

from meshwise._jax import Var
from meshwise.choose.plan import Plan
from meshwise.choose.tree import Edge
from meshwise.ir.program import itemsize_of, shape_of
from meshwise.reshard.plan import Reshard, ReshardPlan
from meshwise.reshard.search import plan_reshard


def plan_of_edge(plan: Plan, var: Var, edge: Edge) -> ReshardPlan:
    """The reshard of a value from one sharding to another, within what a device may hold of it.

    Raises MemoryLimitError where none that fits is found.
    """
    program = plan.program
    asked = Reshard(shape_of(var), itemsize_of(var), program.mesh, *edge, plan.hardware)
    return plan_reshard(asked, program.most_bytes.get(var))
