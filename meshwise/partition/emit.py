"""The emission: each equation on local arrays, its reshards before it, bodies inside their loops.

`emit` runs the plan as an ordinary function of local arrays and lets JAX trace it: local rules
are plain `lax`, reshards are `lax` collectives over the mesh's sub-axes, loops and conditionals are
`lax.scan`, `lax.while_loop` and `lax.switch` over bodies that are emitted the same way. What a body
reads from around it in another sharding is made before a loop, once, but inside a branch, which may
not be taken, unless it is read in any case.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.choose.plan import Plan
from meshwise.ir.bodies import Item, Nested, nest
from meshwise.ir.per_device import Reason
from meshwise.ir.program import shape_of, type_of
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.partition.at_home import cut_at_home
from meshwise.partition.coalesced_sends import send_together
from meshwise.partition.hoist import LoopRead, read_anyway, read_before
from meshwise.partition.once import send_once
from meshwise.partition.one_term import added_values
from meshwise.partition.order import emission_order
from meshwise.partition.stacks import Part, kept_with_padding, parts_kept, row_of
from meshwise.partition.walk import Walk, compute, copy_of, exchange_reason, store
from meshwise.reshard.emit import as_term


def emit(
    plan: Plan, most_hoisted_bytes: int | None = None
) -> tuple[ClosedJaxpr, list[Reason], list[LoopRead]]:
    """The per-device program of a plan, the reason of each of its reshards, and loops' reads."""
    walk = Walk(
        plan,
        added_values(plan),
        most_hoisted_bytes=most_hoisted_bytes,
        parts=parts_kept(plan),
        padded=kept_with_padding(plan),
    )
    program = plan.program
    for var, edges in plan.copies.items():
        walk.sources.update({(var, target): source for source, target in edges})
    for index, eqn in enumerate(program.equations):
        walk.makers.update(dict.fromkeys(eqn.outvars, index))

    def per_device(*args: Any) -> list[Any]:
        return _run(walk, args)

    shapes = [
        _local_type(var, sharding, plan)
        for var, sharding in zip(program.inputs, plan.in_shardings, strict=True)
    ]
    traced = _jax.make_jaxpr_over_axes(per_device, program.mesh.named_sizes, shapes)
    sent = send_once(cut_at_home(traced, plan.in_shardings, program.mesh))
    jaxpr = send_together(sent, program.mesh)
    reads = [read for _, found in sorted(walk.loop_reads.items()) for read in found]
    return jaxpr, walk.reasons, reads


def _local_type(var: Var, sharding: Sharding, plan: Plan) -> jax.ShapeDtypeStruct:
    shape = local_shape(shape_of(var), sharding, plan.program.mesh)
    weak = getattr(var.aval, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, type_of(var).dtype, weak_type=weak)


def _run(walk: Walk, args: Sequence[Any]) -> list[Any]:
    plan = walk.plan
    program = plan.program
    jaxpr = program.jaxpr
    for var, sharding, arg in zip(program.inputs, plan.in_shardings, args, strict=True):
        store(walk, var, sharding, arg)
    for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        store(walk, var, Sharding(((),) * len(shape_of(var))), const)
    _run_items(walk, nest(program.equations))
    results = [
        copy_of(walk, atom, sharding, None)
        for atom, sharding in zip(program.outputs, plan.out_shardings, strict=True)
    ]
    # What a local rule computes may have another weak type than what it stands for.
    return [
        _jax.with_weak_type(result, getattr(atom.aval, "weak_type", False))
        for atom, result in zip(program.outputs, results, strict=True)
    ]


def _run_items(walk: Walk, items: Sequence[Item]) -> None:
    """The equations of one body in order."""
    if not items:
        return
    for item in emission_order(items, walk.plan):
        if isinstance(item, int):
            _run_equation(walk, item)
        else:
            with _jax.at_source(item.control.eqn):
                if item.control.is_choice:
                    for var, sharding in read_anyway(walk.plan, item, items):
                        copy_of(walk, var, sharding, item.control.eqn)
                _CONTROLS[item.control.name](walk, item)


def _run_equation(walk: Walk, index: int) -> None:
    plan = walk.plan
    eqn, decided = plan.program.equations[index], plan.equations[index]
    if decided.remade:
        return
    with _jax.at_source(eqn):
        operands = [
            copy_of(walk, atom, sharding, eqn)
            for atom, sharding in zip(eqn.invars, decided.operands, strict=True)
        ]
        rule = plan.rules[index]
        exchanges = rule.exchanges is not None
        with exchange_reason(walk, eqn, decided.operands) if exchanges else nullcontext():
            turned = any(sharding.turned for sharding in decided.results)
            results = compute(eqn, rule, decided.strategy, plan, operands, turned)
        for var, sharding, result in zip(eqn.outvars, decided.results, results, strict=True):
            store(walk, var, sharding, result)
            if sharding.turned:
                _straighten(walk, var, sharding, eqn)


def _straighten(walk: Walk, var: Var, turned: Sharding, maker: JaxprEqn) -> None:
    """Bring what lies turned to where its shards belong, in the body in which it is made."""
    for source, target in walk.plan.copies.get(var, ()):
        if source == turned:
            copy_of(walk, var, target, maker)


