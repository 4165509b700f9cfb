"""fuse: computations, and one collective among them, as one equation (CoCoNeT section 3.3).

Computations become one nested `jit`, which XLA makes one kernel of or few. With a reduce_scatter
before and an all_gather after them it is a FusedAllReduce: an all_reduce that computes on the way.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import Literal, Var, named_axes
from meshwise.ir.collectives import is_collective, kind_of_primitive
from meshwise.schedule.moves.kernel import kernel_of
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.rewrite import jaxpr_of, trace_piece
from meshwise.schedule.view import GATHERS, SUMS, View

MOVE = "fuse"
KERNELS = ("pallas",)


@dataclass(frozen=True)
class Fused:
    """The program after a fuse, the name of the fused equation, and its results."""

    view: View
    name: str
    values: tuple[Var, ...]


def fuse(
    view: View,
    values: Sequence[Var],
    name: str | None = None,
    kernel: str | None = None,
    interpret: bool | None = None,
) -> Fused:
    """Equations, named by their results, as one. Raises `IllegalMove`.

    What lies between those that are named is taken with them. `kernel="pallas"` makes a TPU kernel
    of a reduce_scatter, computations and all_gathers, and of a matrix product before them;
    `interpret` says whether it is compiled (False) or interpreted, None as the machine has it.
    """
    given = {equation_of(view, v, MOVE, lambda _: True, "computations") for v in values}
    given |= between(view, given)
    if kernel not in (None, *KERNELS):
        raise refuse(
            MOVE,
            [f"kernel={kernel!r}"],
            f"A fused equation is lowered by XLA, or by one of {', '.join(KERNELS)}.",
            "Leave it out to have XLA fuse.",
        )
    if len(given) < 2:
        raise refuse(
            MOVE, [f"{len(given)} equation"], "Two or more are fused.", "Name what is to be fused."
        )
    _check_collectives(view, given)
    check_convex(view, given, MOVE)
    inside = sorted(given)
    eqns = [view.eqns[i] for i in inside]
    made = {v for eqn in eqns for v in eqn.outvars}
    read = [a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)]
    externals = list(dict.fromkeys(v for v in read if v not in made))
    outs = [v for v in made if v in view.returned or not {*view.readers[v]} <= given]
    outs.sort(key=lambda v: (view.maker[v], view.eqns[view.maker[v]].outvars.index(v)))
    name = name or f"fused_{_kind_of(view, given)}"
    body: Any = _jax.jaxpr_as_fun(_jax.close_jaxpr([], externals, outs, eqns, []))
    body.__name__ = name
    one = jax.jit(body)
    if kernel is not None:
        function = kernel_of(view, given, externals, outs, interpret)
        one = _as_kernel(kernel, function, body, view, externals)
    sent = [eqn for eqn in eqns if is_collective(eqn)]
    with _jax.at_source((sent or eqns)[-1]):
        piece = trace_piece(one, externals, view.mesh, inside[0])
    jaxpr = replaced(view, MOVE, inside, [piece], dict(zip(outs, piece.results, strict=True)))
    return Fused(view.with_jaxpr(jaxpr), name, piece.results)


def _as_kernel(
    kernel: str, function: Any, body: Any, view: View, externals: Sequence[Var]
) -> Callable[..., Any]:
    """A function that a kernel computes, and readers read as its jaxpr."""
    closed = jaxpr_of(body, externals, view.mesh)
    name = f"{body.__name__}_{kernel}"
    return lambda *args: _jax.call_kernel(function, closed, name, args)


def between(view: View, given: Collection[int]) -> set[int]:
    """Equations on a path from one of some equations to another."""
    after: set[Var] = set()
    below: set[int] = set()
    for i, eqn in enumerate(view.eqns):
        if i in given or any(not isinstance(a, Literal) and a in after for a in eqn.invars):
            below.add(i)
            after.update(eqn.outvars)
    before: set[Var] = set()
    found = set()
    for i in reversed(range(len(view.eqns))):
        eqn = view.eqns[i]
        leads = any(v in before for v in eqn.outvars)
        if i in given or leads:
            before.update(a for a in eqn.invars if not isinstance(a, Literal))
        if leads and i in below:
            found.add(i)
    return found - {*given}


def _check_collectives(view: View, given: Collection[int]) -> None:
    """One collective; a reduce_scatter and all_gathers over one group count as one all_reduce."""
    found = [i for i in sorted(given) if is_collective(view.eqns[i])]
    names = [view.eqns[i].primitive.name for i in found]
    groups = {named_axes(view.eqns[i]) for i in found}
    scatters = [n for n in names if n == "reduce_scatter"]
    gathers = [n for n in names if n in GATHERS]
    small = [i for i in found if view.eqns[i].primitive.name in SUMS]
    is_all_reduce = bool(scatters and gathers) and len(scatters) + len(gathers) + len(small) == len(
        found
    )
    if len(groups) > 1:
        raise refuse(
            MOVE,
            [
                view.text(view.eqns[i].outvars[0]) + f" over {', '.join(named_axes(view.eqns[i]))}"
                for i in found
            ],
            "The collectives of one kernel go over the same axes (groups).",
            "Fuse what is over one group.",
        )
    if len(found) > 1 and not is_all_reduce:
        raise refuse(
            MOVE,
            [view.text(view.eqns[i].outvars[0]) for i in found],
            "One collective goes in one fused equation; a reduce_scatter, reductions of norms and "
            "all_gathers count as one all_reduce.",
            "Fuse the computations of each by itself, or put the collectives in one bucket first.",
        )


def check_convex(view: View, given: Collection[int], move: str) -> None:
    """No path leaves what is moved together and comes back."""
    after: dict[Var, int] = {}
    for index, eqn in enumerate(view.eqns):
        reads = [a for a in eqn.invars if not isinstance(a, Literal)]
        back = [a for a in reads if a in after]
        if index not in given:
            if back or any(view.maker.get(a) in given for a in reads):
                after.update(dict.fromkeys(eqn.outvars, index))
        elif back:
            raise refuse(
                move,
                [
                    f"{view.text(back[0])} is computed from what is moved, and read by "
                    f"{eqn.primitive.name} at {_jax.source_summary(eqn)}, which is moved too"
                ],
                "What is moved together must be convex: no path may leave it and come back, or a "
                "value would be needed to compute itself.",
                "Move the equations on that path too.",
            )


def _kind_of(view: View, given: Collection[int]) -> str:
    names = {view.eqns[i].primitive.name for i in given}
    if "reduce_scatter" in names and names & GATHERS:
        return "all_reduce"
    found = sorted(name for name in names if kind_of_primitive(name))
    return found[0] if found else "computation"
