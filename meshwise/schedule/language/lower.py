"""A program with layouts as what every device runs: a per-device program.

Each equation runs on this device's part of its operands, as in any partitioned program: a
replicated operand that meets a sliced one is cut first, padding is masked where a sum would see it.
Verbs are the only collectives.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, Literal, Var
from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.per_device import PerDeviceProgram, Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import DimAxes, Sharding, local_shape
from meshwise.partition.padding import mask_operands
from meshwise.rules.registry import LocalContext
from meshwise.schedule.language.exchange_layouts import axes_of_verb
from meshwise.schedule.language.exchanges import Exchange, run_verb
from meshwise.schedule.language.infer import Typed, infer
from meshwise.schedule.language.scene import Scene, shown
from meshwise.schedule.language.specs import Boundary
from meshwise.schedule.language.verbs import VERBS, all_gather_p, update_p
from meshwise.schedule.layouts import Layout
from meshwise.schedule.tidy import tidy
from meshwise.schedule.tiling import cut
from meshwise.schedule.view import View


@dataclass(frozen=True, eq=False)
class Lowered:
    """A per-device program, its states, and how its results lie.

    `states` are pairs of positions: of an argument, and of the result that is its next value.
    """

    per_device: PerDeviceProgram
    states: tuple[tuple[int, int], ...]
    outs: tuple[Boundary, ...]
    typed: tuple[Typed, ...]


def lower(closed: ClosedJaxpr, ins: Sequence[Boundary], scene: Scene, mesh: Mesh) -> Lowered:
    """The per-device program of a flat jaxpr of whole shapes, its arguments lying as said.

    `mesh` are the axes of more than one device. Raises `LayoutError`.
    """
    typed = infer(closed, [b.layout for b in ins], scene)
    states = _states(closed)
    owners = {result: ins[argument].own for argument, result in states}
    outs = [
        _out_boundary(scene.layout(atom), owners.get(i), scene)
        for i, atom in enumerate(closed.jaxpr.outvars)
    ]
    reasons: list[Reason] = []

    def per_device(*arrays: Any) -> list[Any]:
        return _run(closed, typed, ins, outs, scene, mesh, arrays, reasons)

    in_shardings = [_sharding(b, mesh) for b in ins]
    in_types = [_outer_type(v, b, scene) for v, b in zip(closed.jaxpr.invars, ins, strict=True)]
    local = [
        jax.ShapeDtypeStruct(local_shape(t.shape, s, mesh), t.dtype, weak_type=t.weak_type)
        for t, s in zip(in_types, in_shardings, strict=True)
    ]
    jaxpr = _jax.make_jaxpr_over_axes(per_device, mesh.named_sizes, local)
    program = PerDeviceProgram(
        jaxpr=jaxpr,
        mesh=mesh,
        in_shardings=tuple(in_shardings),
        out_shardings=tuple([_sharding(b, mesh) for b in outs]),
        in_types=tuple(map(_jax.array_type, in_types)),
        out_types=tuple(
            [
                _jax.array_type(_outer_type(v, b, scene))
                for v, b in zip(closed.jaxpr.outvars, outs, strict=True)
            ]
        ),
        reasons=tuple(reasons),
    )
    return Lowered(tidy(View(program)).program, states, tuple(outs), tuple(typed))


def _out_boundary(layout: Layout, owner: Axes | None, scene: Scene) -> Boundary:
    """A result that is each device's own has a leading dim, as the argument it is the next of."""
    own = {*layout.local, *layout.unreduced}
    if not own:
        return Boundary(layout)
    ordered = owner if owner and {*owner} == own else [a for a in scene.mesh.names if a in own]
    return Boundary(layout, tuple(ordered))


def _sharding(boundary: Boundary, mesh: Mesh) -> Sharding:
    """How an array lies outside of the program."""
    dims = _dims(boundary.layout.dims, mesh)
    return Sharding(dims if boundary.own is None else (_kept(boundary.own, mesh), *dims))


def _kept(axes: Axes, mesh: Mesh) -> Axes:
    return tuple([a for a in axes if a in mesh.axis_size])


def _dims(dims: DimAxes, mesh: Mesh) -> DimAxes:
    return tuple([_kept(axes, mesh) for axes in dims])


