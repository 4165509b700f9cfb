"""Stages on the other axes of the mesh: data and tensor parallelism within a stage.

The whole loss function is completed once, from the hints on parameters and batch and from those
inside. That says how parameters, inputs, and what goes from stage to stage lie over the other axes.
With that given, each stage's forward and backward are planned and partitioned as any program is.

Gradients of parameters that are sums over the rows of a batch are left unreduced in each
microbatch, and reduced once for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, Literal
from meshwise._jax.branches import without_permutes
from meshwise._jax.pipelines import without_literal_results, without_names
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.ir.mesh import Axes, Mesh
from meshwise.partition.partition import partition
from meshwise.partition.ways import plan_of
from meshwise.pipeline.local import Crossing, LocalStage, make_backward
from meshwise.pipeline.stages import Cut
from meshwise.pipeline.tiles import Tiling, axes_of, tiling, whole
from meshwise.propagate.complete import complete
from meshwise.trace import make_program


@dataclass(frozen=True, eq=False)
class Placement:
    """How everything lies over the other axes of the mesh.

    `boundaries` are the values that go from each stage to the next; `deferred` the user's axes over
    which gradients of parameters are summed after the loop, and `flops` those of one microbatch,
    forward.
    """

    params: tuple[Tiling, ...]
    fed: tuple[Tiling, ...]
    boundaries: tuple[tuple[Tiling, ...], ...]
    deferred: Axes
    flops: float

    @property
    def is_split(self) -> bool:
        """Whether anything is sharded over another axis than the pipeline's."""
        tilings = (*self.params, *self.fed, *(t for b in self.boundaries for t in b))
        return any(t.axes for t in tilings)