def _scan(walk: Walk, loop: Nested) -> None:
    begins, steps = loop.of(_jax.carry_p), loop.of(_jax.step_p)
    ends, stacks = _ends(walk, loop), loop.of(_jax.stack_p)
    starts = _read(walk, begins, 0)
    read = dict(zip(steps, _read(walk, steps, 0), strict=True))
    _read_before(walk, loop)
    params = {k: loop.control.eqn.params[k] for k in ("length", "reverse", "unroll")}
    shapes = {mark: _shape_read(walk, mark) for mark in steps}
    padded = {m: x for m, x in read.items() if x.shape != shapes[m]}
    whole = [mark for mark in stacks if mark not in walk.parts]
    own = [mark for mark in stacks if mark in walk.parts]
    parts = [_part(walk, mark) for mark in own]
    # The number of the step goes round where a device asks whether it is one of its own, or reads
    # rows of more than there are steps.
    first = params["length"] - 1 if params["reverse"] else 0
    begun = [np.int32(first)] if own or padded else [], [part.start for part in parts]

    def step(state: Any, rows: Any) -> tuple[Any, list[Any]]:
        carried, (number, held) = state
        with walk.within():
            _bind(walk, begins, carried)
            rows = rows | {m: row_of(x, shapes[m], number[0]) for m, x in padded.items()}
            _bind(walk, steps, [rows[mark] for mark in steps])
            _run_items(walk, loop.bodies[1])
            made = zip(parts, held, _read(walk, own, 0), strict=True)
            held = [part.with_row(rows, row, number[0]) for part, rows, row in made]
            number = [n - 1 if params["reverse"] else n + 1 for n in number]
            return (_read(walk, ends, 1), (number, held)), _read(walk, whole, 0)

    stacked = {m: x for m, x in read.items() if m not in padded}
    (last, (_, held)), rows = lax.scan(step, (starts, begun), stacked, **params)
    _bind(walk, ends, last)
    _bind(walk, whole, rows)
    for mark, array in zip(own, held, strict=True):
        stack = walk.plan.program.equations[mark].outvars[0]
        store(walk, stack, walk.parts[mark], array)


def _ends(walk: Walk, loop: Nested) -> list[int]:
    """The marks of what a loop carries on, in the order of those that it begins with."""
    carried = walk.plan.program.carried
    end_of = {carried[mark]: mark for mark in loop.of(_jax.next_p)}
    return [end_of[mark] for mark in loop.of(_jax.carry_p)]


def _shape_read(walk: Walk, mark: int) -> tuple[int, ...]:
    """The local shape of the stack that a mark reads a row of, padding that it may have aside."""
    program, (sharding,) = walk.plan.program, walk.plan.equations[mark].operands
    return local_shape(shape_of(program.equations[mark].invars[0]), sharding, program.mesh)


def _part(walk: Walk, mark: int) -> Part:
    program = walk.plan.program
    return Part(program.equations[mark].outvars[0], walk.parts[mark], program.mesh)


def _while(walk: Walk, loop: Nested) -> None:
    begins, ends = loop.of(_jax.carry_p), _ends(walk, loop)
    starts = _read(walk, begins, 0)
    _read_before(walk, loop)

    def goes_on(carried: Sequence[Any]) -> Any:
        with walk.within():
            _bind(walk, begins, carried)
            _run_items(walk, loop.bodies[0])
            return _read(walk, loop.of(_jax.test_p), 0)[0]

    def step(carried: Sequence[Any]) -> list[Any]:
        with walk.within():
            _bind(walk, begins, carried)
            _run_items(walk, loop.bodies[1])
            return _read(walk, ends, 1)

    _bind(walk, ends, lax.while_loop(goes_on, step, starts))


def _branches(walk: Walk, choice: Nested) -> None:
    joins = choice.of(_jax.join_p)
    (index,) = _read(walk, choice.of(_jax.branch_index_p), 0)

    def branch(number: int) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            with walk.within():
                _run_items(walk, choice.bodies[number])
                return _read(walk, joins, number)

        return run

    results = lax.switch(index, [branch(number) for number in sorted(choice.bodies)])
    _bind(walk, joins, results)


_CONTROLS: dict[str, Callable[[Walk, Nested], None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _branches,
}


def _read(walk: Walk, marks: Sequence[int], operand: int) -> list[Any]:
    """One operand of each mark, as the mark wants it."""
    found = []
    for index in marks:
        eqn, sharding = walk.plan.program.equations[index], walk.plan.equations[index].operands
        value = copy_of(walk, eqn.invars[operand], sharding[operand], eqn)
        if isinstance(eqn.invars[operand], Literal) and sharding[operand].unreduced:
            value = as_term(value, sharding[operand].unreduced)
        found.append(value)
    return found


def _bind(walk: Walk, marks: Sequence[int], arrays: Sequence[Any]) -> None:
    """The results of marks, as the loop or conditional gives them."""
    for index, array in zip(marks, arrays, strict=True):
        eqn, decided = walk.plan.program.equations[index], walk.plan.equations[index]
        store(walk, eqn.outvars[0], decided.results[0], array)


def _read_before(walk: Walk, loop: Nested) -> None:
    """Make what a loop reads from around it, in the shardings it wants, before it."""
    copies, reads = read_before(walk.plan, loop, walk.sources, walk.copies, walk.most_hoisted_bytes)
    walk.loop_reads[loop.of(_jax.open_p)[0]] = reads
    for var, sharding in copies:
        copy_of(walk, var, sharding, loop.control.eqn)
