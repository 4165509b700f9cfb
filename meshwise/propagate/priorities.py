"""Which equations move shardings first (GSPMD, arXiv 2105.04663 section 3.5).

Most certain first: level 0 are operators that preserve dims (element-wise, transposes, reshapes);
level 1 everything else but broadcasts; level 2 adds broadcasts backward; level 3 broadcasts
forward, because the result of a broadcast can be sharded in more ways than its operand knows of.
What an equation is, is read from its factor rule alone.
"""

from meshwise.ir.factors import FactorRule

LEVELS = (0, 1, 2, 3)


def levels(rule: FactorRule) -> tuple[int, int]:
    """The level from which an equation is visited forward, and backward."""
    if preserves_dims(rule):
        return 0, 0
    if broadcasts(rule):
        return 3, 2
    return 1, 1


def preserves_dims(rule: FactorRule) -> bool:
    """Every factor is a pass-through that stands in every tensor which is no scalar."""
    if rule.reductions or rule.whole or rule.permuted:
        return False
    tensors = [_factors(t) for t in (*rule.operands, *rule.results) if t]
    return all(t == tensors[0] for t in tensors[1:])


def broadcasts(rule: FactorRule) -> bool:
    """The results have factors that no operand has, and nothing is reduced."""
    operands = frozenset().union(*(_factors(t) for t in rule.operands)) if rule.operands else set()
    results = frozenset().union(*(_factors(t) for t in rule.results)) if rule.results else set()
    return not rule.reductions and operands < results


def _factors(dims: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    return frozenset(f for dim in dims for f in dim)
