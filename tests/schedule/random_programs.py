"""Random programs for one device of many, as Python text, and arguments for them.

Nearly all are *exact*: their floats are small whole numbers, so that sums are the same in any order
and whatever a schedule does must keep every bit. The others have functions like tanh, and nothing
that jumps where its argument is rounded.

Which devices may differ in a value is followed as the program is written, by what each line does.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from tests.meshes import mesh_of
from tests.schedule.random_lines import Kind, Line, Value, sum_over
from tests.schedule.random_operators import KINDS, binary

MESHES: tuple[dict[str, int], ...] = (
    {"x": 4},
    {"x": 8},
    {"x": 2, "y": 4},
    {"x": 2, "y": 2, "z": 2},
    {"x": 3, "y": 2},
    {"x": 2},
)
SIZES = (1, 2, 3, 4, 5, 6, 8, 8, 12, 16)
LARGEST = 1 << 10  # elements of a value
EXACT_BELOW = {"float32": 1 << 22, "bfloat16": 1 << 7}
NAMES: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}


@dataclass(frozen=True)
class Argument:
    """An argument of the program: the global type, the spec, and the value on one device."""

    value: Value
    shape: tuple[int, ...]
    spec: P


@dataclass
class RandomProgram:
    """A program while it is written, and what it is when it is done."""

    seed: int
    mesh: dict[str, int]
    is_exact: bool
    arguments: list[Argument] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[tuple[str, P]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def text(self) -> str:
        """The program as Python."""
        names = ", ".join(a.value.name for a in self.arguments)
        results = ", ".join(name for name, _ in self.outputs)
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({names}):\n{body}    return ({results},)\n"

    def function(self) -> Callable[..., Any]:
        """The program as a function of local arrays."""
        names = dict(NAMES)
        exec(self.text(), names)
        return names["program"]

    def made(self) -> mw.SpmdProgram:
        """The program as schedules take it."""
        return mw.SpmdProgram.from_shard_map(
            self.function(),
            mesh_of(**self.mesh),
            tuple(a.spec for a in self.arguments),
            tuple(spec for _, spec in self.outputs),
            *self.numbers(),
        )

    def numbers(self) -> list[np.ndarray]:
        """Arguments, the same for the same seed."""
        draw = np.random.default_rng(self.seed)
        return [self._numbers(a, draw) for a in self.arguments]

    def _numbers(self, argument: Argument, draw: np.random.Generator) -> np.ndarray:
        dtype = argument.value.dtype
        if dtype == "bool":
            return draw.integers(0, 2, argument.shape).astype(bool)
        if self.is_exact or not argument.value.is_float:
            low = 0 if dtype.startswith("u") else -4
            return draw.integers(low, 5, argument.shape).astype(_host(dtype))
        return draw.normal(size=argument.shape).astype(_host(dtype))


def _host(dtype: str) -> Any:
    return jnp.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def random_program(seed: int, length: int = 14, kinds: Sequence[Kind] = KINDS) -> RandomProgram:
    """The program of a seed, of lines of some kinds."""
    rng = random.Random(seed)
    program = RandomProgram(seed, rng.choice(MESHES), rng.random() < 0.8)
    _draw_arguments(program, rng)
    first = [sum_over, binary]
    for number in range(length):
        kind = first[number] if number < len(first) else rng.choice(kinds)
        for _ in range(4):
            proposed = kind(program, rng)
            if proposed is not None and append(program, proposed):
                break
    _draw_results(program, rng)
    return program


def _draw_arguments(program: RandomProgram, rng: random.Random) -> None:
    axes = list(program.mesh)
    shapes = [_shape(rng)] * 4 + [_shape(rng)]
    for number in range(rng.randint(2, 5)):
        shape = rng.choice(shapes)
        kinds = ["float32"] * 6 + ["int32", "bool", "int8"] + ["bfloat16"] * program.is_exact
        dtype = "float32" if number < 2 else rng.choice(kinds)
        group = tuple(rng.sample(axes, rng.randint(1, len(axes))))
        lies = "own" if number == 0 else rng.choice(["own", "sliced", "whole", "whole", "whole"])
        name = f"a{number}"
        if lies == "own":
            count = math.prod(program.mesh[a] for a in group)
            value = Value(name, (1, *shape), dtype, frozenset(group), 4.0)
            program.arguments.append(Argument(value, (count, *shape), P(group)))
        elif lies == "sliced" and shape:
            dim = rng.randrange(len(shape))
            count = math.prod(program.mesh[a] for a in group)
            whole = tuple(n * count if d == dim else n for d, n in enumerate(shape))
            value = Value(name, shape, dtype, frozenset(group), 4.0)
            spec = P(*(group if d == dim else None for d in range(len(shape))))
            program.arguments.append(Argument(value, whole, spec))
        else:
            value = Value(name, shape, dtype, frozenset(), 4.0)
            program.arguments.append(Argument(value, shape, P()))
        program.values.append(value)
        if lies == "own":
            append(program, Line("{0}[0]", (value,), value.bound))


def _shape(rng: random.Random) -> tuple[int, ...]:
    rank = rng.choice((0, *[1] * 6, *[2] * 6, 3))
    return tuple(rng.choice(SIZES) for _ in range(rank))


def append(program: RandomProgram, line: Line, name: str | None = None) -> Value | None:
    """Write a line if it can be traced and its numbers stay exact; the value it makes."""
    text = line.text.format(*(v.name for v in line.operands))
    found = _traced(program, text, line.operands)
    if found is None or math.prod(found.shape) > LARGEST:
        return None
    varying = frozenset().union(*(v.varying for v in line.operands))
    varying = (varying - {*line.merged}) | {*line.parted}
    name = name or f"v{len(program.lines)}"
    dtype = str(found.dtype)
    is_total = not varying and (bool(line.merged) or any(v.is_total for v in line.operands))
    value = Value(name, found.shape, dtype, varying, line.bound, is_total)
    if program.is_exact and value.is_float:
        if line.bound > EXACT_BELOW[dtype]:
            return None
        if line.bound > 50:
            text, value = f"lax.rem({text}, jnp.{dtype}(13))", replace(value, bound=12.0)
    program.read.update(v.name for v in line.operands)
    program.lines.append(f"{name} = {text}")
    program.values.append(value)
    return value


def _traced(program: RandomProgram, text: str, operands: Sequence[Value]) -> Any:
    """The type of what a line makes, None where it cannot be."""
    names = {v.name: i for i, v in enumerate(operands)}
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]

    def line(*arrays: Any) -> Any:
        return eval(text, {**NAMES, **{name: arrays[i] for name, i in names.items()}})

    try:
        closed = _jax.make_jaxpr_over_axes(line, list(program.mesh.items()), types)
    except (TypeError, ValueError, ZeroDivisionError, IndexError, NotImplementedError):
        return None
    return closed.out_avals[0] if len(closed.out_avals) == 1 else None


def _draw_results(program: RandomProgram, rng: random.Random) -> None:
    """What nothing reads, and some more: replicated ones as such, others side by side; states."""
    made = [v for v in program.values if v.name.startswith("v")]
    for argument in program.arguments:
        given = argument.value
        if given.varying or not given.is_float or rng.random() < 0.3:
            continue
        alike = [v for v in made if v.shape == given.shape and v.dtype == given.dtype]
        alike = [v for v in alike if not v.varying]
        if alike:
            program.states[given.name] = len(program.outputs)
            program.outputs.append((rng.choice(alike[-3:]).name, P()))
    unread = [v for v in made if v.name not in program.read]
    for value in [*unread, *rng.sample(made, rng.randint(0, 2))]:
        order = tuple(a for a in program.mesh if a in value.varying)
        if not order:
            program.outputs.append((value.name, P()))
        else:
            program.outputs.append((f"{value.name}[None]", P(order)))
