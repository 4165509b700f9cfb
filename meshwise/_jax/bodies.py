"""Calls and constraints: equations with bodies, and the shardings that JAX lets a user write."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax._src import core as _core
from jax._src.named_sharding import UNSPECIFIED
from jax.sharding import PartitionSpec

from meshwise._jax.hints import hint_p
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies_of,
    opened,
    rewritten,
    with_bodies,
)
from meshwise._jax.tracing import is_unspecified, without_mesh


class CallBody:
    """The body of a call-like equation and the shardings the call gives its inputs and outputs."""

    __slots__ = ("consts", "in_specs", "jaxpr", "out_specs", "recomputed")

    def __init__(
        self,
        body: Any,
        in_specs: Sequence[Any] | None = None,
        out_specs: Sequence[Any] | None = None,
        recomputed: bool = False,
    ):
        """`body` is a Jaxpr or ClosedJaxpr; specs are None where nothing was said."""
        self.jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        self.consts = body.consts if isinstance(body, ClosedJaxpr) else ()
        self.in_specs = in_specs or (None,) * len(self.jaxpr.invars)
        self.out_specs = out_specs or (None,) * len(self.jaxpr.outvars)
        self.recomputed = recomputed


def _known(shardings: Sequence[Any]) -> list[Any]:
    return [None if is_unspecified(s) else s for s in shardings]


def _jit_body(params: dict[str, Any]) -> CallBody:
    in_specs, out_specs = _known(params["in_shardings"]), _known(params["out_shardings"])
    return CallBody(params["jaxpr"], in_specs, out_specs)


def _remat_body(params: dict[str, Any]) -> CallBody:
    prevents = params["prevent_cse"]
    barrier = any(prevents) if isinstance(prevents, tuple) else prevents
    return CallBody(params["jaxpr"], recomputed=params["differentiated"] and barrier)


def _custom_partitioning_body(params: dict[str, Any]) -> CallBody | None:
    """What a function does on one device, where it brings no sharding rule to partition it by."""
    return CallBody(params["call"]) if params["sharding_rule"] is None else None


def _linear_solve_body(params: dict[str, Any]) -> CallBody:
    """What solves, of the four functions of a `custom_linear_solve`, reading its own constants."""
    counts, solve = params["const_lengths"], params["jaxprs"].solve
    own = opened(solve).invars
    before, after = counts.matvec + counts.vecmat, counts.transpose_solve
    unread = [Var(own[0].aval) for _ in range(before + after)]
    invars = [*unread[:before], *own[: counts.solve], *unread[before:], *own[counts.solve :]]
    return CallBody(rewritten(solve, invars=invars))


_CALLS: dict[str, Callable[[dict[str, Any]], CallBody | None]] = {
    "jit": _jit_body,
    "pjit": _jit_body,
    "remat2": _remat_body,
    "checkpoint": _remat_body,
    "closed_call": lambda params: CallBody(params["call_jaxpr"]),
    "core_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_jvp_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_vjp_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_partitioning": _custom_partitioning_body,
    "custom_linear_solve": _linear_solve_body,
    "custom_vmap_call": lambda params: CallBody(params["call"]),
    "eval_jaxpr": lambda params: CallBody(params.get("call_jaxpr") or params["jaxpr"]),
    "program_order": lambda params: CallBody(params["call_jaxpr"]),  # since jax 0.11
    "xla_metadata_call": lambda params: CallBody(params["jaxpr"]),  # and this
    "mw_call": lambda params: CallBody(params["jaxpr"], params["in_specs"], params["out_specs"]),
}


def call_body(eqn: JaxprEqn) -> CallBody | None:
    """The body of a call-like equation, None for any other."""
    read = _CALLS.get(eqn.primitive.name)
    return read(eqn.params) if read else _body_of_sparse(eqn)


_SPARSE = ("bcoo", "bcsr", "coo", "csr")  # of `jax.experimental.sparse`, and their modules


def _body_of_sparse(eqn: JaxprEqn) -> CallBody | None:
    """What an operator on the parts of sparse arrays is in terms of dense ones: its lowering."""
    name = eqn.primitive.name
    kind = name.partition("_")[0]
    if kind not in _SPARSE:
        return None
    module = sys.modules.get(f"jax.experimental.sparse.{kind}")
    written: Any = getattr(module, f"_{name}_impl", None)
    if written is None:
        return None
    types = [a.aval for a in eqn.invars]
    with without_mesh():
        return CallBody(jax.make_jaxpr(partial(written, **eqn.params))(*types))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many leading operands of a scan are constants, and how many after them are carried.

    Since jax 0.11 a tree of the operands says so, `ft_in`; before, two numbers.
    """
    params = eqn.params
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def constraint_of(eqn: JaxprEqn) -> Any:
    """The sharding that a constraint in JAX's own words asks for, None for other equations.

    JAX inserts `reshard` equations of its own; over the Auto axes of our traces an entry None of
    theirs says nothing, so one that names no axis is no hint.
    """
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return eqn.params["sharding"]
    if name == "reshard" and any(eqn.params["dst_sharding"].spec.partitions):
        return eqn.params["dst_sharding"]
    return None


