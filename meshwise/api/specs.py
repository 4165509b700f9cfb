"""What the user says of shardings, spread over the leaves of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format

from meshwise import _jax
from meshwise.errors import TreeError, message


@dataclass(frozen=True)
class Described:
    """The structure that a tree of shardings describes, and how errors call it and its parts."""

    tree: Any
    name: str
    said: str | None = None
    part_names: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        """What it is, in a few words."""
        return self.said or f"{self.name} is {kind_of(self.tree)}"

    def part(self, key: str, index: int, tree: Any) -> "Described":
        """A direct part, by its path."""
        return Described(tree, self.part_names[index] if self.part_names else f"{self.name}{key}")


_COMPLETED = "of hints, None leaves one to completion"


def broadcast_specs(
    name: str, what: str, prefix: Any, described: Described, without: str = _COMPLETED
) -> list[Any]:
    """The entry of a prefix tree for every leaf of a tree; None where nothing is said.

    `what` is how errors call the prefix, `name` the function it was given to; `without` says what
    comes of a leaf of which nothing is said.
    """
    try:
        specs = _jax.broadcast_prefix(prefix, described.tree)
    except ValueError as mismatch:
        offenders = _mismatches(what, prefix, described) or [str(mismatch)]
        raise _mismatch(f"{what} of {name}", offenders, without) from None
    return [None if _jax.is_unspecified(s) else _without_format(s) for s in specs]


def _mismatch(asked: str, offenders: Sequence[str], without: str = _COMPLETED) -> TreeError:
    """The error for a tree of shardings that is none for what it describes."""
    return TreeError(
        message(
            f"{asked} does not match the tree it describes",
            offenders,
            "A tree of shardings has the structure of what it describes, or is a prefix of it: "
            "one entry may stand for a whole subtree.",
            "Give one entry for each subtree, in containers of the same classes, and no other; "
            f"{without}.",
        )
    )


def _without_format(spec: Any) -> Any:
    """A `Format` that says nothing of layouts is its sharding."""
    return spec.sharding if isinstance(spec, Format) and spec.layout is None else spec


def _mismatches(what: str, prefix: Any, described: Described) -> list[str]:
    """Where a prefix is none, in words."""
    entries, outer, parts = _children(prefix), _top(prefix), _jax.parts_of(described.tree)
    if prefix is None or entries is None:
        return []
    if parts is None or _jax.class_of(outer) is not _jax.class_of(described.tree):
        return [f"{what} is {kind_of(outer)}, {described.kind}"]
    inner = {k: described.part(k, i, t) for i, (k, t) in enumerate(parts.items())}
    found = [f"{what}{k} describes nothing: {described.kind}" for k in entries if k not in parts]
    found += [f"{what} has no entry for {inner[k].name}" for k in parts if k not in entries]
    for key in entries:
        if key in parts:
            found += _mismatches(f"{what}{key}", entries[key], inner[key])
    if not found and outer.node_data() != described.tree.node_data():
        found = [f"{what} is another kind of {type(prefix).__name__} than {described.name}"]
    return found


def _top(tree: Any) -> Any:
    """The structure of a tree whose direct parts are leaves."""
    return jax.tree.structure(tree, is_leaf=lambda x: x is not tree)


def _children(tree: Any) -> dict[str, Any] | None:
    """The direct parts of a tree by their paths; None for a leaf."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    keys = _jax.parts_of(_top(tree))
    return None if keys is None else dict(zip(keys, parts, strict=True))


def kind_of(tree: Any) -> str:
    """A structure in a few words: `a tuple of 2`, `a dict with 'a', 'b'`, `one array`."""
    parts, kind = _jax.parts_of(tree), _jax.class_of(tree)
    if parts is None or kind is None:
        return "one array"
    if kind is type(None):
        return "None"
    if issubclass(kind, dict):
        keys = ", ".join(key[1:-1] for key in parts) or "nothing in it"
        return f"a {kind.__name__} with {keys}"
    return f"a {kind.__name__} of {len(parts)}"


def given_in_specs(
    name: str, in_shardings: Any, tree: Any, positions: Sequence[int], statics: int = 0
) -> list[Any]:
    """What in_shardings says of each leaf of a call; nothing of keyword arguments.

    `tree` is the structure of `(args, kwargs)` without what is static, `positions` are those of its
    positional arguments in the call, beside so many static ones.
    """
    args, kwargs = tree.children()
    count, named = len(args.children()), kwargs.node_data()[1]
    given = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    kind = f"the call has {count} positional argument{'s' * (count != 1)}"
    kind += " besides static ones, which have no entry" if statics else ""
    kind += f"; {', '.join(named)} came by keyword: pass it by position" if named else ""
    names = tuple(f"args[{p}]" for p in positions)
    call = Described(args, "the call", kind, names)
    if named and not args.num_leaves and not _jax.is_unspecified(given) and given not in ((), {}):
        raise _mismatch(f"in_shardings of {name}", [f"in_shardings describes nothing: {kind}"])
    return broadcast_specs(name, "in_shardings", given, call) + [None] * kwargs.num_leaves


def refuse_keywords(name: str, kwargs: Sequence[str]) -> None:
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
    return broadcast_specs(name, "out_shardings", out_shardings, Described(out_tree, "result"))
