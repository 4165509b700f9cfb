"""Where a sharding comes from: completion's causes, followed back to the hint.

Completion remembers of each sharded dim only its last step: the equation that the axes came
through, and the tensor there that had them. Following the steps back through the equations ends
at a hint.
"""

from dataclasses import dataclass
from typing import Any

from meshwise._jax import Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.factors import Dims
from meshwise.propagate.completion import Cause


@dataclass(frozen=True, slots=True)
class Origin:
    """The hint that a dim's axes come from, and the equations they came through, nearest first.

    `var` and `dim` are where the chain ends. `hint` is the hint's text with its source, empty
    where no hint was found.
    """

    var: Var
    dim: int
    hint: str
    equations: tuple[int, ...]


def find_origin(plan: Plan, var: Var, dim: int) -> Origin | None:
    """Follow the causes of one dim; None where nothing ever sharded it."""
    causes = plan.completion.causes
    cause = causes.get((var, dim))
    if cause is None:
        return None
    passed: list[int] = []
    seen = {(var, dim)}
    while cause is not None and cause.equation is not None:
        passed.append(cause.equation)
        step = _step_back(plan, var, dim, cause)
        if step is None or step in seen:
            break
        seen.add(step)
        var, dim = step
        cause = causes.get(step)
    hint = cause.hint if cause is not None else ""
    return Origin(var, dim, hint, tuple(passed))


def _step_back(plan: Plan, var: Var, dim: int, cause: Cause) -> tuple[Var, int] | None:
    """The tensor and dim that a dim's axes came from."""
    assert cause.equation is not None
    tensors = _tensors(plan, cause.equation)
    if cause.tensor >= len(tensors):
        return None
    source, source_dims = tensors[cause.tensor]
    for target, target_dims in tensors:
        if target is not var:
            continue
        factors = set(target_dims[dim])
        for source_dim, own in enumerate(source_dims):
            if factors & set(own):
                return source, source_dim
    return None


def _tensors(plan: Plan, equation: int) -> list[tuple[Any, Dims]]:
    """The tensors of an equation as completion counts them: those with dims, no literals."""
    eqn = plan.program.equations[equation]
    rule = plan.rules[equation].factors
    atoms = [*eqn.invars, *eqn.outvars]
    return [
        (atom, dims)
        for atom, dims in zip(atoms, (*rule.operands, *rule.results), strict=True)
        if dims and not isinstance(atom, Literal)
    ]
