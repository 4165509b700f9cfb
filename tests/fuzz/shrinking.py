"""Make a failing case small: fewer steps, hints and axes, smaller sizes."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.programs import (
    Body,
    Case,
    Input,
    Spec,
    Step,
    all_steps,
    show_spec,
    without_unused,
)

StillFails = Callable[[Case], bool]


def shrink(case: Case, still_fails: StillFails, most_trials: int = 150) -> Case:
    """The smallest case found that still fails; stops after a number of trials."""
    trials = 0
    improved = True
    while improved and trials < most_trials:
        improved = False
        for smaller in _smaller(case):
            trials += 1
            if trials > most_trials:
                break
            if still_fails(smaller):
                case, improved = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases a little smaller, the most promising first."""
    for output in case.outputs:
        if len(case.outputs) > 1:
            yield without_unused(replace(case, outputs=(output,)))
    for k in range(len(case.outputs) if len(case.outputs) > 2 else 0):
        yield without_unused(replace(case, outputs=case.outputs[:k] + case.outputs[k + 1 :]))
    if case.grad:
        yield replace(case, grad=False)
    yield from _with_earlier_outputs(case)
    for step in reversed(list(all_steps(case.steps))):
        yield from _without_step(case, step)
    yield from _with_simpler_bodies(case)
    yield from _with_fewer_hints(case)
    yield from _with_smaller_meshes(case)
    yield from _with_smaller_sizes(case)


