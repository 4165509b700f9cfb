"""What a user says of operators of their own: `mw.register_rule`."""

from collections.abc import Callable
from typing import Any

from meshwise import _jax
from meshwise._jax import Primitive
from meshwise.errors import RuleError, message
from meshwise.rules.given import GivenRule, Linear, is_figure
from meshwise.rules.registry import Application, LocalRule, OpRule


@_jax.hides_frames
def register_rule(
    primitive: Primitive | str,
    rule: str | Callable[[Application], str | OpRule],
    *,
    linear: Linear = (),
    local: LocalRule | None = None,
    flops: float | Callable[[Application], float] | None = None,
) -> None:
    """Say how a primitive of your own may be partitioned.

    Args:
        primitive: the primitive, or its name.
        rule: the factors of the dims of its operands and results, as text; `...` stands for any
            leading dims. Or a function of the `Application` (its `params`, and the types of its
            `operands` and `results`) that returns such a text, or a whole `OpRule`.
        linear: sets of operands through which an unreduced sum may pass: `((0,), (1,))` for a
            product, `((0, 1),)` for a sum of two, nothing by default.
        local: a function of a `LocalContext` and the local operands, in plain `lax`, that
            returns the local results; by default the primitive itself, on local operands.
        flops: of the whole operator, or a function of the `Application`; by default the product
            of the sizes of all factors.

    Raises:
        RuleError: for a text that cannot be read, what is no primitive, or has a rule. When a
            program is made: for a text that does not fit the operands, local results that are not
            what it says, or a function that raises.

    >>> from jax.extend.core import Primitive
    >>> register_rule(Primitive("my_product"), "... i, i o -> ... o | sum=i", linear=((0,), (1,)))
    """
    if not isinstance(primitive, str | Primitive):
        raise RuleError(
            message(
                "mw.register_rule was given what is no primitive",
                [f"{primitive!r:.60} is {type(primitive).__name__}"],
                "A rule is for a jax.extend.core.Primitive, or for one of a name.",
                "Pass what is bound inside of the function, or its name, as jax.make_jaxpr shows.",
            )
        )
    offenders = [] if _is_linear(linear) else [f"linear={linear!r:.60}"]
    if not (flops is None or callable(flops) or is_figure(flops)):
        offenders.append(f"flops={flops!r:.60}")
    if local is not None and not callable(local):
        offenders.append(f"local={local!r:.60}")
    if offenders:
        raise RuleError(
            message(
                "mw.register_rule was given what says nothing of a rule",
                offenders,
                "`linear` has sets of operands' positions, as ((0,), (1,)) or ((0, 1),); `flops` "
                "is a finite number, 0 or more, or a function, `local` a function.",
                "Leave out what is as by default.",
            )
        )
    name = primitive if isinstance(primitive, str) else primitive.name
    GivenRule(name, rule, tuple(map(tuple, linear)), local, flops).register()


def _is_linear(given: Any) -> bool:
    """Whether it is sets of positions."""
    kinds = list | tuple | set | frozenset
    sets = given if isinstance(given, kinds) else [given]
    return all(isinstance(one, kinds) and all(map(_is_position, one)) for one in sets)


def _is_position(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)
