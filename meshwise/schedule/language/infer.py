"""The layout of every value of a program, by the type rules of CoCoNeT's language.

One pass over the flat jaxpr of whole shapes. What an operator does to the dims is read from its
factor rule: factors that operands are sliced over are sliced in all of them, a replicated operand
is cut; a factor that is summed leaves the terms of a sum, Unreduced. What a rule cannot say is an
error with a way out, never a guess.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn
from meshwise.ir.factors import (
    FactorRule,
    Strategy,
    factor_axes,
    fits,
    operand_sharding,
    result_sharding,
)
from meshwise.ir.mesh import Axes
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import DimAxes, Reduction
from meshwise.rules.registry import REGISTRY, OpRule
from meshwise.schedule.language.exchange_layouts import layout_of_verb
from meshwise.schedule.language.scene import Scene, refuse, shown
from meshwise.schedule.language.verbs import VERBS
from meshwise.schedule.layouts import Layout, local_over, replicated
from meshwise.schedule.tiling import sends


@dataclass(frozen=True, eq=False)
class Typed:
    """An equation with how it is computed: split by a strategy, or a verb, which has no rule.

    `cuts` are, for each operand, the dims along which it is whole and cut first.
    """

    eqn: JaxprEqn
    rule: OpRule | None
    strategy: Strategy
    cuts: tuple[DimAxes, ...]
    results: tuple[Layout, ...]


def infer(closed: ClosedJaxpr, inputs: Sequence[Layout], scene: Scene) -> list[Typed]:
    """Every equation with its layouts; the values' go to the scene. Raises `LayoutError`."""
    jaxpr = closed.jaxpr
    scene.layouts.update(zip(jaxpr.invars, inputs, strict=True))
    scene.layouts.update({v: replicated(len(shape_of(v))) for v in jaxpr.constvars})
    found = []
    for eqn in jaxpr.eqns:
        typed = _typed(eqn, scene)
        found.append(typed)
        scene.layouts.update(zip(eqn.outvars, typed.results, strict=True))
        scene.makers.update(dict.fromkeys(eqn.outvars, eqn))
    return found


def _typed(eqn: JaxprEqn, scene: Scene) -> Typed:
    operands = [scene.layout(a) for a in eqn.invars]
    if eqn.primitive in VERBS:
        layout = layout_of_verb(eqn, scene)
        return Typed(eqn, None, Strategy(()), (), (layout,))
    if eqn.primitive is _jax.hint_p:
        raise refuse(
            eqn,
            ["a sharding constraint"],
            "In a program layouts are said of arguments, and follow for all other values.",
            "Leave it out; use a verb (mw.all_gather, mw.all_to_all, ...) where a layout changes.",
        )
    _check_bodies(eqn)
    _check_along_each_axis(eqn, scene)
    rule = REGISTRY.describe(eqn)
    local = sorted({a for o in operands for a in o.local})
    if rule.opaque:
        _check_whole(eqn, operands, scene)
        results = tuple([local_over(len(shape_of(v)), local) for v in eqn.outvars])
        return Typed(eqn, rule, Strategy(((),) * len(rule.factors.sizes)), (), results)
    strategy = _strategy(eqn, rule, operands, scene)
    cuts = []
    for i, operand in enumerate(operands):
        wanted = operand_sharding(rule.factors, strategy, i).dims
        cuts.append(tuple([() if h else w for h, w in zip(operand.dims, wanted, strict=True)]))
    results = []
    for i in range(len(eqn.outvars)):
        sharding = result_sharding(rule.factors, strategy, i)
        results.append(Layout(sharding.dims, sharding.unreduced, sharding.reduction, tuple(local)))
    return Typed(eqn, rule, strategy, tuple(cuts), tuple(results))


def _check_along_each_axis(eqn: JaxprEqn, scene: Scene) -> None:
    """Along one axis operands are of one kind, or replicated."""
    for axis in scene.mesh.names:
        kinds = {scene.along(axis, a) for a in eqn.invars} - {"Replicated"}
        if len(kinds) < 2:
            continue
        offenders = [scene.text(a) for a in eqn.invars if scene.along(axis, a) != "Replicated"]
        if kinds == {"Local", "Sliced"}:
            rule = (
                f"Over {axis} one operand is a device's own values, the other its part of a whole: "
                "together they are neither."
            )
            way_out = "mw.all_reduce or mw.reduce_scatter the Local one, or mw.all_gather the rest."
        else:
            rule = (
                f"Over {axis} one operand is a term of a sum, which means nothing until the terms "
                f"are added; the other is {(kinds - {'Unreduced'}).pop()}."
            )
            way_out = "mw.all_reduce (or mw.reduce_scatter) the Unreduced one first."
        raise refuse(eqn, offenders, rule, way_out)


def _check_bodies(eqn: JaxprEqn) -> None:
    """No verbs in the bodies of loops and conditionals."""
    inside = next(_verbs_inside(eqn), None)
    if inside is not None:
        raise refuse(
            eqn,
            [f"{shown(inside)} at {_jax.source_summary(inside)} is in its body"],
            "Verbs stand in the program itself, not in bodies of loops and conditionals.",
            "Unroll the loop; or write the function for one device, and read it with "
            "mw.SpmdProgram.from_shard_map.",
        )


