"""One row of the table of operator variants, and the equation it stands for.

Arguments are written as text, `"f32[4,6] i32[3,1]<4"`: a dtype, a shape, and perhaps from where
the numbers come. The default is mixed-sign and never zero or one, so that no term can be lost or
counted twice unseen.

    +      positive          u      between 0 and 1        s      symmetric positive definite
    <n     integers in 0..n-1         ~n     integers of which two thirds are in 0..n-1
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise._jax import JaxprEqn, Literal
from meshwise.rules.registry import REGISTRY, OpRule

DTYPES = {
    "f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "c64": jnp.complex64,
    "i32": jnp.int32, "i8": jnp.int8, "u8": jnp.uint8, "u32": jnp.uint32, "bool": jnp.bool_,
    "f8": jnp.float8_e4m3fn,
}  # fmt: skip
ARGUMENT = re.compile(r"(key|rbg|[a-z]+\d*)\[([\d,]*)\]([+us]|[<~]\d+)?")


@dataclass(frozen=True)
class Case:
    """A function of arrays whose equation `primitive` has the factor rule `text`.

    primitive: the first equation of this name is the one meant.
    timid: factor (by letter) -> why it is whole although a naive split is right.
    unclaimed: operands -> why a sum may not pass although it would.
    tolerance: relative, where it is not a few roundings of the result's dtype.
    """

    name: str
    primitive: str
    function: Callable[..., Any]
    arguments: str
    text: str
    timid: str = ""
    unclaimed: str = ""
    tolerance: float = 0.0

    def values(self) -> list[Any]:
        """Random arguments, the same in every run."""
        rng = np.random.default_rng(sum(map(ord, self.name)))
        return [_random(rng, *found) for found in ARGUMENT.findall(self.arguments)]

    @cached_property
    def equation(self) -> JaxprEqn:
        """The equation that the case is about."""
        for eqn in _equations(self._traced.jaxpr):
            if eqn.primitive.name == self.primitive:
                return eqn
        raise AssertionError(f"{self.name} has no equation {self.primitive}: {self._traced}")

    @cached_property
    def operands(self) -> list[Any]:
        """Values of the equation's operands for the random arguments; literals included."""
        closed = self._traced
        walk = _walk(closed.jaxpr, [*closed.consts, *self.values()])
        return next(operands for eqn, operands in walk if eqn is self.equation)

    @cached_property
    def rule(self) -> OpRule:
        """The registered rule of the equation."""
        return REGISTRY.describe(self.equation)

    @cached_property
    def _traced(self) -> Any:
        return jax.make_jaxpr(self.function)(*self.values())


def _equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Each equation; calls are entered."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            yield from _equations(eqn.params["jaxpr"].jaxpr)
        else:
            yield eqn


def _walk(jaxpr: Any, values: Sequence[Any]) -> Iterator[tuple[JaxprEqn, list[Any]]]:
    """Each equation with the values of its operands; calls are entered."""
    environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
    for eqn in jaxpr.eqns:
        operands = [
            np.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else environment[a]
            for a in eqn.invars
        ]
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            yield from _walk(inner.jaxpr, [*inner.consts, *operands])
        else:
            yield eqn, operands
        environment.update(zip(eqn.outvars, apply(eqn, operands), strict=True))


def apply(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation by XLA; compiled once for the same types."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _random(rng: np.random.Generator, dtype: str, dims: str, source: str) -> Any:
    shape = tuple(int(n) for n in dims.split(",") if n)
    if dtype in ("key", "rbg"):
        seeds = rng.integers(0, 2**31, shape)
        impl = "threefry2x32" if dtype == "key" else "rbg"

        def make(seed):
            return jax.random.key(seed, impl=impl)

        return jax.vmap(make)(jnp.asarray(seeds).ravel()).reshape(shape) if shape else make(seeds)
    if source[:1] in ("<", "~"):
        bound = int(source[1:])
        found = rng.integers(0, bound, shape)
        if source[0] == "~":
            outside = rng.choice([-bound - 3, -2, -1, bound, bound + 1, 2 * bound], shape)
            third = np.arange(found.size).reshape(shape) % 3 == 1
            found = np.where(third, outside, found)
        return np.asarray(found, DTYPES[dtype])
    return np.asarray(numbers(rng, DTYPES[dtype], shape, source))


def numbers(rng: np.random.Generator, dtype: Any, shape: Sequence[int], source: str = "") -> Any:
    """Numbers of mixed signs, none of them zero, one or near it."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if source == "s":
        root = rng.normal(size=shape)
        return (root @ np.swapaxes(root, -1, -2) + 3 * np.eye(shape[-1])).astype(dtype)
    if source == "u":
        return rng.uniform(0.05, 0.95, shape).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.integer):
        size = rng.integers(2, 9, shape)
        signed = jax.dtypes.issubdtype(dtype, np.signedinteger) and source != "+"
        return (size * rng.choice([-1, 1], shape) if signed else size).astype(dtype)
    size = rng.uniform(1.1, 2.3, shape) ** rng.choice([-1, 1], shape)
    found = size if source == "+" else size * rng.choice([-1, 1], shape)
    if dtype.kind == "c":
        found = found + 1j * rng.uniform(1.1, 2.3, shape) * rng.choice([-1, 1], shape)
    return found.astype(dtype)