def without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The other axes of a mesh."""
    names = [a for a in mesh.names if mesh.user_axis_of[a] != axis]
    sizes = tuple(mesh.axis_size[a] for a in names)
    return Mesh(tuple(names), sizes, tuple(pair for pair in mesh.user_axes if pair[0] != axis))


def place(
    found: Cut, mesh: Mesh, specs: Sequence[Any], paths: Sequence[str], name: str
) -> Placement:
    """Complete the loss function: how its parameters, inputs and boundaries lie.

    `mesh` has the other axes alone; `specs` are hints on its inputs (None where nothing is said),
    `paths` what messages call them.
    """
    chain = _jax.without_dead(found.chain)
    outputs = [f"boundary {i}" for i in range(len(chain.out_avals))]
    read = make_program(chain, mesh, specs, [None] * len(outputs), paths, outputs, name)
    program, rules, completion = complete(read)
    avals = [*chain.in_avals, *chain.out_avals]
    atoms = [*program.inputs, *program.outputs]
    dims = [
        ((),) * len(aval.shape) if isinstance(atom, Literal) else completion.dims[atom]
        for atom, aval in zip(atoms, avals, strict=True)
    ]
    tilings = [tiling(aval, own, mesh) for aval, own in zip(avals, dims, strict=True)]
    first = found.params
    results = len(found.stages[-1].leaving)
    inputs, rest = tilings[: len(chain.in_avals)], tilings[len(chain.in_avals) + results :]
    boundaries = []
    for stage in found.stages[:-1]:
        boundaries.append(tuple(rest[: len(stage.leaving)]))
        rest = rest[len(stage.leaving) :]
    params, fed = tuple(inputs[:first]), tuple(inputs[first + found.held :])
    names = list(mesh.sub_axes)
    passing = [*fed, *(t for boundary in boundaries for t in boundary)]
    in_params = axes_of(params, names)
    deferred = tuple(a for a in axes_of(passing, names) if a not in in_params)
    flops = sum(rule.flops for rule in rules)
    return Placement(params, fed, tuple(boundaries), deferred, flops)


def stage_key(found: Cut, number: int, placement: Placement, crossing: Crossing) -> Any:
    """Equal for stages that one partitioned stage serves, each with parameters of its own."""
    stage, is_last = found.stages[number], number == len(found.stages) - 1
    # What a `custom_vjp` says of gradients is no part of the forward program's key.
    backward = make_backward(stage.jaxpr, len(stage.params), crossing, is_last)
    return (
        crossing,
        _jax.structure_key(stage.jaxpr),
        _jax.structure_key(backward),
        tuple(placement.params[i] for i in stage.params),
        stage.held,
        tuple((i, placement.fed[i]) for i in stage.fed),
        placement.boundaries[max(number - 1, 0) : number + 1],
        (number == 0, is_last),
    )


def partitioned_stage(
    found: Cut, number: int, placement: Placement, crossing: Crossing, mesh: Mesh
) -> LocalStage:
    """A stage partitioned over a mesh, which has the other axes alone."""
    stage, is_last = found.stages[number], number == len(found.stages) - 1
    params = [placement.params[i] for i in stage.params]
    held = [whole(t) for t in stage.jaxpr.in_avals[len(params) :][: len(stage.held)]]
    fed = [placement.fed[i] for i in stage.fed]
    arriving = placement.boundaries[number - 1] if number else ()
    leaving = placement.boundaries[number] if not is_last else tuple(map(whole, stage.leaving))
    takes = [*params, *held, *fed, *arriving]
    own = _named(_without_known_hints(stage.jaxpr, takes), len(fed) + len(arriving))
    forward = None if is_last else _plan(own, takes, leaving, mesh)
    jaxpr = make_backward(own, len(params), crossing, is_last)
    gradients = [] if is_last else list(compress(leaving, crossing.leaving))
    back = list(compress(arriving, crossing.arriving))
    gives = [*(leaving if is_last else ()), *params, *back]
    terms = [mesh.refine(placement.deferred)] * (len(gives) - len(back))
    backward = _plan(jaxpr, [*takes, *gradients], gives, mesh, terms)
    ahead = _emitted(forward) if forward else None
    return LocalStage(ahead, _emitted(backward), stage.params, stage.held, stage.fed, crossing)


def _without_known_hints(jaxpr: ClosedJaxpr, takes: Sequence[Tiling]) -> ClosedJaxpr:
    """A stage without hints that say of what it takes how that lies anyway.

    The gradient of a hinted value is hinted too, and could not be left unreduced.
    """
    inner = jaxpr.jaxpr
    lies = dict(zip(inner.invars, takes, strict=True))
    same: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    eqns = []
    for eqn in inner.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive is _jax.hint_p and not isinstance(operands[0], Literal):
            given = lies.get(operands[0])
            said, rank = eqn.params["sharding"], len(eqn.outvars[0].aval.shape)
            if given and _jax.axes_of(given.spec, rank) == _jax.axes_of(said, rank):
                same[eqn.outvars[0]] = operands[0]
                continue
        eqns.append(eqn.replace(invars=operands))
    outs = [read(a) for a in inner.outvars]
    return _jax.close_jaxpr(inner.constvars, inner.invars, outs, eqns, jaxpr.consts)


def _named(jaxpr: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """A stage whose last inputs are values that it makes: they lie as what is done with them."""
    run, first = _jax.jaxpr_as_fun(jaxpr), len(jaxpr.in_avals) - count

    def named(*args: Any) -> Any:
        return run(*args[:first], *(checkpoint_name(x, "arriving") for x in args[first:]))

    return jax.make_jaxpr(named)(*jaxpr.in_avals)


def _plan(
    jaxpr: ClosedJaxpr,
    takes: Sequence[Tiling],
    gives: Sequence[Tiling],
    mesh: Mesh,
    terms: Sequence[Axes] = (),
) -> Plan:
    """The plan of a stage, given how what it takes and gives lies.

    The first results are left as terms of sums over the axes `terms`.
    """
    ins, outs = ([t.spec for t in tilings] for tilings in (takes, gives))
    names = [f"input {i}" for i in range(len(ins))], [f"result {i}" for i in range(len(outs))]
    jaxpr = without_literal_results(_jax.without_dead(jaxpr))
    program = make_program(jaxpr, mesh, ins, outs, *names, "stage")
    hints = list(program.out_hints)
    for i, axes in enumerate(terms):
        hint = hints[i]
        assert hint is not None
        hints[i] = replace(hint, unreduced=axes)
    return plan_of(complete(replace(program, out_hints=tuple(hints))), _figures(mesh))


def _emitted(plan: Plan) -> ClosedJaxpr:
    """The per-device program, run in a branch; its collectives go by their lines alone."""
    mesh = plan.program.mesh
    local = partition(plan).jaxpr
    return without_names(without_permutes(local, mesh.axis_size))


def _figures(mesh: Mesh) -> Hardware:
    """`GENERIC` where what is permuted is gathered, over as many devices as an axis can have."""
    most = max([2, *(mesh.size(axes) for axes in mesh.sub_axes.values())])
    factors = dict(GENERIC.byte_factors)
    dear = {"ppermute": factors["ppermute"] * (most - 1)}
    return replace(GENERIC, byte_factors=tuple((factors | dear).items()))
