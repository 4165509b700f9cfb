"""What is fused as one Pallas kernel for TPUs: read off the equations, whatever they compute.

A reduce_scatter, computations and all_gathers are a FusedAllReduce: a ring that adds up, computes
on the chunk it has then, and gathers (CoCoNeT section 5.2). A matrix product that feeds the
reduce_scatter is computed chunk by chunk as the ring needs it (section 5.3). An all_gather and the
product of what it gathers are one as well: each chunk is multiplied while the next travels.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.ir.collectives import is_collective
from meshwise.ir.mesh import Axes
from meshwise.ir.program import shape_of, type_of
from meshwise.schedule.kernels import MatmulSummand, all_gather_matmul, fused_all_reduce
from meshwise.schedule.moves.refusal import refuse
from meshwise.schedule.rewrite import jaxpr_of
from meshwise.schedule.view import GATHERS, View

MOVE = 'fuse(kernel="pallas")'
# What adds up its two operands, or its one.
_SUMMING = ("dot_general", "reduce_scatter")
Flat = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class _Parts:
    """The parts of a FusedAllReduce, by what each is to the kernel."""

    scatters: tuple[JaxprEqn, ...]
    product: JaxprEqn | None
    computed: tuple[JaxprEqn, ...]
    gathers: tuple[JaxprEqn, ...]
    axes: Axes


def kernel_of(
    view: View,
    given: Collection[int],
    reads: Sequence[Var],
    outs: Sequence[Var],
    interpret: bool | None,
) -> Flat:
    """The kernel of fused equations, a function of what they read. Raises `IllegalMove`.

    `interpret` is as `schedule.kernels` take it: None compiles on a TPU, and interprets elsewhere.
    """
    eqns = [view.eqns[i] for i in sorted(given)]
    _check_kinds(view, eqns)
    kernel = _gathered_product(view, eqns, reads, outs, interpret) or _fused_all_reduce(
        view, eqns, reads, outs, interpret
    )
    _check(view, kernel, reads, outs)
    return kernel


def _gathered_product(
    view: View,
    eqns: Sequence[JaxprEqn],
    reads: Sequence[Var],
    outs: Sequence[Var],
    interpret: bool | None,
) -> Flat | None:
    """The kernel of an all_gather and the product of what it gathers; None of anything else."""
    if [e.primitive.name in GATHERS for e in eqns] != [True, False]:
        return None
    gather, product = eqns
    whole = gather.outvars[0]
    if product.primitive.name != "dot_general" or product.invars.count(whole) != 1:
        return None
    if whole in outs:
        raise refuse(
            MOVE,
            [f"{view.text(whole)} is gathered, and read by others too"],
            "In the kernel each chunk is multiplied as it comes, and the whole is nowhere.",
            "Fuse without a kernel, or have the others read the product.",
        )
    side = product.invars.index(whole)
    dim = gather.params["all_gather_dimension"]
    operands = [gather.invars[0] if a is whole else a for a in product.invars]

    def kernel(*args: Any) -> Sequence[Any]:
        env = dict(zip(reads, args, strict=True))
        left, right, turned = _matrices(product, *(_jax.value_in(env, a) for a in operands))
        found = all_gather_matmul(
            left,
            right,
            axis=named_axes(gather),
            gathered=(("left", "right")[side], 1 - dim if turned[side] else dim),
            precision=product.params["precision"],
            preferred_element_type=product.params["preferred_element_type"],
            mesh_axes=view.mesh.names,
            interpret=interpret,
        )
        return [found]

    return kernel


def _fused_all_reduce(
    view: View,
    eqns: Sequence[JaxprEqn],
    reads: Sequence[Var],
    outs: Sequence[Var],
    interpret: bool | None,
) -> Flat:
    """The kernel of a reduce_scatter, computations and all_gathers, a product before them."""
    parts = _parts_of(view, eqns)
    chunks = [eqn.outvars[0] for eqn in parts.scatters]
    rows = shape_of(chunks[0])
    summands = [eqn.invars[0] for eqn in parts.scatters]
    apart = {*summands} if parts.product is None else {*parts.product.invars}
    others = [v for v in reads if v not in apart or _is_read(v, parts)]
    tiles = [v for v in others if shape_of(v)[:1] == rows[:1] and len(shape_of(v)) == len(rows)]
    wholes = [v for v in others if v not in tiles]
    gathered = {eqn.outvars[0]: eqn for eqn in parts.gathers}
    results = [gathered[v].invars[0] if v in gathered else v for v in outs]
    dims = [gathered[v].params["all_gather_dimension"] if v in gathered else None for v in outs]
    _check_order(view, parts, reads, [*chunks, *others], results)
    computation = _jax.close_jaxpr([], [*chunks, *tiles, *wholes], results, parts.computed, [])
    scattered = parts.scatters[0].params["scatter_dimension"]

    def kernel(*args: Any) -> Sequence[Any]:
        env = dict(zip(reads, args, strict=True))
        if parts.product is None:
            given_ = [_jax.value_in(env, v) for v in summands]
        else:
            left, right = (_jax.value_in(env, a) for a in parts.product.invars)
            given_ = [_product(parts.product, left, right)]
        return fused_all_reduce(
            computation,
            given_,
            [env[v] for v in tiles],
            [env[v] for v in wholes],
            axis=parts.axes,
            gathered=dims,
            dim=scattered,
            mesh_axes=view.mesh.names,
            interpret=interpret,
        )

    return kernel


def _check_kinds(view: View, eqns: Sequence[JaxprEqn]) -> None:
    """What is fused is of kinds that kernels have."""
    sent = [e for e in eqns if is_collective(e)]
    wrong = [
        f"{view.text(e.outvars[0])} has axis_index_groups, or is not tiled"
        for e in sent
        if e.params.get("axis_index_groups") is not None or not e.params.get("tiled", True)
    ]
    atoms = [a for e in eqns for a in (*e.invars, *e.outvars)]
    summed = {
        a
        for e in eqns
        if e.primitive.name in _SUMMING
        for a in e.invars[:2]
        if not isinstance(a, Literal)
    }
    for atom in dict.fromkeys(a for a in atoms if not isinstance(a, Literal)):
        shape, dtype = shape_of(atom), type_of(atom).dtype
        if 0 in shape:
            wrong.append(f"{view.text(atom)} has no elements")
        if jnp.issubdtype(dtype, jnp.complexfloating):
            wrong.append(f"{view.text(atom)} is complex")
        if jnp.issubdtype(dtype, jnp.bool_) and atom in summed:
            wrong.append(f"{view.text(atom)} is bool, and summed")
    if wrong:
        raise refuse(
            MOVE,
            wrong,
            "A kernel is a ring of all devices along axes, each with its tile of real numbers.",
            "Fuse without a kernel: XLA makes of it what it can.",
        )


def _check_order(
    view: View,
    parts: _Parts,
    reads: Sequence[Var],
    known: Sequence[Var],
    results: Sequence[Any],
) -> None:
    """What is computed comes after the sum, and before what is gathered."""
    before = parts.scatters if parts.product is None else [parts.product]
    summands = [a for e in before for a in e.invars]
    wrong = [a for a in summands if not isinstance(a, Literal) and a not in reads]
    made = {*known}
    for eqn in parts.computed:
        wrong += [a for a in eqn.invars if not isinstance(a, Literal) and a not in made]
        made.update(eqn.outvars)
    wrong += [a for a in results if not isinstance(a, Literal) and a not in made]
    if wrong:
        raise refuse(
            MOVE,
            [f"{view.text(a)} is made before the sum, or gathered" for a in dict.fromkeys(wrong)],
            "In the kernel a sum is added up of what is there, or of one product, computed with, "
            "and gathered: in this order, and the product is nowhere as a whole.",
            "Leave what comes before the sum out, and whoever else reads the product.",
        )


def _check(view: View, kernel: Flat, reads: Sequence[Var], outs: Sequence[Var]) -> None:
    """A kernel that cannot be made says so now, and not when the program is compiled."""
    try:
        made = jaxpr_of(kernel, reads, view.mesh).out_avals
        wanted = [type_of(v) for v in outs]
        if [(t.shape, t.dtype) for t in made] != [(t.shape, t.dtype) for t in wanted]:
            makes, asked = (", ".join(t.str_short() for t in some) for some in (made, wanted))
            raise ValueError(f"the kernel makes {makes}, where {asked} is asked for")
    except (ValueError, NotImplementedError) as why:
        raise refuse(
            MOVE,
            [str(why)],
            "A kernel computes on blocks of rows of this device's chunk.",
            "Fuse without a kernel: XLA makes of it what it can.",
        ) from None


def _parts_of(view: View, eqns: Sequence[JaxprEqn]) -> _Parts:
    scatters = [e for e in eqns if e.primitive.name == "reduce_scatter"]
    gathers = [e for e in eqns if e.primitive.name in GATHERS]
    if not scatters:
        raise refuse(
            MOVE,
            ["no reduce_scatter among what is fused"],
            "The kernel is a FusedAllReduce: a reduce_scatter, computations, all_gathers.",
            "Split an all_reduce and reorder first, or fuse without a kernel.",
        )
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    feeding = [e for e in products if e.outvars[0] is scatters[0].invars[0]]
    product = feeding[0] if len(feeding) == 1 and len(scatters) == 1 else None
    computed = [e for e in eqns if e not in scatters and e not in gathers and e is not product]
    whole = {e.outvars[0] for e in gathers}
    again = [v for e in computed for v in e.invars if not isinstance(v, Literal) and v in whole]
    if again:
        raise refuse(
            MOVE,
            [f"{view.text(again[0])} is gathered, and read again by what is fused"],
            "In the kernel computations come before gathers.",
            "Leave the computations after the gather out.",
        )
    dims = [e.params["scatter_dimension"] for e in scatters]
    if len({*dims}) > 1:
        raise refuse(
            MOVE,
            [
                f"{view.text(e.outvars[0])}, along dim {d}"
                for e, d in zip(scatters, dims, strict=True)
            ],
            "The sums of one kernel are scattered along one dim.",
            "Fuse what is scattered along one dim.",
        )
    axes = named_axes(scatters[0])
    return _Parts(tuple(scatters), product, tuple(computed), tuple(gathers), axes)


def _is_read(var: Var, parts: _Parts) -> bool:
    return any(a is var for eqn in (*parts.computed, *parts.gathers) for a in eqn.invars)


def _product(eqn: JaxprEqn, left: Any, right: Any) -> MatmulSummand:
    left, right, _ = _matrices(eqn, left, right)
    return MatmulSummand(left, right, eqn.params["precision"], eqn.params["preferred_element_type"])


def _matrices(eqn: JaxprEqn, left: Any, right: Any) -> tuple[Any, Any, tuple[bool, bool]]:
    """The operands of a product of matrices as rows by columns, and which were transposed."""
    (inner_left, inner_right), (batch, _) = eqn.params["dimension_numbers"]
    if batch or left.ndim != 2 or right.ndim != 2 or len(inner_left) != 1:
        raise ValueError(
            f"a product of {left.shape} and {right.shape} is none of two matrices: reshape them"
        )
    turned = inner_left[0] == 0, inner_right[0] == 1
    left = jnp.transpose(left) if turned[0] else left
    return left, jnp.transpose(right) if turned[1] else right, turned
