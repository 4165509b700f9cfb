"""The verbs by which a program communicates, and dropout.

Each takes an array or a tree of arrays and keeps shapes: what changes is the layout. `axes` are
those of the mesh that it goes over, by default the program's group. They stand in functions under
`mw.program`; anywhere else they raise `LayoutError`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import Primitive, array_type, hides_frames, typed_as
from meshwise._jax.verbs import new_verb
from meshwise.errors import LayoutError, message
from meshwise.ir.numbers import whole_number
from meshwise.ir.sharding import Reduction
from meshwise.schedule.language.specs import REDUCTIONS, axes_of

Tree = TypeVar("Tree")


def _outside(name: str, transformed: str | None = None) -> LayoutError:
    if transformed is not None:
        return LayoutError(
            message(
                f"mw.{name} was to be {transformed}",
                ["it is in a function given to jax.grad, jax.vmap or the like"],
                "A verb says what devices send of values with layouts; derivatives and batches of "
                "it have layouts of their own, which nobody says.",
                "Take the gradient, or the batch, of what is between verbs, and write the verbs "
                "of the gradient, as mw.all_reduce(jax.grad(loss)(w, x)).",
            )
        )
    return LayoutError(
        message(
            f"mw.{name} was called outside of a program",
            ["its value has no layout here"],
            "The verbs speak of devices of a mesh, along which values of an @mw.program lie.",
            "Call it in a function under @mw.program(mesh); or, in a function of local arrays "
            "under jax.shard_map, use jax.lax's collectives.",
        )
    )


all_reduce_p = new_verb("all_reduce", _outside)
reduce_scatter_p = new_verb("reduce_scatter", _outside)
all_gather_p = new_verb("all_gather", _outside)
all_to_all_p = new_verb("all_to_all", _outside)
broadcast_p = new_verb("broadcast", _outside)
reduce_p = new_verb("reduce", _outside)
send_p = new_verb("send", _outside)
update_p = new_verb("update", _outside)

VERBS = frozenset(
    {
        all_reduce_p,
        reduce_scatter_p,
        all_gather_p,
        all_to_all_p,
        broadcast_p,
        reduce_p,
        send_p,
        update_p,
    }
)


def verb_name(primitive: Primitive) -> str:
    """What a user calls a verb's primitive."""
    return f"mw.{primitive.name.removeprefix('mw_')}"


@hides_frames
def all_reduce(x: Tree, op: str = "sum", axes: str | Sequence[str] | None = None) -> Tree:
    """The sum (maximum, ...) of what devices hold: Local or Unreduced becomes Replicated."""
    reduction = _operator("all_reduce", op, x)
    return _bind(all_reduce_p, x, op=reduction, axes=axes_of(axes))


@hides_frames
def reduce_scatter(
    x: Tree, dim: int = 0, op: str = "sum", axes: str | Sequence[str] | None = None
) -> Tree:
    """This device's part of the sum of what devices hold: Local or Unreduced becomes Sliced(dim).

    A dim that does not divide is padded.
    """
    reduction = _operator("reduce_scatter", op, x)
    return _bind(
        reduce_scatter_p, x, dim=_whole("reduce_scatter", dim=dim), op=reduction, axes=axes_of(axes)
    )


@hides_frames
def all_gather(x: Tree, axes: str | Sequence[str] | None = None) -> Tree:
    """The parts that devices hold, joined: Sliced becomes Replicated."""
    return _bind(all_gather_p, x, axes=axes_of(axes))


@hides_frames
def all_to_all(x: Tree, dim: int, axes: str | Sequence[str] | None = None) -> Tree:
    """The parts cut along another dim: Sliced(d) becomes Sliced(dim)."""
    return _bind(all_to_all_p, x, dim=_whole("all_to_all", dim=dim), axes=axes_of(axes))


@hides_frames
def broadcast(x: Tree, root: int = 0, axes: str | Sequence[str] | None = None) -> Tree:
    """What device `root` holds, on all of them: Local becomes Replicated.

    Over several axes `root` counts their devices, major to minor.
    """
    return _bind(broadcast_p, x, root=_whole("broadcast", root=root), axes=axes_of(axes))


@hides_frames
def reduce(
    x: Tree, root: int = 0, op: str = "sum", axes: str | Sequence[str] | None = None
) -> Tree:
    """The sum of what devices hold, on device `root`: Local or Unreduced becomes Local.

    Other devices hold what the reduction leaves there: sums of some of the terms, of no use.
    """
    number = _whole("reduce", root=root)
    return _bind(reduce_p, x, root=number, op=_operator("reduce", op, x), axes=axes_of(axes))


@hides_frames
def send(x: Tree, axis: str, shift: int = 1) -> Tree:
    """To the neighbour along an axis: device i gets what device i - shift holds; Local over it.

    The first `shift` devices (the last ones, for a negative shift) get zeros.
    """
    axes_of(axis)
    return _bind(send_p, x, axis=axis, shift=_whole("send", shift=shift))


