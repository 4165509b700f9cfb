"""Which values meet, so that in another layout one of them would have to be moved."""

from collections.abc import Sequence

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, application_key, atom_key
from meshwise.rules.registry import OpRule


class Classes:
    """Values in classes, which may be joined."""

    def __init__(self) -> None:
        """Every value by itself."""
        self._above: dict[Var, Var] = {}

    def of(self, var: Var) -> Var:
        """The value that stands for all of a value's class."""
        while (above := self._above.setdefault(var, var)) is not var:
            self._above[var] = self._above[above]
            var = self._above[var]
        return var

    def join(self, one: Var, other: Var) -> None:
        """Make one class of those of two values."""
        self._above[self.of(one)] = self.of(other)


def meeting(program: Program, rules: Sequence[OpRule]) -> Classes:
    """Values that meet in element-wise equations, as a weight and its moments in an optimiser."""
    found = Classes()
    for eqn, rule in zip(program.equations, rules, strict=True):
        for var in _as_result(eqn, rule):
            found.join(var, eqn.outvars[0])
    return found


def laid_alike(program: Program, rules: Sequence[OpRule]) -> Classes:
    """The same, and arguments that meet one value in the same way, as weights of q, k and v."""
    found, arguments = meeting(program, rules), set(program.inputs)
    met: dict[object, Var] = {}
    for eqn in program.equations:
        read = {atom for atom in eqn.invars if isinstance(atom, Var)}
        for var in arguments & read if len(read) > 1 else ():
            others = tuple([a.aval if a is var else atom_key(a) for a in eqn.invars])
            key = application_key(eqn, others)
            if key is not None:
                found.join(var, met.setdefault(key, var))
    return found


def _as_result(eqn: JaxprEqn, rule: OpRule) -> list[Var]:
    """The operands whose dims are those of an equation's only result, one by one."""
    factors = rule.factors
    if rule.opaque or factors.permuted or factors.whole or len(factors.results) != 1:
        return []
    (dims,) = factors.results
    pairs = zip(eqn.invars, factors.operands, strict=True)
    return [atom for atom, own in pairs if own == dims and dims and not isinstance(atom, Literal)]
