"""A function under `mw.jit` as `jax.jit` takes it: calls that are JAX's to run, or to refuse.

Where nothing names a mesh of several devices there is nothing to partition, and `jax.jit` runs the
function. And where meshwise refuses what somebody wrote for `jax.jit`, JAX is asked: a program that
it accepts runs, partitioned by XLA; one that it refuses as well is refused in our words, by an
error that is of both classes. Neither holds where words of our own were used (`mesh=`, `strict=`,
`schedule=`).
"""

import logging
from collections.abc import Callable
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import Arguments
from meshwise.api.build import Options
from meshwise.errors import MeshwiseError, also

_LOG = logging.getLogger("meshwise")


class AsJax:
    """What `jax.jit` makes of a function with the options that were given to `mw.jit`."""

    def __init__(self, name: str, fn: Callable[..., Any], options: Options):
        """Ask JAX nothing yet."""
        self.name = name
        self.fn = fn
        self.options = options
        self._jitted: Any = None

    @property
    def jitted(self) -> Any:
        """The function under `jax.jit`. Raises what that does for such options."""
        if self._jitted is None:
            options = self.options
            self._jitted = jax.jit(
                self.fn,
                in_shardings=options.in_shardings,
                out_shardings=options.out_shardings,
                static_argnums=options.static_argnums,
                static_argnames=options.static_argnames,
                donate_argnums=options.donate_argnums,
                donate_argnames=options.donate_argnames,
            )
        return self._jitted

    @property
    def may_run(self) -> bool:
        """Whether everything that was said is said in JAX's words."""
        choices = self.options.choices
        ours = choices.strict or choices.schedule is not None or choices.hoist_bytes is not None
        return self.options.mesh is None and not ours

    def mesh(self, arguments: Arguments) -> Any:
        """The first mesh of several devices that the function itself names; None if none.

        Raises what the function raises while it is traced.
        """
        if not self.may_run or _names_axes(self.options.in_shardings, self.options.out_shardings):
            return None
        args, kwargs = arguments.call(arguments.leaves)
        closed = self.jitted.trace(*args, **kwargs).jaxpr
        return next((m for m in _jax.meshes_in(closed) if m.size > 1), None)

    def answer(self, refusal: MeshwiseError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a call that meshwise refuses; the refusal where JAX does so too."""
        if not self.may_run:
            raise refusal
        try:
            outs = self.jitted(*args, **kwargs)
        except Exception as theirs:
            if isinstance(theirs, MeshwiseError):
                raise
            raise also(refusal, type(theirs)) from theirs
        _LOG.info("%s is run by jax.jit: %s", self.name, refusal)
        return outs


def _names_axes(*shardings: Any) -> bool:
    """Whether axes are named without a mesh."""
    return any(isinstance(s, jax.sharding.PartitionSpec) for s in jax.tree.leaves(shardings))
