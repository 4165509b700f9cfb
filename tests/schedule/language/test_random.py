"""Random programs of sliced, replicated and unreduced values, against one device.

Each step applies an operator to values that are there. Where their layouts do not go together, the
step is written as the error's way out says: what is Sliced is gathered, what is Unreduced reduced.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.language.one_device import on_one_device
from tests.schedule.language.plain import random

MESHES = [mesh_of(a=2, b=3), mesh_of(a=4), mesh_of(a=1, b=2)]

UNARY = {
    "tanh": jnp.tanh,
    "twice": lambda x: 2 * x,
    "turned": lambda x: x.T,
    "sum of rows": lambda x: x.sum(-1, keepdims=True),
    "sum of columns": lambda x: x.mean(0, keepdims=True) if x.ndim else x,
    "largest": lambda x: x.max(-1, keepdims=True) if x.ndim else x,
    "total": lambda x: x.sum(),
    "softmax": lambda x: jax.nn.softmax(x, -1) if x.ndim else x,
    "runs": lambda x: jnp.cumsum(x, -1) / 4 if x.ndim else x,
    "turned round": lambda x: x[::-1] if x.ndim else x,
    "one more": lambda x: x[None] if x.ndim < 3 else x[0],
    "end to end": lambda x: x.reshape(-1),
    "dropped": lambda x: mw.dropout(jax.random.key(5), x, 0.3),
}
BINARY = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "larger": jnp.maximum,
    "divide": lambda x, y: x / (1 + y * y),
    "product": lambda x, y: jnp.tensordot(x, y, 1) / 3 if x.ndim and y.ndim else x * y,
    "choose": lambda x, y: jnp.where(x > 0, x, y),
    "beside": lambda x, y: jnp.concatenate([x, y], -1) if x.ndim and x.ndim == y.ndim else x + y,
}


@dataclass(frozen=True)
class Step:
    """An operator, which values it reads, and by which verbs these are brought together before."""

    name: str
    read: tuple[int, ...]
    joined: tuple[Any, ...] = ()


def interpret(steps: list[Step], *args: Any) -> list[Any]:
    values = list(args)
    for step in steps:
        operands = [values[i] for i in step.read]
        for position, verbs in step.joined:
            for verb in verbs:
                operands[position] = verb(operands[position])
        values.append((UNARY | BINARY)[step.name](*operands))
    return values


def joins(layout: str) -> list[Any]:
    """The verbs after which a value of a layout (as it is printed) is replicated."""
    found = []
    for kind, said, axes in re.findall(r"(\w+)\(([^)]*)\) over ([a-z, ]*?)(?=, [A-Z]|$)", layout):
        over = tuple(axes.split(", "))
        if kind == "Unreduced":
            op = said.strip('"')
            found.append(lambda x, op=op, over=over: mw.all_reduce(x, op, over))
        else:
            found.append(lambda x, over=over: mw.all_gather(x, over))
    return found


class Author:
    """Writes a random program, a step at a time."""

    def __init__(self, seed: int):
        self.draw = np.random.default_rng(seed)
        self.mesh = MESHES[seed % len(MESHES)]
        shapes = [tuple(int(n) for n in self.draw.integers(2, 8, 2)) for _ in range(2)]
        shapes += [shapes[0], (shapes[0][1], shapes[1][0])]
        self.args = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
        self.layouts = {f"x{i}": self.layout() for i in range(len(shapes))}
        self.steps: list[Step] = []

    def layout(self) -> mw.Replicated | mw.Sliced:
        said = mw.Replicated()
        for axis in self.draw.permutation(list(self.mesh.axis_names)):
            if self.draw.random() < 0.6:
                said = said & mw.Sliced(int(self.draw.integers(2)), str(axis))
        return said

    def program(self, steps: list[Step]) -> Any:
        def fn(x0, x1, x2, x3):
            return interpret(steps, x0, x1, x2, x3)

        return mw.program(self.mesh, layouts=self.layouts)(fn)

    def results(self, steps: list[Step]) -> list[str]:
        rows = self.program(steps).layouts(*self.args).rows
        return [r.layout for r in rows if r.made_by == "result"]

    def grow(self) -> str:
        """One more step; whether it goes as it is, joined before, or not at all."""
        count = len(self.args) + len(self.steps)
        names = list(UNARY | BINARY)
        name = names[self.draw.integers(len(names))]
        arity = 1 if name in UNARY else 2
        read = tuple(int(i) for i in self.draw.integers(count, size=arity))
        try:
            steps = [*self.steps, Step(name, read)]
            jax.eval_shape(lambda *args: interpret(steps, *args), *self.args)
        except (TypeError, ValueError):  # shapes that do not go together
            return "no shapes"
        try:
            self.results(steps)
        except mw.LayoutError:
            known = self.results(self.steps)
            joined = tuple((p, tuple(joins(known[i]))) for p, i in enumerate(read))
            step = Step(name, read, joined)
            try:
                self.results([*self.steps, step])
            except mw.LayoutError as error:
                assert "only where it divides" in str(error) or "minor axes" in str(error)
                return "uneven"
            self.steps.append(step)
            return "joined"
        self.steps.append(Step(name, read))
        return "as it is"


def check(seed: int) -> Counter[str]:
    author = Author(seed)
    went = Counter(author.grow() for _ in range(9))
    program = author.program(author.steps)
    layouts = author.results(author.steps)
    made = program.partition(*author.args)
    got = jax.tree.leaves(made.simulate(*author.args))
    want = on_one_device(lambda *args: interpret(author.steps, *args))(*author.args)
    for held, value, layout in zip(got, want, layouts, strict=True):
        array = np.asarray(held)
        if "Unreduced" in layout:
            array = getattr(np, layout.split('"')[1])(array, axis=0)
        np.testing.assert_allclose(array, value, rtol=2e-4, atol=2e-5, err_msg=f"{author.steps}")
    return went


@pytest.mark.parametrize("seed", [1, 2, 6, 18])
def test_random_programs(seed):
    went = check(seed)
    assert went["as it is"]


@pytest.mark.slow
def test_many_random_programs():
    went = sum((check(seed) for seed in range(200)), Counter())
    assert min(went["as it is"], went["joined"]) > 100
