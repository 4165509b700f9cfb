"""Features of a call in random combinations, each beside `jax.jit`."""

from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.drop_in.same import assert_same_outcome, mesh_of, named, put

SPECS = ((), ("x",), (None, "y"), ("x", "y"), (("x", "y"),), ("y", "x"))
ROWS = 8


@dataclass(frozen=True)
class Argument:
    """An argument of the call: what it holds, where it lies, what is said of it."""

    leaves: int  # arrays in a tree, or one by itself where 0
    spec: tuple[Any, ...] | None  # where its arrays lie, None for arrays of NumPy
    said: bool  # whether in_shardings says so too
    by_name: bool
    donated: bool


@dataclass(frozen=True)
class Call:
    """One call in all its features."""

    arguments: tuple[Argument, ...]
    static: int | None
    out: tuple[Any, ...] | None
    context: bool  # whether the mesh is in context, and shardings are PartitionSpecs
    stage: str
    keep_unused: bool


arguments = st.builds(
    Argument,
    leaves=st.integers(0, 2),
    spec=st.sampled_from((None, *SPECS)),
    said=st.booleans(),
    by_name=st.booleans(),
    donated=st.booleans(),
)
calls = st.builds(
    Call,
    arguments=st.lists(arguments, min_size=1, max_size=3).map(tuple),
    static=st.one_of(st.none(), st.integers(0, 1)),
    out=st.sampled_from((None, *SPECS)),
    context=st.booleans(),
    stage=st.sampled_from(("call", "twice", "compiled", "inside")),
    keep_unused=st.booleans(),
)


def value_of(argument: Argument, seed: int) -> Any:
    """The argument's value: rounded numbers, so that sums are the same in every order."""
    numbers = np.random.default_rng(seed)

    def array() -> Any:
        host = numbers.integers(-4, 5, (ROWS, ROWS)).astype(np.float32)
        return host if argument.spec is None else put(*argument.spec, x=host)

    if argument.leaves == 0:
        return array()
    return {f"leaf {i}": array() for i in range(argument.leaves)}


def code_of(call: Call) -> Any:
    """The call as code for one jit or the other."""
    names = [f"a{i}" for i in range(len(call.arguments))]
    by_name = [a.by_name for a in call.arguments]
    first_named = by_name.index(True) if True in by_name else len(by_name)
    says = first_named == len(by_name) and any(a.said for a in call.arguments)

    def sharding(spec: tuple[Any, ...] | None) -> Any:
        if spec is None:
            return None
        return P(*spec) if call.context else named(*spec)

    def function(a0: Any, a1: Any = 1.0, a2: Any = 2.0, n: int = 2) -> Any:
        total = sum(leaf for leaf in jax.tree.leaves((a0, a1)))
        rest = jax.tree.map(lambda x: x * n, a2)
        if not call.context:
            total = lax.with_sharding_constraint(total, named("x"))
        return {"total": total, "rest": (rest, None)}

    options: dict[str, Any] = {"keep_unused": call.keep_unused}
    donated = [n for n, a in zip(names, call.arguments, strict=True) if a.donated]
    if donated and call.stage == "call":
        options["donate_argnames"] = donated
    if call.static is not None:
        options["static_argnames"] = "n"
    if says:
        options["in_shardings"] = tuple(
            [sharding(a.spec) if a.said else None for a in call.arguments]
        )
    if call.out is not None:
        options["out_shardings"] = {"total": sharding(call.out), "rest": None}

    def code(jit: Any) -> Any:
        values = [value_of(a, i) for i, a in enumerate(call.arguments)]
        kwargs = dict(zip(names[first_named:], values[first_named:], strict=True))
        static = {} if call.static is None or says else {"n": call.static}
        if not call.context:
            return run(jit, values[:first_named], kwargs, static)
        with jax.set_mesh(mesh_of(4, 2)):
            return run(jit, values[:first_named], kwargs, static)

    def run(jit: Any, args: list[Any], kwargs: dict[str, Any], static: dict[str, Any]) -> Any:
        step = jit(function, **options)
        if call.stage == "compiled":
            program = step.lower(*args, **kwargs, **static).compile()
            return program(*args, **kwargs)["total"] + 0
        if call.stage == "inside":
            outer = jit(lambda args, kwargs: step(*args, **kwargs, **static)["total"] + 1)
            return np.asarray(outer(args, kwargs))
        outs = step(*args, **kwargs, **static)
        if call.stage == "twice":
            outs = step(*args, **kwargs, **static)
        # Of two donated arguments that fit one result either may become it, and where one of them
        # comes from the host, `jax.jit` takes the other if its sharding alone is known.
        fits_both = any(a.donated and a.spec is None for a in call.arguments)
        leaves = [] if fits_both else jax.tree.leaves((args, kwargs))
        gone = [leaf.is_deleted() for leaf in leaves if is_jax(leaf)]
        placed = outs["total"] if call.out is not None else np.asarray(outs["total"])
        return placed, [np.asarray(x) for x in jax.tree.leaves(outs["rest"])], any(gone)

    return code


def is_jax(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


@hypothesis.settings(max_examples=15)
@hypothesis.given(calls)
def test_random_calls(call):
    assert_same_outcome(code_of(call))


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(calls)
def test_many_random_calls(call):
    assert_same_outcome(code_of(call))
