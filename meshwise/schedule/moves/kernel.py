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
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.mesh import Axes
from meshwise.ir.program import shape_of
from meshwise.schedule.kernels import MatmulSummand, all_gather_matmul, fused_all_reduce
from meshwise.schedule.layouts import named_axes
from meshwise.schedule.moves.refusal import refuse
from meshwise.schedule.rewrite import jaxpr_of
from meshwise.schedule.view import GATHERS, View

MOVE = 'fuse(kernel="pallas")'
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
    kernel = _gathered_product(view, given, reads, interpret) or _fused_all_reduce(
        view, given, reads, outs, interpret
    )
    _check(view, kernel, reads)
    return kernel


def _gathered_product(
    view: View, given: Collection[int], reads: Sequence[Var], interpret: bool | None
) -> Flat | None:
    """The kernel of an all_gather and the product of what it gathers; None of anything else."""
    eqns = [view.eqns[i] for i in sorted(given)]
    if [e.primitive.name in GATHERS for e in eqns] != [True, False]:
        return None
    gather, product = eqns
    whole = gather.outvars[0]
    if product.primitive.name != "dot_general" or product.invars.count(whole) != 1:
        return None
    side = product.invars.index(whole)
    dim = gather.params["all_gather_dimension"]
    operands = [gather.invars[0] if a is whole else a for a in product.invars]

    def kernel(*args: Any) -> Sequence[Any]:
        env = dict(zip(reads, args, strict=True))
        left, right, turned = _matrices(product, *(_read(env, a) for a in operands))
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
    given: Collection[int],
    reads: Sequence[Var],
    outs: Sequence[Var],
    interpret: bool | None,
) -> Flat:
    """The kernel of a reduce_scatter, computations and all_gathers, a product before them."""
    parts = _parts_of(view, given)
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
    computation = _jax.close_jaxpr([], [*chunks, *tiles, *wholes], results, parts.computed, [])
    scattered = parts.scatters[0].params["scatter_dimension"]

    def kernel(*args: Any) -> Sequence[Any]:
        env = dict(zip(reads, args, strict=True))
        if parts.product is None:
            given_ = [_read(env, v) for v in summands]
        else:
            left, right = (_read(env, a) for a in parts.product.invars)
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


def _check(view: View, kernel: Flat, reads: Sequence[Var]) -> None:
    """A kernel that cannot be made says so now, and not when the program is compiled."""
    try:
        jaxpr_of(kernel, reads, view.mesh)
    except (ValueError, NotImplementedError) as why:
        raise refuse(
            MOVE,
            [str(why)],
            "A kernel computes on blocks of rows of this device's chunk.",
            "Fuse without a kernel: XLA makes of it what it can.",
        ) from None


def _parts_of(view: View, given: Collection[int]) -> _Parts:
    eqns = [view.eqns[i] for i in sorted(given)]
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
    axes = named_axes(scatters[0])
    return _Parts(tuple(scatters), product, tuple(computed), tuple(gathers), axes)


def _is_read(var: Var, parts: _Parts) -> bool:
    return any(a is var for eqn in (*parts.computed, *parts.gathers) for a in eqn.invars)


def _read(env: dict[Var, Any], atom: Any) -> Any:
    return _jax.literal_value(atom) if isinstance(atom, Literal) else env[atom]


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
