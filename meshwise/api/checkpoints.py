"""`mw.padded` and `mw.unpadded`: state as libraries that write files know it, and back.

They know arrays of JAX alone, whose dims all divide. What devices hold of an uneven dim is such an
array, and each process can write and read its shards of it.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.errors import TreeError, message
from meshwise.run.transfers import held_by, shown_as, transfer_between
from meshwise.run.uneven import misfit_of, no_padding


def padded(tree: Any) -> Any:
    """A tree with what devices hold in the place of uneven arrays: arrays of JAX, with padding.

    Of a `jax.ShapeDtypeStruct` with a sharding it is the type that devices hold under that. Other
    leaves, those that divide among them, stay as they are.

    Args:
        tree: arrays, to be written; or types with shardings, on any mesh, to be read.

    >>> mesh = jax.sharding.AbstractMesh((8,), ("x",))
    >>> rows = NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    >>> padded({"w": jax.ShapeDtypeStruct((17, 2), "float32", sharding=rows)})["w"].shape
    (24, 2)
    """
    return jax.tree.map(_padded, tree)


@_jax.hides_frames
def unpadded(tree: Any, like: Any) -> Any:
    """The logical arrays of a tree that was read as `padded(like)` says; moves nothing.

    Args:
        tree: arrays of JAX.
        like: the same tree of arrays or types; of each leaf its shape is read.

    Returns:
        The tree with an `mw.UnevenArray` wherever an array has another shape than in `like`.

    Raises:
        ArgumentError: where an array is not one of that shape with its padding.
        TreeError: where the trees are not alike.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [np.shape(x) for x in _likes(tree, like)]
    paths = [f"tree{path}" for path in _jax.paths_of(structure)]
    misfits = [
        f"{path}: {misfit}"
        for path, leaf, shape in zip(paths, leaves, shapes, strict=True)
        if np.shape(leaf) != shape and (misfit := misfit_of(leaf, shape)) is not None
    ]
    if misfits:
        raise no_padding(misfits)
    shown = [
        leaf if np.shape(leaf) == s else shown_as(leaf, s)
        for leaf, s in zip(leaves, shapes, strict=True)
    ]
    return jax.tree.unflatten(structure, shown)


def _padded(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return held_by(leaf)
    lies = leaf.sharding
    if not isinstance(lies, NamedSharding):
        return leaf
    shape = tuple(leaf.shape)
    held = transfer_between(shape, shape, leaf.dtype, lies, lies).target_padded
    return leaf.update(shape=held)


def _likes(tree: Any, like: Any) -> list[Any]:
    """The leaf of another tree for each of a tree; an error where they are not alike."""
    mine, theirs = jax.tree.structure(tree), jax.tree.structure(like)
    if mine != theirs:
        raise TreeError(
            message(
                "mw.unpadded was given trees that are not alike",
                [f"the arrays are {mine}", f"like is {theirs}"],
                "Each array has its logical shape at the same place of the other tree.",
                "Give the tree that mw.padded was called with.",
            )
        )
    return jax.tree.leaves(like)
