"""`mw.shard`: a hint from inside a function."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import describe
from meshwise.api.specs import Described, broadcast_specs
from meshwise.errors import ArgumentError, HintError, message


@_jax.hides_frames
def shard(x: Any, spec: Any) -> Any:
    """Say how a value is sharded: a hint, from inside a function under `mw.jit`.

    `spec` is a `PartitionSpec` or `NamedSharding` for one array, or a tree of them (a prefix of
    the tree `x`). A dim of `PartitionSpec.UNCONSTRAINED` is left to completion. Under plain
    `jax.jit` the hint is a sharding constraint where a mesh is set. Over Explicit axes the type of
    the result says it too, as that of `jax.sharding.reshard`. An array outside of any traced
    function stays where it is: `mw.reshard` moves it.

    >>> shard(jax.numpy.ones(3), jax.sharding.PartitionSpec("data")).shape
    (3,)
    """
    leaves, tree = jax.tree.flatten(x)
    specs = broadcast_specs("mw.shard", "spec", spec, Described(tree, "x"))
    types = [_jax.array_type(leaf) for leaf in leaves]
    if None in types:
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
        raise ArgumentError(
            message(
                "mw.shard was given values that are no arrays",
                [
                    f"x{path} is {describe(leaf)}"
                    for leaf, path, kind in zip(leaves, paths, types, strict=True)
                    if kind is None
                ],
                "A hint is on an array, or on a tree of them.",
                "Give others None for a hint, or leave them out of the tree.",
            )
        )
    wrong = [s for s in specs if not isinstance(s, NamedSharding | PartitionSpec | None)]
    is_traced = _jax.is_tracing() or any(isinstance(leaf, _jax.Tracer) for leaf in leaves)
    if wrong and not is_traced:  # of a value in a trace it is said with its line
        raise HintError(
            message(
                "mw.shard was given what is no sharding",
                [f"{s!r:.60}" for s in wrong],
                "A hint is a PartitionSpec or a NamedSharding.",
                "Write jax.sharding.PartitionSpec(...), with the axes of each dim.",
            )
        )
    hinted = [
        leaf if s is None else _jax.hinted(leaf, s) if is_traced else jax.numpy.asarray(leaf)
        for leaf, s in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(tree, hinted)
