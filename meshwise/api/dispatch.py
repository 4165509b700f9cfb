"""The calls of a function on their way through JAX's dispatch, from which later ones start in C++.

That dispatch knows no array but JAX's. Calls with uneven arrays go on through a second one: it is
given what the devices hold, and the logical shapes as a static value.
"""

import functools
from collections.abc import Sequence
from typing import Any

from meshwise import _jax
from meshwise.api.arguments import Arguments, take_apart
from meshwise.api.calls import Answer, Calls
from meshwise.run.uneven import UnevenArray, wrap


class Dispatch:
    """What JAX's dispatch of a function asks when it has made no call like this one.

    It knows nothing of the `JitFunction` it serves, which is gone as soon as nobody holds it.
    """

    def __init__(self, calls: Calls):
        """Nothing is called yet."""
        self._calls = calls
        both = (functools.partial(f, calls) for f in (_fn_of_held, _missed_of_held))
        self._of_held = _jax.dispatcher(calls.name, *both, static_argnums=[0])

    @_jax.hides_frames
    def missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Results of a call, what JAX's dispatch needs to repeat it, whether to come back."""
        arguments = take_apart(self._calls.options, args, kwargs)
        leaves = arguments.leaves
        shapes = tuple([leaf.shape if type(leaf) is UnevenArray else None for leaf in leaves])
        if any(shapes):
            held = [leaf.padded if type(leaf) is UnevenArray else leaf for leaf in leaves]
            return self._of_held((_said(arguments), shapes), held), None, False
        answer = self._calls.answer(arguments)
        if answer.program is None:
            return answer.outs, *answer.as_jax
        return answer.outs, _fast_path(answer, leaves), False

    def clear_cache(self) -> None:
        """Make no more calls from C++ that were made before."""
        self._of_held._clear_cache()

    def cache_size(self) -> int:
        """How many kinds of calls with uneven arrays are made from C++."""
        return self._of_held._cache_size()


def _fn_of_held(calls: Calls, said: Any, held: Sequence[Any]) -> Any:
    arguments = _arguments(said, held)
    args, kwargs = arguments.call(arguments.leaves)
    return calls.step_by_step(*args, **kwargs)


@_jax.hides_frames
def _missed_of_held(calls: Calls, said: Any, held: Sequence[Any]) -> tuple[Any, Any, bool]:
    arguments = _arguments(said, held)
    answer = calls.answer(arguments)
    return answer.outs, _fast_path(answer, arguments.leaves), False


def _arguments(said: Any, held: Sequence[Any]) -> Arguments:
    ((tree, *_), static, static_named, positions), shapes = said
    leaves = [wrap(x, shape) if shape else x for x, shape in zip(held, shapes, strict=True)]
    return Arguments(leaves, tree, static, static_named, positions)


def _fast_path(answer: Answer, leaves: Sequence[Any]) -> Any:
    if answer.program is None:
        return None
    return answer.program.executable.fast_path(leaves, answer.outs)


def _said(arguments: Arguments) -> Any:
    """All that is no array, `key` telling apart static values that are equal across types."""
    return arguments.key, arguments.static, arguments.static_named, arguments.positions
