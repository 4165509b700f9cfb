"""Loops and branches in a flat program: the equations that mark where their bodies begin and end.

A loop or conditional whose bodies stand in the flat program is told by marks around them. They are
equations like others, so that completion goes through them and every value that is carried has one
sharding, but they compute nothing: the partitioner puts the bodies between them back into a loop.

    open                              open
    carry    init -> c    (each)      branch_index  i ->
    step     xs -> x      (each)      body 0 ... end 0
    body 1 ... end 1                  body 1 ... end 1
    next     c, y -> last (each)      join   a, b -> r   (each)
    stack    y -> ys      (each)      close
    close

A while loop has a `body 0` too, its test, in which `test` reads whether it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

from meshwise._jax.bodies import scan_counts
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Primitive,
    Var,
    at_source,
    jaxpr_as_fun,
    opened,
)
from meshwise._jax.tracing import make_jaxpr_over_axes

# How often a loop is taken to run that ends when its data says so. Few: what is sent before a loop,
# to send less in each step, is lost where it ends soon, and a plan that sends in its steps is never
# worse than the function as it is written.
ASSUMED_TRIPS = 3


class _Marks(_effects.Effect):
    """What keeps marks where they are: no pass may share, copy or drop them."""

    def __str__(self) -> str:
        return "marks"


_MARKS = frozenset({_Marks()})


@dataclass(frozen=True, eq=False)
class Control:
    """One loop or conditional of a program: the equation it was, and how often its bodies run.

    `original` is the user's equation, `eqn` the same on the variables of the flat program.
    """

    eqn: JaxprEqn
    original: JaxprEqn

    @property
    def name(self) -> str:
        """`scan`, `while` or `cond`."""
        return self.eqn.primitive.name

    @property
    def is_choice(self) -> bool:
        """Whether it runs one of its bodies, and no loop."""
        return self.name == "cond"

    @property
    def branches(self) -> int:
        """Of how many bodies one runs, each as probable as the others; a loop has no choice."""
        return len(self.eqn.params["branches"]) if self.is_choice else 1

    @property
    def trips(self) -> int:
        """How often a body runs; an assumption where only the data knows."""
        if self.name == "scan":
            return self.eqn.params["length"]
        return ASSUMED_TRIPS if self.name == "while" else 1

    @property
    def are_trips_known(self) -> bool:
        """Whether more than the data knows how often a body runs."""
        return self.name != "while"

    def __repr__(self) -> str:
        return f"{self.name}_{id(self.eqn) & 0xFFF:x}"


def _mark(name: str) -> Primitive:
    primitive = Primitive(f"mark_{name}")
    primitive.multiple_results = True
    return primitive


open_p = _mark("open")
carry_p = _mark("carry")
step_p = _mark("step")
branch_index_p = _mark("branch_index")
body_p = _mark("body")
end_p = _mark("end")
test_p = _mark("test")
next_p = _mark("next")
stack_p = _mark("stack")
join_p = _mark("join")
close_p = _mark("close")

# What a report calls those that values go through.
_IN_WORDS = {
    branch_index_p: "what chooses a branch",
    carry_p: "what a loop carries",
    join_p: "the result of a choice",
    next_p: "the next step of a loop",
    stack_p: "a stack of a loop's rows",
    step_p: "a loop's row of a stack",
    test_p: "what ends a loop",
}

_ALL = frozenset(
    {
        open_p,
        carry_p,
        step_p,
        branch_index_p,
        body_p,
        test_p,
        end_p,
        next_p,
        stack_p,
        join_p,
        close_p,
    }
)
_CONTROLS = ("scan", "while", "cond")


def is_mark(eqn: JaxprEqn) -> bool:
    """Whether an equation only marks where a body begins or ends, or what enters or leaves it."""
    return eqn.primitive in _ALL


def new_mark(
    primitive: Primitive,
    operands: Sequence[Any],
    results: Sequence[Var],
    control: Control,
    **params: Any,
) -> JaxprEqn:
    """A mark of a loop or conditional, at its line."""
    eqn = control.eqn
    params = {"control": control, **params}
    return _core.new_jaxpr_eqn(
        list(operands), list(results), primitive, params, _MARKS, eqn.source_info, eqn.ctx
    )


def operator_name(eqn: JaxprEqn) -> str:
    """What a report calls an operator: its primitive, of a kernel its name, of a loop its part."""
    twin, name = eqn.params.get("twin"), eqn.primitive.name
    return f"{name} of {twin.name}" if twin else _IN_WORDS.get(eqn.primitive, name)


def has_bodies(eqn: JaxprEqn) -> bool:
    """Whether a loop or conditional whose bodies can be told by marks.

    Those that change references in place are not, nor a choice between platforms.
    """
    if eqn.primitive.name not in _CONTROLS or eqn.params.get("branches_platforms"):
        return False
    return all(hasattr(_aval(a), "dtype") and not _is_ref(_aval(a)) for a in eqn.invars)


def _aval(atom: Any) -> Any:
    return atom.aval


def _is_ref(aval: Any) -> bool:
    return "Ref" in type(aval).__name__


@dataclass(frozen=True)
class LoopParts:
    """A scan or while loop: bodies with the operands each reads, and what is carried along.

    `test` is None for a scan. Bodies read their constants, then what is carried, then (`steps` of
    them) what is new in each step; a scan's returns what is carried on, then what is stacked.
    """

    body: ClosedJaxpr
    body_consts: Sequence[Any]
    test: ClosedJaxpr | None
    test_consts: Sequence[Any]
    carried: Sequence[Any]
    stepped: Sequence[Any]


def loop_parts(eqn: JaxprEqn, operands: Sequence[Any]) -> LoopParts:
    """What a loop does with its operands."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        consts, carried = scan_counts(eqn)
        first, last = consts, consts + carried
        known = operands[:first]
        return LoopParts(params["jaxpr"], known, None, (), operands[first:last], operands[last:])
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    known = operands[first:last]
    if test.out_avals[0].shape:
        known = operands[:last]
        with at_source(eqn):
            test, body = _while_any(test, body, first)
    return LoopParts(body, known, test, operands[:first], operands[last:], ())


