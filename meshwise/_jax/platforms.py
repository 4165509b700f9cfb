"""`lax.platform_dependent`: which of its branches runs is known before the program is."""

from typing import Any

from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge

from meshwise._jax.jaxprs import JaxprEqn, with_bodies, with_each


def on_platform(closed: Any, platform: str | None) -> Any:
    """A jaxpr, bodies included, in which branches by platform are the one that runs on this one.

    For no platform (a mesh without devices) the default branch is taken; where there is none the
    choice stays.
    """
    names = {platform, *_aliases(platform)} if platform else set[str]()
    return _resolved(closed, names)


def _aliases(platform: str) -> list[str]:
    try:
        return list(_xla_bridge.expand_platform_alias(platform))
    except RuntimeError:  # a platform that JAX does not know
        return []


def _resolved(jaxpr: Any, names: set[Any]) -> Any:
    def taken(eqn: JaxprEqn) -> list[JaxprEqn]:
        return [_taken(with_bodies(eqn, lambda body: _resolved(body, names)), names)]

    return with_each(jaxpr, taken)


def _taken(eqn: JaxprEqn, names: set[Any]) -> JaxprEqn:
    """A choice by a platform's number as a call of its branch.

    Such a choice says the platforms of its branches itself. Where the number is made need not be
    seen: the choice of a gradient gets it from the call that made what the gradient is of.
    """
    number = _branch(eqn.params.get("branches_platforms") or (), names)
    if eqn.primitive.name != "cond" or number is None:
        return eqn
    branch = eqn.params["branches"][number]
    return eqn.replace(
        primitive=_core.closed_call_p, invars=eqn.invars[1:], params={"call_jaxpr": branch}
    )


def _branch(platforms: Any, names: set[Any]) -> int | None:
    default = None
    for number, of in enumerate(platforms):
        if of is None:
            default = number
        elif names & {*of}:
            return number
    return default
