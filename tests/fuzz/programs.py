"""A random program as data: inputs, steps written as Python text, outputs, hints.

A step is one line of Python with its operands' names left open, so a program can be run with and
without hints, cut into smaller ones, and printed as something that a person can run.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

OPEN = P.UNCONSTRAINED
MESHES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("x", 2), ("y", 2)),
    (("x", 4),),
    (("x", 2), ("y", 3)),
    (("x", 8),),
    (("x", 2), ("y", 2), ("z", 2)),
    (("x", 3),),
    (("x", 2), ("y", 4)),
    (("x", 5),),
    (("x", 6),),
    (("x", 3), ("y", 2)),
    (("x", 1), ("y", 4)),
    (("x", 2), ("y", 3), ("z", 2)),
)

# Per dim the names of axes, or None for one that is left open.
Spec = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Input:
    """An argument: its type, what its numbers are like, and its sharding (None: left open).

    low, high: of integers. The dtype "key" is a typed key, "raw" the two words of one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    low: int = -9
    high: int = 9
    spec: Spec | None = None


@dataclass(frozen=True)
class Step:
    """One line: `name = text`, `{0}` and so on standing for operands, `{spec}` for the hint.

    The text may call its `bodies` by their names. The dtype "tuple" is that of several values.
    """

    name: str
    text: str
    operands: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None = None
    bodies: tuple["Body", ...] = ()

    def lines(self) -> list[str]:
        """As Python."""
        spec = "" if self.spec is None else show_spec(self.spec)
        before = [line for body in self.bodies for line in body.lines()]
        return [*before, f"{self.name} = {self.text.format(*self.operands, spec=spec)}"]

    def reads(self) -> set[str]:
        """The names in it; of what its bodies make and read themselves too."""
        return set(self.operands).union(*(body.reads() for body in self.bodies))


@dataclass(frozen=True)
class Body:
    """A function inside a step: of a loop, of a branch. It may read all that is around it.

    It returns `text`, `{0}` and so on standing for names in `returned`.
    """

    name: str
    parameters: tuple[Input, ...]
    steps: tuple[Step, ...]
    text: str
    returned: tuple[str, ...]

    def lines(self) -> list[str]:
        """As Python."""
        inner = [line for step in self.steps for line in step.lines()]
        inner.append(f"return {self.text.format(*self.returned)}")
        head = f"def {self.name}({', '.join(p.name for p in self.parameters)}):"
        return [head, *(f"    {line}" for line in inner)]

    def reads(self) -> set[str]:
        """The names in it."""
        return set(self.returned).union(*(step.reads() for step in self.steps))

    def trimmed(self) -> "Body":
        """Without steps that it does not need."""
        return replace(self, steps=needed_steps(self.steps, set(self.returned)))


def needed_steps(steps: Sequence[Step], needed: set[str]) -> tuple[Step, ...]:
    """The steps that make some names, and what these need in turn, which joins the names."""
    kept = []
    for step in reversed(steps):
        if step.name in needed:
            kept.append(replace(step, bodies=tuple(b.trimmed() for b in step.bodies)))
            needed |= kept[-1].reads()
    return tuple(kept[::-1])


def all_steps(steps: Sequence[Step]) -> Iterator[Step]:
    """Steps and those inside their bodies."""
    for step in steps:
        yield step
        for body in step.bodies:
            yield from all_steps(body.steps)


@dataclass(frozen=True)
class Case:
    """A program, its mesh, and what is asked of its results.

    `outputs` are names with the shardings wanted of them; with `grad` the gradients of a scalar
    of them by every float input are returned too.
    """

    axes: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, Spec | None], ...]
    grad: bool = False
    seed: int = 0

    def body(self) -> list[str]:
        """The lines of the program."""
        arguments = ", ".join(i.name for i in self.inputs)
        lines = [f"def program({arguments}):"]
        lines += [f"    {line}" for step in self.steps for line in step.lines()]
        return [*lines, f"    return ({', '.join(name for name, _ in self.outputs)},)"]


def show_spec(spec: Spec) -> str:
    """A spec as Python."""
    entries = [
        "OPEN" if e is None else "None" if not e else repr(e if len(e) > 1 else e[0]) for e in spec
    ]
    return f"P({', '.join(entries)})"


def spec_of(spec: Spec | None) -> P | None:
    """A spec as JAX has it."""
    if spec is None:
        return None
    return P(*(OPEN if e is None else (e if len(e) > 1 else e[0]) if e else None for e in spec))


@jax.custom_jvp
def bent(x: jax.Array) -> jax.Array:
    """A function with a derivative of its own."""
    return jnp.tanh(x) * 1.5


bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0] * (1.5 - bent(*primals) ** 2)))


@jax.custom_vjp
def scaled(x: jax.Array) -> jax.Array:
    """A function whose backward pass is its own, with a residual."""
    return x / (1.0 + jnp.abs(x))


