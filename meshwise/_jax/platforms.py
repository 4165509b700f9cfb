"""`lax.platform_dependent`: which of its branches runs is known before the program is."""

from typing import Any

from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge
from jax.extend.core import Literal

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
    chosen: dict[Any, int] = {}

    def taken(eqn: JaxprEqn) -> list[JaxprEqn]:
        if eqn.primitive.name == "platform_index":
            number = _branch(eqn.params["platforms"], names)
            if number is not None:
                chosen[eqn.outvars[0]] = number
        return [_taken(with_bodies(eqn, lambda body: _resolved(body, names)), chosen)]

    return with_each(jaxpr, taken)


def _branch(platforms: Any, names: set[Any]) -> int | None:
    default = None
    for number, of in enumerate(platforms):
        if of is None:
            default = number
        elif names & {*of}:
            return number
    return default


def _taken(eqn: JaxprEqn, chosen: dict[Any, int]) -> JaxprEqn:
    """A choice by a platform's number as a call of its branch."""
    which = eqn.invars[0] if eqn.primitive.name == "cond" else None
    if which is None or isinstance(which, Literal) or which not in chosen:
        return eqn
    branch = eqn.params["branches"][chosen[which]]
    return eqn.replace(
        primitive=_core.closed_call_p, invars=eqn.invars[1:], params={"call_jaxpr": branch}
    )