def _with_earlier_outputs(case: Case) -> Iterator[Case]:
    """An earlier result in place of the only one: a few, from the first steps to late ones."""
    if len(case.outputs) == 1:
        steps = [s for s in case.steps[:-1] if s.dtype != "tuple"]
        for k in range(min(len(steps), 6)):
            step = steps[k * len(steps) // 6 if len(steps) > 6 else k]
            yield without_unused(replace(case, outputs=((step.name, None),)))


def _without_step(case: Case, step: Step) -> Iterator[Case]:
    """The step's result becomes an operand of the same type, or an input."""
    if step.dtype == "tuple":
        return
    inner = list(all_steps(case.steps))
    parameters = [p for s in inner for body in s.bodies for p in body.parameters]
    types = {x.name: (x.shape, x.dtype) for x in (*case.inputs, *parameters, *inner)}
    for other in step.operands:
        if types[other] == (step.shape, step.dtype):
            yield without_unused(_without(case, step, other))
    if step.dtype == "key" or (step.dtype == "uint32" and "random" in step.text):
        return
    # Named so that it is no name of the maker's: its numbers depend on the name.
    given = Input(f"b{step.name}", step.shape, step.dtype)
    case = _without(case, step, given.name)
    yield without_unused(replace(case, inputs=(*case.inputs, given)))


def _without(case: Case, gone: Step, other: str) -> Case:
    """The case without a step, and another name in place of its own."""

    def name(n: str) -> str:
        return other if n == gone.name else n

    def renamed(step: Step) -> Step | None:
        bodies = tuple(replace(b, returned=tuple(map(name, b.returned))) for b in step.bodies)
        operands = tuple(map(name, step.operands))
        return None if step.name == gone.name else replace(step, operands=operands, bodies=bodies)

    outputs = tuple((name(n), spec) for n, spec in case.outputs)
    return replace(case, steps=_mapped(case.steps, renamed), outputs=outputs)


def _with(case: Case, new: Step) -> Case:
    """The case with another step in place of the one of that name."""
    steps = _mapped(case.steps, lambda step: new if step.name == new.name else step)
    return without_unused(replace(case, steps=steps))


def _mapped(steps: tuple[Step, ...], change: Callable[[Step], Step | None]) -> tuple[Step, ...]:
    """Every step changed or left out, those inside bodies before what they are in."""
    changed = []
    for step in steps:
        bodies = tuple(replace(b, steps=_mapped(b.steps, change)) for b in step.bodies)
        changed.append(change(replace(step, bodies=bodies)))
    return tuple(step for step in changed if step is not None)


def _with_simpler_bodies(case: Case) -> Iterator[Case]:
    """Loops that run less often; bodies that return a parameter as it came."""
    for step in all_steps(case.steps):
        for found in re.finditer(r"(length=|fori_loop\(0, )(\d+)", step.text):
            for count in range(int(found[2])):
                text = step.text[: found.start(2)] + str(count) + step.text[found.end(2) :]
                yield _with(case, replace(step, text=text))
        for k, body in enumerate(step.bodies):
            for simpler in _simpler(body):
                bodies = (*step.bodies[:k], simpler, *step.bodies[k + 1 :])
                yield _with(case, replace(step, bodies=bodies))


def _simpler(body: Body) -> Iterator[Body]:
    types = {s.name: (s.shape, s.dtype) for s in body.steps}
    for k, made in enumerate(body.returned):
        for given in body.parameters if made in types else ():
            if (given.shape, given.dtype) == types[made]:
                returned = (*body.returned[:k], given.name, *body.returned[k + 1 :])
                yield replace(body, returned=returned)


def _with_fewer_hints(case: Case) -> Iterator[Case]:
    for k, (name, spec) in enumerate(case.outputs):
        for less in _weaker(spec):
            outputs = (*case.outputs[:k], (name, less), *case.outputs[k + 1 :])
            yield replace(case, outputs=outputs)
    for k, given in enumerate(case.inputs):
        for less in _weaker(given.spec):
            inputs = (*case.inputs[:k], replace(given, spec=less), *case.inputs[k + 1 :])
            yield replace(case, inputs=inputs)
    for step in all_steps(case.steps):
        for less in _weaker(step.spec):
            if less is not None:
                yield _with(case, replace(step, spec=less))


def _weaker(spec: Spec | None) -> Iterator[Spec | None]:
    if spec is None:
        return
    yield None
    for k, entry in enumerate(spec):
        for axis in entry or ():
            yield (*spec[:k], tuple(a for a in entry or () if a != axis), *spec[k + 1 :])


def _with_smaller_meshes(case: Case) -> Iterator[Case]:
    for k, (axis, size) in enumerate(case.axes):
        rest = case.axes[:k] + case.axes[k + 1 :]
        if rest:
            yield _without_axis(replace(case, axes=rest), axis)
        if size > 2:
            yield replace(case, axes=(*case.axes[:k], (axis, 2), *case.axes[k + 1 :]))


def _without_axis(case: Case, axis: str) -> Case:
    def less(spec: Spec | None) -> Spec | None:
        if spec is None:
            return None
        return tuple(None if e is None else tuple(a for a in e if a != axis) for e in spec)

    return replace(
        case,
        inputs=tuple(replace(i, spec=less(i.spec)) for i in case.inputs),
        steps=_mapped(case.steps, lambda s: replace(s, spec=less(s.spec))),
        outputs=tuple((n, less(spec)) for n, spec in case.outputs),
    )


def _with_smaller_sizes(case: Case) -> Iterator[Case]:
    """One size, wherever it stands, made smaller: in shapes and in the steps' texts."""
    sizes = {n for i in case.inputs for n in i.shape}
    for old in sorted(sizes, reverse=True):
        for new in (1, 2, 3, 4, 5):
            if new < old:
                yield _resized(case, old, new)


def _resized(case: Case, old: int, new: int) -> Case:
    def shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if n == old else n for n in sizes)

    def resized(step: Step) -> Step:
        bodies = tuple(
            replace(
                body, parameters=tuple(replace(p, shape=shape(p.shape)) for p in body.parameters)
            )
            for body in step.bodies
        )
        text = pattern.sub(str(new), step.text)
        return replace(step, shape=shape(step.shape), text=text, bodies=bodies)

    pattern = re.compile(rf"(?<![\w.{{]){old}(?![\w.}}])")
    inputs = tuple(replace(i, shape=shape(i.shape)) for i in case.inputs)
    return replace(case, inputs=inputs, steps=_mapped(case.steps, resized))


def reproducer(case: Case, way: str) -> str:
    """A program that a person can run, from the root of the repository."""
    ins = ", ".join("None" if i.spec is None else show_spec(i.spec) for i in case.inputs)
    outs = ", ".join("None" if s is None else show_spec(s) for _, s in case.outputs)
    types = ", ".join(f"{i.name}: {i.dtype}{list(i.shape)}" for i in case.inputs)
    lines = [
        f"# mesh {dict(case.axes)}, gradients: {case.grad}, in_shardings ({ins}), "
        f"out_shardings ({outs}), {types}",
        *(f"#   {line}" for line in case.body()),
        "from tests.fuzz.checking import check",
        "from tests.fuzz.programs import Body, Case, Input, Step",
        f"case = {case!r}",
        f"print(*check(case, ({way!r},), 'compiled'), sep='\\n')",
    ]
    return "\n".join(lines)
