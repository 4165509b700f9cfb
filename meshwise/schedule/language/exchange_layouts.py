"""What each verb makes of layouts (CoCoNeT, section 2: the communication operations)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.errors import LayoutError, message
from meshwise.ir.mesh import Axes
from meshwise.ir.program import shape_of
from meshwise.schedule.language.scene import Scene, refuse, shown
from meshwise.schedule.layouts import Layout


def layout_of_verb(eqn: JaxprEqn, scene: Scene) -> Layout:
    """The layout of a verb's result. Raises `LayoutError` where its operand's is another."""
    return _LAYOUTS[eqn.primitive.name](eqn, scene)


def axes_of_verb(eqn: JaxprEqn, scene: Scene) -> Axes:
    """The axes that a verb goes over: those it names, or the program's group."""
    params = eqn.params
    axes = (params["axis"],) if "axis" in params else params["axes"]
    axes = scene.group if axes is None else axes
    if axes is None:
        raise LayoutError(
            message(
                f"{shown(eqn)} at {_jax.source_summary(eqn)} names no axes",
                [f"the mesh has axes {', '.join(scene.mesh.names)}, the program no group"],
                "A verb goes over the axes it names, or over the program's group.",
                "Give it axes=, or the program: mw.program(mesh, axes=...).",
            )
        )
    unknown = [a for a in axes if a not in scene.mesh.names]
    if unknown or len(set(axes)) != len(axes):
        raise LayoutError(
            message(
                f"{shown(eqn)} at {_jax.source_summary(eqn)} names axes that do not fit",
                [f"axes={axes!r}"],
                f"The mesh has axes {', '.join(scene.mesh.names)}; each is named once.",
                "Name axes of the mesh.",
            )
        )
    return axes


def _check_kinds(
    eqn: JaxprEqn, scene: Scene, axes: Axes, kinds: Sequence[str], way_out: str
) -> None:
    """The operand is of one of some kinds along each axis."""
    atom = eqn.invars[0]
    wrong = [a for a in axes if scene.along(a, atom) not in kinds]
    if wrong:
        raise refuse(
            eqn,
            [scene.text(atom)],
            f"{shown(eqn)} over {', '.join(axes)} takes a value that is {' or '.join(kinds)} "
            f"there; over {', '.join(wrong)} this one is {scene.along(wrong[0], atom)}.",
            way_out,
        )


def _check_operator(eqn: JaxprEqn, scene: Scene, axes: Axes) -> None:
    layout, op = scene.layout(eqn.invars[0]), eqn.params["op"]
    if {*axes} & {*layout.unreduced} and layout.reduction is not op:
        raise refuse(
            eqn,
            [scene.text(eqn.invars[0])],
            f"Terms are joined by the operator that they are terms of, not by {op.value}.",
            f'Give it op="{layout.reduction.value}".',
        )


_NOT_TERMS = (
    "A Sliced value is reduced by an operator of its own first (jnp.sum, jnp.max); a Replicated "
    "one needs no reduction."
)


