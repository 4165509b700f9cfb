"""The plan: pure data. What each equation does, and which copies of each value exist."""

from dataclasses import dataclass

from meshwise._jax import Var
from meshwise.choose.parts import TOGETHER, Apart
from meshwise.choose.tree import Edge
from meshwise.cost.hardware import Hardware
from meshwise.ir.factors import Strategy
from meshwise.ir.program import Program
from meshwise.ir.sharding import Sharding
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule


@dataclass(frozen=True, slots=True)
class Rejected:
    """A strategy that lost, and by how many seconds (of the modelled hardware)."""

    strategy: Strategy
    dearer_by_seconds: float


@dataclass(frozen=True, slots=True)
class EquationPlan:
    """How one equation is split, and the shardings of its operands and results.

    `operands` and `results` are in the equation's order; for a literal operand the entry is
    meaningless. `remade` equations are computed anew for each sharding wanted of their result.
    """

    strategy: Strategy
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    remade: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that was decided for a program.

    `copies` lists, for each value, the reshards (from, to) that make its copies, each source
    existing before its target. `seconds` is the modelled cost, `completion_seconds` what
    completion alone would cost, `hardware` the figures that both are of. `work_seconds` is what a
    device computes of it, padding aside; `apart` says of which graph it is.
    """

    program: Program
    rules: tuple[OpRule, ...]
    completion: Completion
    equations: tuple[EquationPlan, ...]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    copies: dict[Var, tuple[Edge, ...]]
    seconds: float
    completion_seconds: float
    work_seconds: float
    driver: str
    hardware: Hardware
    apart: Apart = TOGETHER
