"""Make a random program: a pool of values that operators read and add to."""

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tests.fuzz.programs import (
    MESHES,
    SHARED_NAMES,
    Case,
    Input,
    Spec,
    Step,
    random_spec,
    size_of,
    without_unused,
)

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 24)
MOST_ELEMENTS = 4096
MOST_INPUTS = 7
LARGEST = 20.0  # values above this are brought down
FLOATS = ("float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
INTEGERS = ("int32", "uint8", "int8", "uint32")


@dataclass(frozen=True)
class Value:
    """A value of the program: `bound` is about how large its numbers get."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float = 2.0

    @property
    def rank(self) -> int:
        """How many dims."""
        return len(self.shape)


class Maker:
    """The program so far, and the dice."""

    def __init__(self, seed: int, axes: tuple[tuple[str, int], ...]):
        self.draw = random.Random(seed)
        self.axes = axes
        self.narrow = self.draw.random() < 0.2  # whether bfloat16 takes part: it hides much
        # A few sizes a program, so that dims meet; sometimes only ones that divide.
        self.sizes = self.draw.sample(SIZES, self.draw.choice((2, 3, 4, 6)))
        if self.draw.random() < 0.3:
            self.sizes = [8, 16, self.draw.choice((4, 12, 24))]
        self.may_be_empty = self.draw.random() < 0.05
        if self.may_be_empty:
            self.sizes.append(0)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.hinted: set[str] = set()
        self.problems: list[str] = []
        self.numbers = itertools.count()
        self.depth = 0
        self.inner_operators: Operators = ()

    def inside(self, parameters: Sequence[Value]) -> "Maker":
        """A maker of a body: it reads what is here and its parameters; its steps are its own."""
        inner = copy.copy(self)
        inner.steps, inner.values = [], [*self.values, *parameters]
        inner.depth = self.depth + 1
        return inner

    def new_name(self, letter: str = "v") -> str:
        """A name that nothing has."""
        return f"{letter}{next(self.numbers)}"

    def some(self, *options: object) -> object:
        """One of the options."""
        return self.draw.choice(options)

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        return self.draw.random() < probability

    def size(self) -> int:
        """A size of a dim."""
        return self.draw.choice(self.sizes)

    def shape(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        """A shape that is not too large."""
        rank = self.draw.randint(least, most)
        shape = [self.size() for _ in range(rank)]
        while size_of(shape) > MOST_ELEMENTS // 4:
            shape[self.draw.randrange(rank)] = self.draw.choice((1, 2, 3, 4, 5))
        return tuple(shape)

    def subset(self, count: int, least: int = 0) -> list[int]:
        """Some of `0..count-1`, in order."""
        chosen = self.draw.randint(min(least, count), count)
        return sorted(self.draw.sample(range(count), chosen))

    def pick(
        self,
        dtypes: Sequence[str] = ("float32",),
        fits: Callable[[Value], bool] = lambda v: True,
        least: int = 0,
        most: int = 3,
    ) -> Value:
        """A value of some types, more likely a late one; a new input where there is none."""
        dtypes = [d for d in dtypes if self.narrow or d not in NARROW]
        found = [v for v in self.values if v.dtype in dtypes and v.rank >= least and fits(v)]
        if found and (len(self.inputs) >= MOST_INPUTS or not self.chance(0.08)):
            late = found[-5:]
            return self.draw.choice(late if self.chance(0.7) else found)
        for _ in range(50):
            value = Value("", self.shape(least, max(least, most)), dtypes[0])
            if fits(value):
                return self.fresh(value.shape, value.dtype)
        raise LookupError("nothing fits")

    def fresh(
        self, shape: Sequence[int], dtype: str = "float32", low: int = -9, high: int = 9
    ) -> Value:
        """A new input."""
        name = f"a{len(self.inputs)}"
        spec = random_spec(self.draw, len(shape), self.axes, False) if self.chance(0.7) else None
        if dtype == "raw" and spec is not None:
            spec = (*spec[:-1], ())
        self.inputs.append(Input(name, tuple(shape), dtype, low, high, spec))
        known = "uint32" if dtype == "raw" else dtype
        bound = max(abs(low), abs(high)) if known in INTEGERS else 2.0
        value = Value(name, tuple(shape), dtype, bound)
        self.values.append(value)
        return value

    def like(self, shape: Sequence[int], dtype: str = "float32") -> Value:
        """A value of this type: one that exists, or a new input."""
        shape = tuple(shape)
        found = [v for v in self.values if (v.shape, v.dtype) == (shape, dtype)]
        return self.draw.choice(found) if found and self.chance(0.7) else self.fresh(shape, dtype)

    def add(
        self, text: str, *operands: Value, bound: float = 2.0, spec: Spec | None = None
    ) -> Value | None:
        """Append a step, if its result is of a reasonable size; None where it is not."""
        names = tuple(v.name for v in operands)
        result = self._type(text, operands)
        if result is None:
            return None
        name = self.new_name()
        dtype = "key" if jnp.issubdtype(result.dtype, jax.dtypes.prng_key) else str(result.dtype)
        if len(result.shape) > 5 or size_of(result.shape) > MOST_ELEMENTS:
            return None
        self.steps.append(Step(name, text, names, tuple(result.shape), dtype, spec))
        value = Value(name, tuple(result.shape), dtype, bound)
        self.values.append(value)
        if bound > LARGEST and dtype in (*FLOATS, "complex64"):
            text = "jnp.tanh({0})" if self.chance(0.5) and dtype in FLOATS else "{0} * SCALE"
            factor = repr(2.0 ** -int(bound).bit_length())
            return self.add(text.replace("SCALE", factor), value, bound=1.0)
        return value

    def _type(self, text: str, operands: Sequence[Value]) -> jax.ShapeDtypeStruct | None:
        """The type of a step's result; a problem is noted, as an operator should not make one."""
        names = dict(SHARED_NAMES, hint=lambda x, spec: x, constrain=lambda x, spec: x)
        arguments = [f"o{k}" for k in range(len(operands))]
        source = f"lambda {', '.join(arguments)}: {text.format(*arguments, spec='None')}"
        types = []
        for v in operands:
            if v.dtype == "key":
                types.append(jax.ShapeDtypeStruct(v.shape, jax.random.key(0).dtype))
            else:
                dtype = jnp.uint32 if v.dtype == "raw" else jnp.dtype(v.dtype)
                types.append(jax.ShapeDtypeStruct(v.shape, dtype))
        try:
            return jax.eval_shape(eval(source, names), *types)
        except Exception as problem:
            shapes = [(v.shape, v.dtype) for v in operands]
            first = (str(problem).splitlines() or [""])[0]
            if not self.may_be_empty:
                self.problems.append(f"{text} of {shapes}: {type(problem).__name__} {first}")
            return None


Operator = Callable[[Maker], object]
Operators = tuple[tuple[int, Operator], ...]
LENGTHS = (3, 5, 8, 12, 20, 30)  # about how many operators a program has


@dataclass(frozen=True)
class Profile:
    """Operators by how often they come, in a program and inside bodies, and gradients' share."""

    operators: Operators
    gradients: float
    inside: Operators = ()


def fill(maker: Maker, operators: Operators, wanted: int, draw: random.Random) -> None:
    """Add operators, until there are so many steps."""
    weights = [w for w, _ in operators]
    functions = [f for _, f in operators]
    for _ in range(400):
        if len(maker.steps) >= wanted:
            break
        try:
            draw.choices(functions, weights)[0](maker)
        except LookupError:
            continue
        except ValueError:  # there is no position in an empty dim
            if not maker.may_be_empty:
                raise


def make(
    seed: int, profiles: Sequence[Profile], lengths: Sequence[int] = LENGTHS
) -> tuple[Case, list[str]]:
    """A random program, and what went wrong while it was made."""
    draw = random.Random(seed * 7919 + 1)
    profile = profiles[seed % len(profiles)]
    maker = Maker(seed, draw.choice(MESHES))
    maker.inner_operators = profile.inside
    fill(maker, profile.operators, draw.choice(lengths), draw)
    if not maker.steps:
        maker.add("jnp.tanh({0})", maker.fresh(maker.shape()))
    last = maker.steps[-1].name
    read = {name for step in maker.steps for name in step.reads()}
    values = [s for s in maker.steps if s.dtype != "tuple"]
    unread = [s.name for s in values if s.name not in read]
    more = [s.name for s in values if s.name in read and draw.random() < 0.1]
    names = list(dict.fromkeys([*unread[-5:], *more[:2], last]))
    if draw.random() < 0.15:  # an argument that is a result too, and a result returned twice
        names += [draw.choice(maker.inputs).name, draw.choice(names)]
    shapes = {x.name: x.shape for x in (*maker.inputs, *maker.steps)}
    outputs = tuple(
        (
            name,
            random_spec(draw, len(shapes[name]), maker.axes, False)
            if draw.random() < 0.5
            else None,
        )
        for name in names
    )
    grad = draw.random() < profile.gradients
    case = Case(maker.axes, tuple(maker.inputs), tuple(maker.steps), outputs, grad, seed)
    return without_unused(case), maker.problems