def counted(eqn: JaxprEqn, steps: int) -> JaxprEqn:
    """A while loop as a scan of so many steps, which reads nothing that only the test reads.

    How a scan says what it carries is up to JAX, so it is asked for one that reads as much.
    """
    first, known = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    operands = eqn.invars[first:]

    def of_numbers(*args: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            return tuple(lax.optimization_barrier((*args[:known], *carry))[known:]), None

        return lax.scan(step, args[known:], None, steps)[0]

    closed = make_jaxpr_over_axes(of_numbers, (), [np.float32(0)] * len(operands))
    (scan,) = closed.jaxpr.eqns
    params = scan.params | {"jaxpr": eqn.params["body_jaxpr"]}
    return eqn.replace(primitive=scan.primitive, invars=operands, params=params)


def kept_at_their_end(goes_on: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """What many loops at once carry: those that have ended keep what they had."""
    wide = [lax.broadcast_in_dim(goes_on, x.shape, range(goes_on.ndim)) for x in old]
    return [lax.select(*case) for case in zip(wide, new, old, strict=True)]


@partial(_weakref_lru_cache, trace_context_in_key=False)
def _while_any(
    test: ClosedJaxpr, body: ClosedJaxpr, consts: int
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Test and body of many loops at once, as `vmap` makes them, which end one by one.

    They go on together while any of them does, and those at their end keep what they carry. The
    body reads the test's constants, `consts` of them, before its own. Remembered, as equations
    are known by their identity.
    """
    goes_on, step = jaxpr_as_fun(test), jaxpr_as_fun(body)
    known = [*test.in_avals[:consts], *body.in_avals]
    first = len(known) - len(body.out_avals)

    def any_goes_on(*args: Any) -> Any:
        return jnp.any(goes_on(*args)[0])

    def step_of_some(*args: Any) -> list[Any]:
        old = args[first:]
        (each,) = goes_on(*args[:consts], *old)
        return kept_at_their_end(each, step(*args[consts:]), old)

    return (
        make_jaxpr_over_axes(any_goes_on, (), test.in_avals),
        make_jaxpr_over_axes(step_of_some, (), known),
    )


def inputs_read(closed: ClosedJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a jaxpr some of its results are computed from."""
    return _pe.dce_jaxpr(closed.jaxpr, list(outputs))[1]


def without_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr without what nothing comes of: equations, and what loops carry or make in vain."""
    jaxpr = closed.jaxpr
    live, _ = _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(opened(live), closed.consts)