def _scaled_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g / (1.0 + jnp.abs(x)) ** 2,)


scaled.defvjp(lambda x: (scaled(x), x), _scaled_backward)

SHARED_NAMES = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "P": P,
    "OPEN": OPEN,
    "bent": bent,
    "scaled": scaled,
}


def function_of(case: Case, hinted: bool) -> Callable[..., Any]:
    """The program as a function; without hints, what one device computes."""
    names: dict[str, Any] = dict(SHARED_NAMES)
    names["hint"] = mw.shard if hinted else lambda x, spec: x
    names["constrain"] = _constraint(case) if hinted else lambda x, spec: x
    exec(compile("\n".join(case.body()), "<program>", "exec"), names)
    program = names["program"]
    return with_gradients(program, case) if case.grad else program


def _constraint(case: Case) -> Callable[[Any, P], Any]:
    mesh = abstract_mesh(case)
    return lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def abstract_mesh(case: Case) -> jax.sharding.AbstractMesh:
    """The mesh without devices."""
    auto = (jax.sharding.AxisType.Auto,) * len(case.axes)
    sizes = tuple(n for _, n in case.axes)
    return jax.sharding.AbstractMesh(sizes, tuple(a for a, _ in case.axes), axis_types=auto)


def with_gradients(program: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """The results, and the gradients of a scalar of all of them by every float input."""
    floats = tuple(
        k for k, i in enumerate(case.inputs) if i.dtype in ("float32", "bfloat16", "float16")
    )

    def both(*args: Any) -> Any:
        def scalar(*given: Any) -> Any:
            filled = list(args)
            for k, value in zip(floats, given, strict=True):
                filled[k] = value
            results = program(*filled)
            return sum([weighed(r) for r in results if weighs(r)], jnp.zeros(())), results

        if not floats:
            return program(*args)
        given = [args[k] for k in floats]
        grads, results = jax.grad(scalar, tuple(range(len(floats))), has_aux=True)(*given)
        return (*results, *grads)

    return both


def weighs(result: Any) -> bool:
    """Whether a result has a gradient."""
    return bool(jnp.issubdtype(result.dtype, jnp.inexact)) and result.size > 0


def weighed(result: Any) -> Any:
    """A scalar in which every element counts differently."""
    if jnp.issubdtype(result.dtype, jnp.complexfloating):
        return weighed(jnp.real(result)) + weighed(jnp.imag(result) * 0.5)
    return jnp.mean(jnp.sin(result.astype(jnp.float32) + 0.3))


def arguments_of(case: Case) -> list[Any]:
    """The numbers of every input: by the case's seed and the input's name alone."""
    return [values_of(i, case.seed) for i in case.inputs]


def values_of(given: Input, seed: int) -> Any:
    """The numbers of one input."""
    number = int.from_bytes(given.name.encode(), "little")
    draw = np.random.default_rng([seed, number])
    if given.dtype in ("key", "raw"):
        keys = jax.random.key(int(draw.integers(1 << 30)))
        count = given.shape if given.dtype == "key" else given.shape[:-1]
        keys = jax.random.split(keys, count) if count else keys
        return keys if given.dtype == "key" else np.asarray(jax.random.key_data(keys))
    if given.dtype == "bool":
        return draw.integers(0, 2, given.shape).astype(np.bool_)
    dtype = jnp.dtype(given.dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return draw.integers(given.low, given.high, given.shape, endpoint=True).astype(dtype)
    numbers = np.clip(draw.normal(0, 0.8, given.shape), -2, 2)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        numbers = numbers + 1j * np.clip(draw.normal(0, 0.8, given.shape), -2, 2)
    return np.asarray(numbers).astype(dtype)


def type_of(given: Input) -> jax.ShapeDtypeStruct:
    """The abstract value of an input."""
    if given.dtype == "key":
        return jax.ShapeDtypeStruct(given.shape, jax.random.key(0).dtype)
    dtype = jnp.uint32 if given.dtype == "raw" else jnp.dtype(given.dtype)
    return jax.ShapeDtypeStruct(given.shape, dtype)


def random_spec(
    draw: random.Random, rank: int, axes: Sequence[tuple[str, int]], may_open: bool
) -> Spec:
    """Axes spread at random over dims; none twice."""
    left = [a for a, _ in axes]
    draw.shuffle(left)
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in left:
        if rank and draw.random() < 0.7:
            dims[draw.randrange(rank)].append(axis)
    opened = [may_open and not d and draw.random() < 0.4 for d in dims]
    return tuple(None if o else tuple(d) for d, o in zip(dims, opened, strict=True))


def without_unused(case: Case) -> Case:
    """The case without steps and inputs that no output needs."""
    used = {name for name, _ in case.outputs}
    steps = needed_steps(case.steps, used)
    return replace(case, inputs=tuple(i for i in case.inputs if i.name in used), steps=steps)


def size_of(shape: Sequence[int]) -> int:
    """How many elements."""
    return math.prod(shape)