def _reduced(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes = axes_of_verb(eqn, scene)
    _check_kinds(eqn, scene, axes, ("Local", "Unreduced"), _NOT_TERMS)
    _check_operator(eqn, scene, axes)
    return scene.layout(eqn.invars[0]).without(axes)


def _scattered(eqn: JaxprEqn, scene: Scene) -> Layout:
    return _sliced_more(eqn, scene, _reduced(eqn, scene), axes_of_verb(eqn, scene))


def _sliced_more(eqn: JaxprEqn, scene: Scene, layout: Layout, axes: Axes) -> Layout:
    """The layout cut along the verb's dim, which divides where it is cut already."""
    (atom,), dim = eqn.invars, eqn.params["dim"]
    rank = len(shape_of(atom))
    if not -rank <= dim < rank:
        raise refuse(
            eqn,
            [f"{scene.text(atom)}; dim={dim}"],
            "Parts are cut along a dim of the value.",
            "Name one of its dims; a scalar cannot be cut.",
        )
    dim %= rank
    dims = list(layout.dims)
    if dims[dim]:
        _check_even(eqn, scene, atom, dim, (*dims[dim], *axes))
    dims[dim] = (*dims[dim], *axes)
    return Layout(tuple(dims), layout.unreduced, layout.reduction, layout.local)


def _check_even(eqn: JaxprEqn, scene: Scene, atom: Any, dim: int, axes: Axes) -> None:
    size, count = shape_of(atom)[dim], scene.mesh.size(axes)
    if size % count:
        raise refuse(
            eqn,
            [f"{scene.text(atom)}; dim {dim} of {size} over {', '.join(axes)}, {count} devices"],
            "A part is cut further, or joined in part, only where it divides: else parts of parts "
            "are no parts of the whole.",
            "Use another dim for one of the axes, or pad the dim.",
        )


def _gathered(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes = axes_of_verb(eqn, scene)
    way_out = (
        "mw.all_reduce what is Local or Unreduced; a Replicated value needs no gathering. To see "
        "all devices' own values, return the Local value: it has a leading dim outside."
    )
    _check_kinds(eqn, scene, axes, ("Sliced",), way_out)
    return _without_slices(eqn, scene, axes)


def _without_slices(eqn: JaxprEqn, scene: Scene, axes: Axes) -> Layout:
    """The layout with parts over some axes joined: the most minor ones of each dim."""
    atom = eqn.invars[0]
    layout = scene.layout(atom)
    for dim, over in enumerate(layout.dims):
        joined = {*over} & {*axes}
        if joined and {*over[len(over) - len(joined) :]} != joined:
            raise refuse(
                eqn,
                [f"{scene.text(atom)}; dim {dim} is to be joined over {', '.join(sorted(joined))}"],
                "Neighbouring parts are joined: those of the most minor axes of a dim first.",
                f"Go over {over[-1]} first, or over all of {', '.join(over)}.",
            )
        if joined and len(joined) < len(over):
            _check_even(eqn, scene, atom, dim, over)
    return layout.without(axes)


def _exchanged(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes, atom = axes_of_verb(eqn, scene), eqn.invars[0]
    _check_kinds(
        eqn, scene, axes, ("Sliced",), "mw.reduce_scatter makes parts of what is to be reduced."
    )
    before = scene.layout(atom).dims
    cut = [d for d, over in enumerate(before) if {*over} & {*axes}]
    ordered = tuple([a for a in before[cut[0]] if a in axes])
    result = _sliced_more(eqn, scene, _without_slices(eqn, scene, axes), ordered)
    if len(cut) > 1 or {*result.dims[cut[0]]} & {*axes}:
        raise refuse(
            eqn,
            [f"{scene.text(atom)}; dim={eqn.params['dim']}"],
            "An all_to_all joins the parts along the one dim that they are cut along, and cuts "
            "another.",
            "Name another dim than the value is cut along now.",
        )
    return result


def _check_root(eqn: JaxprEqn, scene: Scene, axes: Axes) -> None:
    root, count = eqn.params["root"], scene.mesh.size(axes)
    if not 0 <= root < count:
        raise refuse(
            eqn,
            [f"root={root}, and {', '.join(axes)} has {count} devices"],
            "The root is a device of the group, counted from 0.",
            "Name another one.",
        )


def _broadcast(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes = axes_of_verb(eqn, scene)
    _check_kinds(
        eqn,
        scene,
        axes,
        ("Local",),
        "mw.all_reduce what is Unreduced, mw.all_gather what is Sliced; a Replicated value is the "
        "same on all devices already.",
    )
    _check_root(eqn, scene, axes)
    return scene.layout(eqn.invars[0]).without(axes)


def _to_root(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes = axes_of_verb(eqn, scene)
    layout = _reduced(eqn, scene)
    _check_root(eqn, scene, axes)
    return _local(layout, axes)


def _local(layout: Layout, axes: Axes) -> Layout:
    local = tuple(sorted({*layout.local, *axes}))
    return Layout(layout.dims, layout.unreduced, layout.reduction, local)


def _sent(eqn: JaxprEqn, scene: Scene) -> Layout:
    axes = axes_of_verb(eqn, scene)
    _check_kinds(
        eqn,
        scene,
        axes,
        ("Local", "Replicated"),
        "mw.all_gather what is Sliced over the axis of the stages, mw.all_reduce what is "
        "Unreduced over it; over other axes it may be either.",
    )
    return _local(scene.layout(eqn.invars[0]).without(axes), axes)


def _updated(eqn: JaxprEqn, scene: Scene) -> Layout:
    target, value = eqn.invars
    before, after = scene.layout(target), scene.layout(value)
    if target not in scene.names:
        raise refuse(
            eqn,
            [f"the target, {scene.text(target)}"],
            "What is updated is an argument of the program: the next call's gets the new value.",
            "Give the argument itself as the target.",
        )
    gathers_later = not before.varying and not after.unreduced and not after.local
    if before != after and not gathers_later:
        raise refuse(
            eqn,
            [f"the target, {scene.text(target)}", f"the value, {scene.text(value)}"],
            "An argument and its next value have one layout; or the argument is Replicated and "
            "the value Sliced, to be gathered later.",
            "Change the value's layout with a verb, or give the argument another.",
        )
    return after


_LAYOUTS: Mapping[str, Callable[[JaxprEqn, Scene], Layout]] = {
    "mw_all_reduce": _reduced,
    "mw_reduce_scatter": _scattered,
    "mw_all_gather": _gathered,
    "mw_all_to_all": _exchanged,
    "mw_broadcast": _broadcast,
    "mw_reduce": _to_root,
    "mw_send": _sent,
    "mw_update": _updated,
}
