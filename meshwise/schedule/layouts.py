"""How each value of a per-device program lies along each mesh axis: its layout (CoCoNeT, 3.1).

Along an axis a value is

- *replicated*: the same on every device;
- *sliced(dim)*: each device has a part of it, cut along a dim, in the order of the devices;
- *unreduced(op)*: each device has a term, whose sum (maximum, ...) is the value;
- *local*: each device has its own, and nothing is known of how they belong together.

CoCoNeT has no word for unreduced and says local. Layouts are found by abstract interpretation, one
pass over the equations: what an operator does to the dims is read from its factor rule, the same
that completion and partitioning read. Only *replicated* is a proof that moves rest on; the other
three are what is known, and local is always a safe answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.ir.collectives import is_collective
from meshwise.ir.mesh import Axes
from meshwise.ir.operators import DRAWING, is_among
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import DimAxes, Reduction, Sharding
from meshwise.rules.registry import REGISTRY, OpRule
from meshwise.schedule.slices import Positions


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes that each dim is sliced over, those over which it is unreduced, those it is local on."""

    dims: DimAxes
    unreduced: Axes = ()
    reduction: Reduction = Reduction.SUM
    local: Axes = ()

    def __post_init__(self) -> None:
        """An axis says one thing."""
        used = [a for axes in self.dims for a in axes] + [*self.unreduced, *self.local]
        assert len(used) == len(set(used)), self

    @property
    def varying(self) -> frozenset[str]:
        """The axes along which the value is not known to be replicated."""
        return frozenset(a for axes in self.dims for a in axes) | {*self.unreduced, *self.local}

    @property
    def sliced(self) -> frozenset[str]:
        """The axes that some dim is sliced over."""
        return frozenset(a for axes in self.dims for a in axes)

    def without(self, axes: Sequence[str]) -> "Layout":
        """The layout of a value that is replicated along some axes."""
        gone = frozenset(axes)
        kept = tuple([a for a in self.unreduced if a not in gone])
        return Layout(
            tuple([tuple([a for a in dim if a not in gone]) for dim in self.dims]),
            kept,
            self.reduction if kept else Reduction.SUM,
            tuple([a for a in self.local if a not in gone]),
        )

    def __str__(self) -> str:
        """`Replicated`, `Sliced(0) over data, Local over model`."""
        said = [f"Sliced({d}) over {', '.join(axes)}" for d, axes in enumerate(self.dims) if axes]
        if self.unreduced:
            said.append(f'Unreduced("{self.reduction.value}") over {", ".join(self.unreduced)}')
        if self.local:
            said.append(f"Local over {', '.join(self.local)}")
        return ", ".join(said) or "Replicated"


def replicated(rank: int) -> Layout:
    """The layout of a value that is the same on all devices."""
    return Layout(((),) * rank)


def local_over(rank: int, axes: Sequence[str]) -> Layout:
    """The layout of a value of which nothing is known along some axes."""
    return Layout(((),) * rank, local=tuple(sorted(axes)))


def of_sharding(sharding: Sharding) -> Layout:
    """The layout of an argument or result that lies in a sharding."""
    return Layout(sharding.dims, sharding.unreduced, sharding.reduction)


@dataclass(frozen=True, eq=False)
class Known:
    """Layouts that equations gave their results, to be looked up when they are asked again.

    By the equation, which is kept so that it stays the one: layouts of its operands and results.
    """

    results: dict[int, tuple[JaxprEqn, list[Layout], list[Layout]]] = field(default_factory=dict)


def layouts_of(program: PerDeviceProgram, known: Known | None = None) -> dict[Var, Layout]:
    """The layout of every value of a per-device program (those outside of bodies)."""
    found: dict[Var, Layout] = {}
    inputs = [of_sharding(s) for s in program.in_shardings]
    _interpret(program.jaxpr, inputs, program.mesh.axis_size, found, known)
    return found


