"""What the user says of shardings, spread over the leaves of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from meshwise import _jax
from meshwise.errors import TreeError, message


@dataclass(frozen=True)
class Described:
    """A tree that a tree of shardings describes, and how errors call it and its parts."""

    tree: Any
    name: str
    kind: str
    part_names: tuple[str, ...] | None = None

    def part(self, key: str, index: int, tree: Any) -> "Described":
        """A direct part, by its path."""
        name = self.part_names[index] if self.part_names else f"{self.name}{key}"
        return Described(tree, name, f"{name} is {kind_of(tree)}")


def broadcast_specs(name: str, what: str, prefix: Any, described: Described) -> list[Any]:
    """The entry of a prefix tree for every leaf of a tree; None where nothing is said.

    `what` is how errors call the prefix, `name` the function it was given to.
    """
    try:
        specs = _jax.broadcast_prefix(prefix, described.tree)
    except ValueError as mismatch:
        offenders = _mismatches(what, prefix, described) or [str(mismatch)]
        raise TreeError(
            message(
                f"{what} of {name} does not match the tree it describes",
                offenders,
                "A tree of shardings has the structure of what it describes, or is a prefix of it: "
                "one entry may stand for a whole subtree.",
                "Give one entry for each subtree, and no other; of hints, None leaves one to "
                "completion.",
            )
        ) from None
    return [None if _jax.is_unspecified(s) else _without_format(s) for s in specs]


def _without_format(spec: Any) -> Any:
    """A `Format` that says nothing of layouts is its sharding."""
    return spec.sharding if isinstance(spec, Format) and spec.layout is None else spec


def _mismatches(what: str, prefix: Any, described: Described) -> list[str]:
    """Where a prefix is none, in words."""
    entries, parts = _children(prefix), _children(described.tree)
    if prefix is None or entries is None:
        return []
    if type(prefix) is not type(described.tree) or parts is None:
        return [f"{what} is {kind_of(prefix)}, {described.kind}"]
    inner = {k: described.part(k, i, t) for i, (k, t) in enumerate(parts.items())}
    found = [f"{what}{k} describes nothing: {described.kind}" for k in entries if k not in parts]
    found += [f"{what} has no entry for {inner[k].name}" for k in parts if k not in entries]
    for key in entries:
        if key in parts:
            found += _mismatches(f"{what}{key}", entries[key], inner[key])
    if not found and _top(prefix) != _top(described.tree):
        found = [f"{what} is another kind of {type(prefix).__name__} than {described.name}"]
    return found


def _top(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda x: x is not tree)


def _children(tree: Any) -> dict[str, Any] | None:
    """The direct parts of a tree by their paths; None for a leaf."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if len(found) == 1 and not found[0][0]:
        return None
    return {jax.tree_util.keystr(path): part for path, part in found}


def kind_of(tree: Any) -> str:
    """A tree in a few words: `a tuple of 2`, `a dict with 'a', 'b'`, `one array`."""
    parts = _children(tree)
    if tree is None:
        return "None"
    if parts is None:
        return f"{tree}" if isinstance(tree, PartitionSpec | Sharding) else "one array"
    if isinstance(tree, dict):
        return f"a dict with {', '.join(map(repr, tree)) or 'nothing in it'}"
    return f"a {type(tree).__name__} of {len(parts)}"


def given_in_specs(
    name: str,
    in_shardings: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    positions: Sequence[int],
) -> list[Any]:
    """What in_shardings says of each leaf; nothing of keyword arguments.

    `args` are the positional arguments that are not static, at `positions` of the call.
    """
    given = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    kind = f"the call has {len(args)} positional argument{'s' * (len(args) != 1)}"
    kind += " besides static ones" if len(positions) and max(positions) >= len(args) else ""
    kind += f", and {', '.join(kwargs)} by keyword is left to completion" if kwargs else ""
    names = tuple(f"args[{p}]" for p in positions)
    call = Described(tuple(args), "the call", kind, names)
    return broadcast_specs(name, "in_shardings", given, call) + [None] * len(
        jax.tree.leaves(kwargs)
    )


def refuse_keywords(name: str, kwargs: dict[str, Any]) -> None:
    """An error for arguments by keyword, which `in_shardings` of `jax.jit` do not describe."""
    if kwargs:
        raise TreeError(
            message(
                f"in_shardings of {name} does not support kwargs, and it was called with",
                [", ".join(kwargs)],
                "As under jax.jit, in_shardings are a prefix of the positional arguments.",
                "Pass it by position; or give mw.jit the mesh=, and what comes by keyword is left "
                "to completion.",
            )
        )


def given_out_specs(name: str, out_shardings: Any, out_tree: Any) -> list[Any]:
    """What out_shardings says of each leaf of the result."""
    result = _jax.stand_ins(out_tree)
    described = Described(result, "result", f"result is {kind_of(result)}")
    return broadcast_specs(name, "out_shardings", out_shardings, described)