@hides_frames
def update(target: Tree, value: Tree) -> Tree:
    """`value`, to be the next value of an argument, `target`; the program returns it.

    Argument and result are then a state (`SpmdProgram.states`) of a loop over calls. Their shapes
    and types are equal, and their layouts; or the target is Replicated, and the value in slices,
    which are gathered before they are returned, or when the next call wants the whole.
    """
    targets, tree = jax.tree.flatten(target)
    values, other = jax.tree.flatten(value)
    if tree != other:
        raise LayoutError(
            message(
                "mw.update was given a value of another structure than its target",
                [f"the target is {tree}, the value {other}"],
                "The next value of an argument is like the argument.",
                "Update each part by itself.",
            )
        )
    pairs = zip(targets, values, strict=True)
    return jax.tree.unflatten(tree, [_updated(t, v) for t, v in pairs])


def _updated(target: Any, value: Any) -> Any:
    before, after = array_type(target), array_type(value)
    if before is None or after is None or before.shape != after.shape:
        raise _not_alike(before, after)
    if before.dtype != after.dtype:
        raise _not_alike(before, after)
    return update_p.bind(jnp.asarray(target), jnp.asarray(value))


def _not_alike(before: Any, after: Any) -> LayoutError:
    shown = [t.str_short() if t is not None else "no array" for t in (before, after)]
    return LayoutError(
        message(
            "mw.update was given a value of another type than its target",
            [f"the target is {shown[0]}, the value {shown[1]}"],
            "The next value of an argument has its shape and dtype.",
            "Reshape or cast the value.",
        )
    )


@hides_frames
def dropout(key: Any, x: jax.Array, rate: float) -> jax.Array:
    """`x` with a share `rate` of its elements zero, at random, and the others scaled up.

    The mask is made for the whole of `x`, so it is the same in whichever slices `x` lies. Of a
    Local value all devices have the same mask where they have the same key.

    >>> dropout(jax.random.key(0), jnp.ones(4), 0.0).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    is_known = isinstance(rate, int | float | np.number)
    is_rate = 0 <= rate < 1 if is_known else array_type(rate) is not None
    given = {
        "key": (key, _is_key(key)),
        "x": (x, array_type(x) is not None),
        "rate": (rate, is_rate),
    }
    strange = [f"{name}={value!r:.60}" for name, (value, is_right) in given.items() if not is_right]
    if strange:
        raise LayoutError(
            message(
                "mw.dropout was given what does not say what to drop",
                strange,
                "It takes a key, an array, and the share of its elements that become zero: from 0 "
                "on, below 1.",
                "Write mw.dropout(jax.random.key(0), x, 0.1) to drop a tenth of them.",
            )
        )
    if is_known and not rate:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, jnp.shape(x))
    lies = typed_as(x)
    kept = kept if lies is None else jax.sharding.reshard(kept, lies)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def _is_key(key: Any) -> bool:
    """Whether something is a key of `jax.random`, or the numbers of one."""
    kind = array_type(key)
    is_typed = kind is not None and jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)
    return is_typed or (kind is not None and kind.dtype == np.uint32 and len(kind.shape) == 1)


def _bind(primitive: Primitive, x: Any, **params: Any) -> Any:
    arrays = _arrays(verb_name(primitive), x)
    return jax.tree.map(lambda leaf: primitive.bind(leaf, **params), arrays)


def _whole(verb: str, **given: Any) -> int:
    """The whole number that is given under a name."""
    ((name, value),) = given.items()
    number = whole_number(value)
    if number is None:
        raise LayoutError(
            message(
                f"mw.{verb} was given a number that is none",
                [f"{name}={value!r:.60}"],
                "A dim, a root and a shift are whole numbers that are known when it is traced.",
                "Give it as an int.",
            )
        )
    return number


def _arrays(verb: str, x: Any) -> Any:
    """The tree with each leaf an array. Raises `LayoutError` where one is none."""
    offenders = [f"{leaf!r:.60}" for leaf in jax.tree.leaves(x) if array_type(leaf) is None]
    if offenders:
        raise LayoutError(
            message(
                f"{verb} was given what is no array",
                offenders,
                "A verb takes an array, or a tree of arrays, and then what is said of it.",
                f'Write {verb}(x, ...) with the value first, and axes by name: axes="data".',
            )
        )
    return jax.tree.map(jnp.asarray, x)


def _operator(verb: str, op: str, x: Any) -> Reduction:
    """The operator, where there is one of that name for the values' types."""
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise LayoutError(
            message(
                f"mw.{verb} was given an operator that is none",
                [f"op={op!r}"],
                f"It is one of {', '.join(map(repr, REDUCTIONS))}.",
                "For a mean, divide the sum by the number of devices.",
            )
        )
    types = [leaf.dtype for leaf in jax.tree.leaves(_arrays(f"mw.{verb}", x))]
    offenders = [f"op={op!r} of {dtype}" for dtype in types if not _joins(op, dtype)]
    if offenders:
        raise LayoutError(
            message(
                f"mw.{verb} was given values that its operator does not join",
                dict.fromkeys(offenders),
                "and, or: of booleans and integers; sum, prod: of numbers; max, min: of both.",
                "Cast the value first.",
            )
        )
    return REDUCTIONS[op]


def _joins(op: str, dtype: Any) -> bool:
    is_bool, is_number = dtype == jnp.bool_, jnp.issubdtype(dtype, jnp.number)
    if op in ("and", "or"):
        return is_bool or jnp.issubdtype(dtype, jnp.integer)
    return is_number or (is_bool and op in ("max", "min"))