def _interpret(
    closed: Any,
    inputs: Sequence[Layout],
    sizes: Mapping[str, int],
    found: dict[Var, Layout],
    known: Known | None = None,
) -> list[Layout]:
    """Layouts of the results of a jaxpr, open or closed; those of its values go to `found`."""
    jaxpr = _jax.opened(closed)
    positions = Positions(sizes)
    for var in jaxpr.constvars:
        found[var] = replicated(len(shape_of(var)))
    for var, layout in zip(jaxpr.invars, inputs, strict=True):
        rank = len(shape_of(var))
        found[var] = layout if len(layout.dims) == rank else _flattened(layout, rank)

    def read(atom: Any) -> Layout:
        return replicated(len(shape_of(atom))) if isinstance(atom, Literal) else found[atom]

    for eqn in jaxpr.eqns:
        positions.read(eqn)
        operands = [read(a) for a in eqn.invars]
        before = known.results.get(id(eqn)) if known else None
        if before is not None and before[1] == operands:
            results = before[2]
        else:
            results = _of_equation(eqn, operands, sizes, positions)
            if known:
                known.results[id(eqn)] = eqn, operands, results
        found.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _flattened(layout: Layout, rank: int) -> Layout:
    return local_over(rank, tuple(layout.varying))


def _of_equation(
    eqn: JaxprEqn, operands: Sequence[Layout], sizes: Mapping[str, int], positions: Positions
) -> list[Layout]:
    name = eqn.primitive.name
    if name in _COLLECTIVES and eqn.params.get("axis_index_groups") is None:
        axes = named_axes(eqn)
        return [_COLLECTIVES[name](eqn, o, axes) for o in operands[: len(eqn.outvars)]]
    if name == "axis_index":
        return [local_over(0, named_axes(eqn))]
    ranks = [len(shape_of(v)) for v in eqn.outvars]
    if is_collective(eqn):
        varying = {*named_axes(eqn)}.union(*(o.varying for o in operands))
        return [local_over(rank, tuple(varying)) for rank in ranks]
    body = _jax.call_body(eqn)
    if body is not None or eqn.primitive is _jax.mw_kernel_p:
        inner = eqn.params["jaxpr"] if body is None else body.jaxpr
        return _interpret(inner, operands, sizes, {})
    if name in _BODIES:
        return _BODIES[name](eqn, operands, sizes)
    slice_ = positions.slice_of(eqn)
    if slice_ is not None and not {*slice_.axes} & operands[0].varying:
        return [_sliced_more(operands[0], slice_.dim, slice_.axes)]
    rule = REGISTRY.describe(eqn)
    asks = rule.opaque and _jax.has_jaxpr(eqn)  # for the device's number, perhaps
    if asks or is_among(eqn, DRAWING) or _jax.has_effects(eqn):
        return [local_over(rank, tuple(sizes)) for rank in ranks]
    return by_rule(rule, operands, ranks)


def _sliced_more(layout: Layout, dim: int, axes: Axes) -> Layout:
    dims = list(layout.dims)
    dims[dim] = (*dims[dim], *axes)
    return Layout(tuple(dims), layout.unreduced, layout.reduction, layout.local)


