"""`mw.stage_boundary`: where a model is cut into stages."""

from typing import TypeVar

import jax

from meshwise import _jax
from meshwise._jax.pipelines import stage_boundary_p
from meshwise.errors import ArgumentError, message
from meshwise.rules.factoring import Factoring
from meshwise.rules.registry import Application, OpRule, register

Tree = TypeVar("Tree")


@_jax.hides_frames
def stage_boundary(x: Tree) -> Tree:
    """Mark a cut between two stages of a model; the identity of an array or a tree of them.

    What is computed before the mark, in the order of the program, is one stage, what comes after
    it the next. It does not matter which values are marked: everything that a later stage needs of
    earlier ones is sent on. Marks say something to `mw.pipeline_value_and_grad` alone; anywhere
    else they are nothing. Derivatives pass, `jax.vmap` and `jax.checkpoint` too.

    >>> stage_boundary(jax.numpy.arange(3)).tolist()
    [0, 1, 2]
    """
    leaves, tree = jax.tree.flatten(x)
    arrays = [_jax.array_type(leaf) is not None for leaf in leaves]
    if not any(arrays):
        raise ArgumentError(
            message(
                "mw.stage_boundary was given no array",
                [f"x is {x!r}"],
                "A mark stands in the program where a value of the model passes.",
                "Mark the activation that goes from one layer to the next.",
            )
        )
    first = arrays.index(True)
    marked = [
        stage_boundary_p.bind(jax.numpy.asarray(leaf), leads=i == first) if is_array else leaf
        for i, (leaf, is_array) in enumerate(zip(leaves, arrays, strict=True))
    ]
    return jax.tree.unflatten(tree, marked)


@register("stage_boundary")
def _boundary_rule(application: Application) -> OpRule:
    dims = Factoring()
    shape = dims.dims(application.operands[0].shape)
    return OpRule(dims.rule([shape], [shape]), linear=((0,),))