def _outer_type(atom: Any, boundary: Boundary, scene: Scene) -> jax.ShapeDtypeStruct:
    """The type of an argument or result outside of the program."""
    shape = shape_of(atom)
    if boundary.own is not None:
        shape = (scene.mesh.size(boundary.own), *shape)
    aval = atom.aval
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _run(
    closed: ClosedJaxpr,
    typed: Sequence[Typed],
    ins: Sequence[Boundary],
    outs: Sequence[Boundary],
    scene: Scene,
    mesh: Mesh,
    arrays: Sequence[Any],
    reasons: list[Reason],
) -> list[Any]:
    """The program on local arrays."""
    jaxpr = closed.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for var, boundary, array in zip(jaxpr.invars, ins, arrays, strict=True):
        env[var] = array if boundary.own is None else lax.squeeze(array, (0,))

    read = partial(_jax.value_in, env)

    parts: dict[tuple[Any, Sharding], Any] = {}
    for step in typed:
        operands = [read(a) for a in step.eqn.invars]
        with _jax.at_source(step.eqn):
            if step.eqn.primitive in VERBS:
                results = [_exchange(step, scene, mesh, operands, reasons)]
            else:
                results = _compute(step, mesh, operands, parts)
        env.update(zip(step.eqn.outvars, results, strict=True))
    return [
        jnp.asarray(read(a)) if b.own is None else lax.expand_dims(read(a), (0,))
        for a, b in zip(jaxpr.outvars, outs, strict=True)
    ]


def _exchange(
    step: Typed, scene: Scene, mesh: Mesh, operands: Sequence[Any], reasons: list[Reason]
) -> Any:
    eqn = step.eqn
    if eqn.primitive is update_p:
        return operands[1]
    before = scene.layout(eqn.invars[0])
    axes = _kept(axes_of_verb(eqn, scene), mesh)
    shape = shape_of(eqn.outvars[0])
    sides = [_over(layout, mesh) for layout in (before, step.results[0])]
    exchange = Exchange(eqn.params, axes, sides[0], sides[1], shape, mesh)
    with ExitStack() as scopes:
        if axes:
            line = _jax.source_summary(eqn)
            scopes.enter_context(jax.named_scope(reason_scope(len(reasons))))
            reasons.append(Reason(f"{shown(eqn)} of a value that is {before}", line))
        return run_verb(eqn.primitive.name, exchange, operands[0])


def _over(layout: Layout, mesh: Mesh) -> Layout:
    """A layout over the axes of more than one device."""
    gone = [a for a in layout.varying if a not in mesh.axis_size]
    return layout.without(gone) if gone else layout


def _compute(
    step: Typed,
    mesh: Mesh,
    operands: Sequence[Any],
    made: dict[tuple[Any, Sharding], Any],
) -> Sequence[Any]:
    """One equation on this device's part of its operands; what is cut is cut once (`made`)."""
    eqn, rule = step.eqn, step.rule
    assert rule is not None, eqn
    if rule.opaque:
        return _jax.bind(_jax.without_hints(eqn), operands)
    parts = []
    for atom, array, dims in zip(eqn.invars, operands, step.cuts, strict=True):
        tile = Sharding(_dims(dims, mesh))
        if tile.used_axes and (atom, tile) not in made:
            made[atom, tile] = cut(array, tile, mesh)
        parts.append(made[atom, tile] if tile.used_axes else array)
    strategy = Strategy(_dims(step.strategy.axes, mesh), _kept(step.strategy.carried, mesh))
    context = LocalContext(eqn, rule.factors, strategy, mesh)
    parts = mask_operands(rule, context, parts)
    return rule.local(context, *parts) if rule.local else _jax.bind(eqn, parts)


def _states(closed: ClosedJaxpr) -> tuple[tuple[int, int], ...]:
    """The arguments that are updated, and the results that are their next values."""
    jaxpr = closed.jaxpr
    positions: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    argument: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is update_p:
            argument[eqn.outvars[0]] = positions[eqn.invars[0]]
        elif eqn.primitive is all_gather_p and eqn.invars[0] in argument:
            argument[eqn.outvars[0]] = argument[eqn.invars[0]]
    found = [
        (argument[atom], i)
        for i, atom in enumerate(jaxpr.outvars)
        if not isinstance(atom, Literal) and atom in argument
    ]
    return tuple(found)