def by_rule(rule: OpRule, operands: Sequence[Layout], ranks: Sequence[int]) -> list[Layout]:
    """Layouts of an operator's results by its factors; local along axes where these say nothing.

    A factor sliced in one operand and whole in another is taken for sliced: the whole operand is
    what belongs to the tile. A reduction factor that is sliced leaves a term of the reduction.
    """
    factors = rule.factors
    axes_of: dict[int, Axes] = {}
    lost: set[str] = set()
    terms: set[str] = set()
    for position, (layout, dims) in enumerate(zip(operands, factors.operands, strict=True)):
        lost.update(layout.local)
        if layout.unreduced:
            kept = _passes(rule, operands, position)
            (terms if kept else lost).update(layout.unreduced)
        for of_dim, sliced in zip(dims, layout.dims, strict=True):
            if not sliced:
                continue
            if len(of_dim) == 1 and axes_of.setdefault(of_dim[0], sliced) == sliced:
                continue
            lost.update(sliced)
    for factor in (*factors.whole, *factors.permuted):
        lost.update(axes_of.pop(factor, ()))
    used = [a for axes in axes_of.values() for a in axes]
    lost.update(a for a in used if used.count(a) > 1 or a in terms)
    reduced = {a: r for f, r in factors.reductions for a in axes_of.get(f, ()) if a not in lost}
    operators = set(reduced.values()) | ({Reduction.SUM} if terms - lost else set())
    if len(operators) > 1:
        lost.update(reduced, terms)
    unreduced = tuple(sorted(({*reduced} | terms) - lost))
    operator = operators.pop() if len(operators) == 1 and unreduced else Reduction.SUM
    varying = {*lost, *used, *terms}
    results = []
    for of_dims, rank in zip(factors.results, ranks, strict=True):
        if len(of_dims) != rank:
            results.append(local_over(rank, tuple(varying)))
            continue
        dims = tuple([_kept(axes_of, of_dim, lost) for of_dim in of_dims])
        rest = varying.difference(unreduced, *dims)
        results.append(Layout(dims, unreduced, operator, tuple(sorted(rest))))
    return results


def _kept(axes_of: Mapping[int, Axes], of_dim: Sequence[int], lost: set[str]) -> Axes:
    axes = axes_of.get(of_dim[0], ()) if of_dim else ()
    return () if lost.intersection(axes) else axes


def _passes(rule: OpRule, operands: Sequence[Layout], position: int) -> bool:
    """Whether a sum's terms pass through an operator as terms."""
    layout = operands[position]
    if layout.reduction is not Reduction.SUM:
        return False
    carried = {i for i, o in enumerate(operands) if o.unreduced == layout.unreduced}
    others = {a for i, o in enumerate(operands) if i not in carried for a in o.varying}
    is_linear = any({*group} == carried for group in rule.linear_as_is)
    return is_linear and not others & {*layout.unreduced}


