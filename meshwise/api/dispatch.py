"""The calls of a function on their way through JAX's dispatch, from which later ones start in C++.

That dispatch knows no array but JAX's. Calls with uneven arrays go on through a second one: it is
given what the devices hold, and beside it, as structure of the tree, the logical shapes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import Arguments, take_apart
from meshwise.api.calls import Calls
from meshwise.run.uneven import UnevenArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Held:
    """An `UnevenArray` as a tree: its padded array is the leaf."""

    padded: Any
    shape: tuple[int, ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Results:
    """Leaves of results, uneven ones as `_Held`, and their structure."""

    leaves: list[Any]
    tree: Any = field(metadata={"static": True})


class Dispatch:
    """What JAX's dispatch of a function asks when it has made no call like this one.

    It knows nothing of the `JitFunction` it serves, which is gone as soon as nobody holds it.
    """

    def __init__(self, calls: Calls):
        """Nothing is called yet."""
        self._calls = calls
        self._uneven: set[Any] = set()  # what calls said that led to uneven results
        self._of_held = _jax.dispatcher(
            calls.name, calls.fn, functools.partial(_missed_of_held, calls), static_argnums=[0]
        )

    def missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Results of a call, what JAX's dispatch needs to repeat it, whether to come back."""
        arguments = take_apart(self._calls.options, args, kwargs)
        said = _said(arguments)
        if said in self._uneven or any(type(leaf) is UnevenArray for leaf in arguments.leaves):
            results = self._of_held(said, [_held(leaf) for leaf in arguments.leaves])
            outs = jax.tree.unflatten(results.tree, [_uneven(leaf) for leaf in results.leaves])
            return outs, None, False
        answer = self._calls.answer(arguments)
        if answer.program is None:
            return answer.outs, *answer.as_jax
        executable, tree = answer.program.executable, answer.program.out_tree
        if executable.is_uneven:
            self._uneven.add(said)
            return answer.outs, None, False
        outs = jax.tree.leaves(answer.outs)
        return answer.outs, executable.fast_path(arguments.leaves, tree, outs), False

    def clear_cache(self) -> None:
        """Make no more calls from C++ that were made before."""
        self._uneven.clear()
        self._of_held._clear_cache()

    def cache_size(self) -> int:
        """How many kinds of calls with uneven arrays are made from C++."""
        return self._of_held._cache_size()


def _missed_of_held(calls: Calls, said: Any, leaves: Sequence[Any]) -> tuple[Any, Any, bool]:
    (tree, *_), static, static_named, positions = said
    given = [_uneven(leaf) for leaf in leaves]
    answer = calls.answer(Arguments(given, tree, static, static_named, positions))
    outs, out_tree = jax.tree.flatten(answer.outs)
    results = _Results([_held(leaf) for leaf in outs], out_tree)
    if answer.program is None:
        return results, None, False
    fast = answer.program.executable.fast_path(given, jax.tree.structure(results), outs)
    return results, fast, False


def _said(arguments: Arguments) -> Any:
    """All that is no array, `key` telling apart static values that are equal across types."""
    return arguments.key, arguments.static, arguments.static_named, arguments.positions


def _held(leaf: Any) -> Any:
    return _Held(leaf.padded, leaf.shape) if type(leaf) is UnevenArray else leaf


def _uneven(leaf: Any) -> Any:
    return UnevenArray(leaf.padded, leaf.shape) if type(leaf) is _Held else leaf
