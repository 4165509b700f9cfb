"""The devices that a collective is of: over which axes, and how many."""

from collections.abc import Mapping
from math import prod

from meshwise._jax.jaxprs import JaxprEqn


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective, or `axis_index`, goes over; positional ones move nothing."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    return tuple([n for n in names if isinstance(n, str)])


def group_size(eqn: JaxprEqn, sizes: Mapping[str, int]) -> int:
    """How many devices take part in one collective equation together."""
    groups = eqn.params.get("axis_index_groups")
    return len(groups[0]) if groups else prod(sizes[a] for a in named_axes(eqn))