def _reduced(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    """A psum's result; one that also adds up along dims of the local array has fewer of these."""
    del eqn
    return operand.without(axes)


def _gathered(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    layout = operand.without(axes)
    if eqn.params.get("tiled", True):
        return layout
    dims = list(layout.dims)
    dims.insert(eqn.params["all_gather_dimension"], ())
    return Layout(tuple(dims), layout.unreduced, layout.reduction, layout.local)


def _scattered(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    layout = operand.without(axes)
    dim = eqn.params["scatter_dimension"]
    if not eqn.params.get("tiled", True):
        dims = layout.dims[:dim] + layout.dims[dim + 1 :]
        local = (*layout.local, *layout.dims[dim], *axes)
        return Layout(dims, layout.unreduced, layout.reduction, local)
    return _sliced_more(layout, dim, axes)


def _exchanged(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    layout = operand.without(axes)
    split, joined = eqn.params["split_axis"], eqn.params["concat_axis"]
    if not eqn.params.get("tiled", True):  # one dim goes, and another one comes
        return local_over(len(operand.dims), tuple(operand.varying | {*axes}))
    if operand.dims[joined][-len(axes) :] == axes:
        return _sliced_more(layout, split, axes)
    return Layout(layout.dims, layout.unreduced, layout.reduction, (*layout.local, *axes))


def _moved(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    """What neighbours hold: each device has another one's."""
    del eqn
    layout = operand.without(axes)
    return Layout(layout.dims, layout.unreduced, layout.reduction, (*layout.local, *axes))


def _same(eqn: JaxprEqn, operand: Layout, axes: Axes) -> Layout:
    """A cast between JAX's own types of device variance."""
    del eqn, axes
    return operand


_COLLECTIVES: Mapping[str, Callable[[JaxprEqn, Layout, Axes], Layout]] = {
    "psum": _reduced,
    "psum_invariant": _reduced,
    "pmax": _reduced,
    "pmin": _reduced,
    "all_gather": _gathered,
    "all_gather_invariant": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "ppermute": _moved,
    "pvary": _same,
}


def _of_scan(eqn: JaxprEqn, operands: Sequence[Layout], sizes: Mapping[str, int]) -> list[Layout]:
    return in_scan(eqn, operands, sizes, {})


def in_scan(
    eqn: JaxprEqn, operands: Sequence[Layout], sizes: Mapping[str, int], found: dict[Var, Layout]
) -> list[Layout]:
    """Layouts of a scan's results, in all steps; those of its body's values go to `found`."""
    first, carried = _jax.scan_counts(eqn)
    consts, carry = list(operands[:first]), list(operands[first : first + carried])
    rows = [_row(o) for o in operands[first + carried :]]
    body = eqn.params["jaxpr"]
    while True:
        outs = _interpret(body, [*consts, *carry, *rows], sizes, found)
        joined = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*carry, *[_stack(o) for o in outs[carried:]]]
        carry = joined


def _row(layout: Layout) -> Layout:
    if layout.dims and layout.dims[0]:
        return local_over(len(layout.dims) - 1, tuple(layout.varying))
    return Layout(layout.dims[1:], layout.unreduced, layout.reduction, layout.local)


def _stack(layout: Layout) -> Layout:
    return Layout(((), *layout.dims), layout.unreduced, layout.reduction, layout.local)


def _of_while(eqn: JaxprEqn, operands: Sequence[Layout], sizes: Mapping[str, int]) -> list[Layout]:
    params = eqn.params
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    test_consts, body_consts = operands[:tests], operands[tests : tests + bodies]
    carry = list(operands[tests + bodies :])
    while True:
        (test,) = _interpret(params["cond_jaxpr"], [*test_consts, *carry], sizes, {})
        outs = _interpret(params["body_jaxpr"], [*body_consts, *carry], sizes, {})
        joined = [_varied(join(a, b), test) for a, b in zip(carry, outs, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _of_cond(eqn: JaxprEqn, operands: Sequence[Layout], sizes: Mapping[str, int]) -> list[Layout]:
    outs: list[Layout] | None = None
    for branch in eqn.params["branches"]:
        found = _interpret(branch, operands[1:], sizes, {})
        outs = found if outs is None else [join(a, b) for a, b in zip(outs, found, strict=True)]
    return [_varied(o, operands[0]) for o in outs or ()]


def _varied(layout: Layout, by: Layout) -> Layout:
    """What is chosen by a value that varies along axes is local along these."""
    if not by.varying:
        return layout
    kept = layout.without(tuple(by.varying))
    local = tuple(sorted({*kept.local, *by.varying}))
    return Layout(kept.dims, kept.unreduced, kept.reduction, local)


def join(a: Layout, b: Layout) -> Layout:
    """What is known of a value that has one of two layouts; local along axes where they differ."""
    if a == b:
        return a
    said = [{x: _said(layout, x) for x in layout.varying} for layout in (a, b)]
    differ = [x for x in a.varying | b.varying if said[0].get(x) != said[1].get(x)]
    kept = a.without(differ)
    local = tuple(sorted({*kept.local, *differ}))
    return Layout(kept.dims, kept.unreduced, kept.reduction, local)


def _said(layout: Layout, axis: str) -> Any:
    """What a layout says along one axis."""
    if axis in layout.local:
        return "local"
    if axis in layout.unreduced:
        return layout.reduction
    return next((d, axes) for d, axes in enumerate(layout.dims) if axis in axes)


_BODIES: Mapping[str, Callable[[JaxprEqn, Sequence[Layout], Mapping[str, int]], list[Layout]]] = {
    "scan": _of_scan,
    "while": _of_while,
    "cond": _of_cond,
}
