"""Structures of trees, asked for their parts without making a tree of them.

Classes may want arrays for leaves, and refuse everything else. Where no instance can be had, a part
has the number that it has for JAX where a class names none.
"""

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """The entry of a prefix tree for every leaf of a structure; ValueError where it is none.

    None in the prefix is an entry, PartitionSpecs are leaves.
    """
    entries, outer = jax.tree.flatten(prefix, is_leaf=lambda x: x is None)
    counts = _leaves_of_each(outer, tree)
    return [entry for entry, n in zip(entries, counts, strict=True) for _ in range(n)]


def _leaves_of_each(prefix: Any, tree: Any) -> Iterator[int]:
    """How many leaves of a structure each leaf of a prefix stands for."""
    node = prefix.node_data()
    if node is None:
        yield tree.num_leaves
        return
    inner, parts = prefix.children(), tree.children()
    if node != tree.node_data() or len(inner) != len(parts):
        raise ValueError(f"{prefix} is no prefix of {tree}")
    for each in map(_leaves_of_each, inner, parts):
        yield from each


def class_of(tree: Any) -> type | None:
    """The class that a structure is of; None for a leaf."""
    node = tree.node_data()
    return None if node is None else node[0]


def parts_of(tree: Any) -> dict[str, Any] | None:
    """The direct parts of a structure by their paths; None for a leaf."""
    if tree.node_data() is None:
        return None
    return {keystr((k,)): part for k, part in zip(_keys_of(tree), tree.children(), strict=True)}


def paths_of(tree: Any) -> list[str]:
    """The path of every leaf of a structure."""
    found = _key_paths(tree, tree.num_leaves)
    if found is not None:
        return list(map(keystr, found))
    parts = parts_of(tree) or {}
    return [key + path for key, part in parts.items() for path in paths_of(part)]


def _key_paths(tree: Any, count: int, is_leaf: Any = None) -> list[Any] | None:
    """The keys of a tree of plain objects, as JAX fills in too; None where a class refuses them."""
    try:
        made = jax.tree.unflatten(tree, [object() for _ in range(tree.num_leaves)])
        top = None if is_leaf is None else partial(is_leaf, made)
        found = [path for path, _ in jax.tree_util.tree_flatten_with_path(made, is_leaf=top)[0]]
    except Exception:
        return None
    return found if len(found) == count else None


def _keys_of(tree: Any) -> Sequence[Any]:
    """The keys of the direct parts of a structure."""
    kind, said = tree.node_data()
    count = len(tree.children())
    if kind is dict:
        return [DictKey(key) for key in said]
    if kind is tuple or kind is list:
        return [SequenceKey(i) for i in range(count)]
    if hasattr(kind, "_fields"):
        return [GetAttrKey(name) for name in kind._fields]
    found = _key_paths(tree, count, operator.is_not)
    return [FlattenedIndexKey(i) for i in range(count)] if found is None else [k for k, *_ in found]
