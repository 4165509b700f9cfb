"""A program without Local values on one device: what a verb moves, it does not change."""

from collections.abc import Callable
from typing import Any

import jax

from meshwise import _jax
from meshwise.flatten import flatten


def on_one_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of whole values that a program computes, its verbs left out.

    An Unreduced value is, on one device, the sum itself.
    """

    def function(*args: Any) -> Any:
        shaped = jax.make_jaxpr(fn, return_shape=True)(*args)
        closed = flatten(shaped[0])
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            is_verb = eqn.primitive.name.startswith("mw_")
            results = operands[-1:] if is_verb else _jax.bind(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        leaves = [read(a) for a in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shaped[1]), leaves)

    return function