def hands_on(eqn: JaxprEqn) -> bool:
    """Whether an equation results in its operands: where they are to lie, it does not say.

    That is a `device_put` that names no place for any, and a constraint that leaves every dim open,
    as JAX writes some itself where a mesh is set.
    """
    params = eqn.params
    if eqn.primitive is hint_p or eqn.primitive.name == "sharding_constraint":
        said, rank = params["sharding"], len(getattr(eqn.outvars[0].aval, "shape", ()))
        entries = getattr(getattr(said, "spec", said), "partitions", ())
        return rank > 0 and entries == (PartitionSpec.UNCONSTRAINED,) * rank
    return eqn.primitive.name == "device_put" and not any(
        place is not None for place in (*params["devices"], *params["srcs"])
    )


_FEW = 64  # numbers that are not worth sharding


def is_of_numbers(jaxpr: Any) -> bool:
    """Whether a jaxpr makes numbers of numbers, of few in between: nothing in it is to be sharded.

    Such are functions by which `lax.reduce` and its like join two numbers. There no function may
    have effects, and none is partitioned.
    """
    inner = opened(jaxpr)
    are_numbers = all(_count(atom) == 1 for atom in (*inner.invars, *inner.outvars))
    return are_numbers and not inner.effects and _has_few(inner)


def _has_few(jaxpr: Any) -> bool:
    """Whether no value in a jaxpr, bodies included, is an array of more than a few numbers."""
    inner = opened(jaxpr)
    atoms = (a for eqn in inner.eqns for a in (*eqn.invars, *eqn.outvars))
    bodies = (body for eqn in inner.eqns for body in bodies_of(eqn))
    return all(_count(a) <= _FEW for a in atoms) and all(map(_has_few, bodies))


def _count(atom: Any) -> float:
    """How many numbers a value has; infinitely many, where it is no array."""
    shape = getattr(atom.aval, "shape", None)
    return math.inf if shape is None else math.prod(shape)


def has_constants_in_calls(jaxpr: Any) -> bool:
    """Whether a call in a jaxpr has constants of its own."""
    bodies = [body for eqn in opened(jaxpr).eqns if (body := call_body(eqn))]
    return any(body.consts or has_constants_in_calls(body.jaxpr) for body in bodies)


def without_hints(eqn: JaxprEqn) -> JaxprEqn:
    """The same equation with no hints and no `mw_call` in the bodies among its parameters.

    What is computed whole on every device has nothing to shard, and constraints cannot stand in
    a region where every mesh axis is manual. A nested `mw.jit` is what its function is there.
    """
    return with_bodies(eqn, _strip)


def without_hints_in(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same for a jaxpr, its own equations included."""
    return _strip(closed)


def _strip(jaxpr: Any) -> Any:
    inner = opened(jaxpr)
    same: dict[Var, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    eqns = []
    for eqn in inner.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive is hint_p or constraint_of(eqn) is not None:
            same[eqn.outvars[0]] = operands[0]
            continue
        eqns.append(_without_shardings(without_hints(eqn.replace(invars=operands))))
    return rewritten(jaxpr, eqns=eqns, outvars=[read(a) for a in inner.outvars])


def _without_shardings(eqn: JaxprEqn) -> JaxprEqn:
    """A call that says nothing of shardings, nor where it runs."""
    if eqn.primitive.name == "mw_call":
        whole = {"call_jaxpr": eqn.params["jaxpr"]}
        return eqn.replace(primitive=_core.closed_call_p, params=whole)
    if "in_shardings" not in eqn.params or "out_shardings" not in eqn.params:
        return eqn
    unspecified = {
        "in_shardings": (UNSPECIFIED,) * len(eqn.invars),
        "out_shardings": (UNSPECIFIED,) * len(eqn.outvars),
    }
    return eqn.replace(params={**eqn.params, **unspecified})