def _check_whole(eqn: JaxprEqn, operands: Sequence[Layout], scene: Scene) -> None:
    """What cannot be split reads whole values."""
    offenders = [
        scene.text(a) for a, o in zip(eqn.invars, operands, strict=True) if o.sliced or o.unreduced
    ]
    if not offenders:
        return
    what = "loop or conditional" if _jax.has_bodies(eqn) else "operator without a rule"
    raise refuse(
        eqn,
        offenders,
        f"A {what} is computed by each device as it is, on values that are Replicated or Local.",
        "mw.all_gather what is Sliced and mw.all_reduce what is Unreduced first; or write the "
        "function for one device, and read it with mw.SpmdProgram.from_shard_map.",
    )


def _verbs_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, _jax.ClosedJaxpr | _jax.Jaxpr):
                yield from verbs_of(item)


def verbs_of(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Every verb of a jaxpr, those in bodies and calls too."""
    for eqn in _jax.opened(jaxpr).eqns:
        if eqn.primitive in VERBS:
            yield eqn
        yield from _verbs_inside(eqn)


def _strategy(eqn: JaxprEqn, rule: OpRule, operands: Sequence[Layout], scene: Scene) -> Strategy:
    """How an operator is split by what its operands are sliced over."""
    factors = rule.factors
    found: dict[int, Axes] = {}
    for dims, layout in zip(factors.operands, operands, strict=True):
        for factor, axes in factor_axes(dims, factors, layout.dims, scene.mesh).items():
            if found.setdefault(factor, axes) != axes:
                raise _mixed(eqn, scene)
    used = [a for axes in found.values() for a in axes]
    if len(used) != len(set(used)):
        raise _mixed(eqn, scene)
    carried = _carried(eqn, rule, operands, scene)
    strategy = Strategy(tuple([found.get(f, ()) for f in range(len(factors.sizes))]), carried)
    kept = [operand_sharding(factors, strategy, i).dims for i in range(len(operands))]
    is_kept = all(
        not axes or axes == wanted
        for layout, dims in zip(operands, kept, strict=True)
        for axes, wanted in zip(layout.dims, dims, strict=True)
    )
    if not is_kept or sends(eqn, rule, strategy, scene.mesh):
        raise _needs_whole(eqn, factors, operands, kept, scene)
    if not fits(factors, strategy, scene.mesh):
        raise _mixed(eqn, scene)
    return strategy


def _mixed(eqn: JaxprEqn, scene: Scene) -> Exception:
    return refuse(
        eqn,
        [scene.text(a) for a in eqn.invars if scene.layout(a).sliced],
        "A device can compute with its parts only where they belong together: the operator pairs "
        "them along one dim, cut over the same axes.",
        "mw.all_gather one of them, or mw.all_to_all it to be cut along the dim that matches.",
    )


def _needs_whole(
    eqn: JaxprEqn,
    factors: FactorRule,
    operands: Sequence[Layout],
    kept: Sequence[DimAxes],
    scene: Scene,
) -> Exception:
    offenders, sizes = [], set[int]()
    for atom, layout, wanted, of_dims in zip(
        eqn.invars, operands, kept, factors.operands, strict=True
    ):
        for dim, axes in enumerate(layout.dims):
            permuted = any(f in factors.permuted for f in of_dims[dim])
            if axes and (permuted or wanted[dim] != axes):
                size = shape_of(atom)[dim]
                sizes.add(size)
                offenders.append(f"{scene.text(atom)}; dim {dim} of {size} is needed whole")
    if sizes == {1}:
        return refuse(
            eqn,
            offenders,
            "A dim of one element has no parts: the first device has all of it, and the others "
            "nothing to compute with. Only verbs take it sliced.",
            "mw.all_gather the value first, or slice along another dim (mw.all_to_all).",
        )
    return refuse(
        eqn,
        offenders,
        "The operator mixes elements along that dim, or joins it with others so that parts would "
        "not stay parts: a device needs more than its own.",
        "mw.all_gather the value first, or slice along another dim (mw.all_to_all).",
    )


def _carried(eqn: JaxprEqn, rule: OpRule, operands: Sequence[Layout], scene: Scene) -> Axes:
    """The axes over which terms pass as terms; an error where the operator is not linear."""
    carriers = {i for i, o in enumerate(operands) if o.unreduced}
    if not carriers:
        return ()
    kinds = {(operands[i].unreduced, operands[i].reduction) for i in carriers}
    axes, reduction = next(iter(kinds))
    linear = any({*group} == carriers for group in rule.linear)
    if len(kinds) == 1 and reduction is Reduction.SUM and linear:
        return axes
    if {r for _, r in kinds} != {Reduction.SUM}:
        why = f"Terms of another operator than a sum ({reduction.value}) are only joined."
    elif len(kinds) > 1:
        why = "Terms are added where they are terms over the same axes."
    else:
        why = "What this computes of each device's term alone is no term of what is asked for."
    raise refuse(
        eqn,
        [scene.text(eqn.invars[i]) for i in sorted(carriers)],
        f"An Unreduced value passes as terms through what is linear in it. {why}",
        "Join the terms first: mw.all_reduce(x, op), or mw.reduce_scatter to go on with a part. A "
        "norm of a slice is the square root of the all_reduce of its sum of squares.",
    )
