"""Run a program partitioned and on one device, and say where the two differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwise as mw
from meshwise import _jax
from meshwise.cost.hardware import GENERIC
from meshwise.errors import HintError, ReplicationError
from tests.fuzz.programs import (
    Case,
    abstract_mesh,
    arguments_of,
    function_of,
    spec_of,
)

# "spread" is the default on a device where computing is slow and a collective costs no launch, so
# that small programs are split as large ones are.
COMPLETIONS = ("gspmd", "improved", "spread")
SLOW = replace(GENERIC, name="slow", flops_per_s=1e9, launch_s=0.0)
# Relative to the largest number of a result. Programs here are up to 30 operators deep.
# A program with bfloat16 in it rounds on the way, so all of its results are looser.
TOLERANCE, NARROW_TOLERANCE = 2e-4, 1e-1
# Relative noise on float inputs, to tell an ill-conditioned program from a wrong one.
NOISE, NARROW_NOISE = 2e-6, 4e-3


@dataclass(frozen=True)
class Failure:
    """What went wrong: kind is "error", "wrong", "copies differ", "bytes", "hint" or "cost"."""

    completion: str
    kind: str
    detail: str

    def same_as(self, other: "Failure") -> bool:
        """Whether a smaller case fails as this one does."""
        if (self.completion, self.kind) != (other.completion, other.kind):
            return False
        return self.kind != "error" or self.detail.split(":")[0] == other.detail.split(":")[0]


def check(
    case: Case, completions: Sequence[str] = COMPLETIONS, real: bool = False
) -> list[Failure]:
    """Failures of a case; none where it is right, or where one device is unstable itself."""
    args = arguments_of(case)
    reference = jax.jit(function_of(case, hinted=False))
    wanted = [_host(x) for x in reference(*args)]
    failures = []
    for completion in completions:
        failures += _check_one(case, completion, args, wanted, real)
    wrong = any(f.kind == "wrong" for f in failures)
    if wrong and is_unstable(reference, args, wanted, is_narrow(case)):
        failures = [f for f in failures if f.kind != "wrong"]
    return failures


def _check_one(
    case: Case, completion: str, args: list[Any], wanted: list[np.ndarray], real: bool
) -> list[Failure]:
    def failed(kind: str, detail: str) -> list[Failure]:
        return [Failure(completion, kind, detail)]

    try:
        program = partitioned(case, completion, args, real)
        results = program(*args) if real else program.simulate(*args)
    except ReplicationError as error:
        return failed("copies differ", str(error))
    except HintError as error:
        # Two hints on what turned out to be one value.
        return (
            []
            if "use lax.with_sharding_constraint" in str(error)
            else failed("error", f"HintError: {error}")
        )
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return failed("error", f"{type(error).__name__}: {' '.join(lines)[:600]}")
    problems = broken_laws(case, program)
    if problems:
        return [Failure(completion, kind, detail) for kind, detail in problems]
    names = [n for n, _ in case.outputs] + [f"gradient {k}" for k in range(len(wanted))]
    for name, got, want in zip(names, results, wanted, strict=False):
        difference = compare(_host(got), want, is_narrow(case))
        if difference:
            return failed("wrong", f"{name}: {difference}")
    return []


def partitioned(case: Case, completion: str, args: Sequence[Any], real: bool = False) -> Any:
    """The per-device program of a case."""
    outs = tuple(spec_of(spec) for _, spec in case.outputs)
    results = jax.eval_shape(function_of(case, hinted=False), *args)
    outs += (None,) * (len(results) - len(outs))
    mesh: Any = abstract_mesh(case)
    if real:
        mesh = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)
    step = mw.jit(
        function_of(case, hinted=True),
        mesh=mesh,
        in_shardings=tuple(spec_of(i.spec) for i in case.inputs),
        out_shardings=outs,
        completion="gspmd" if completion == "gspmd" else "improved",
        hardware=SLOW if completion == "spread" else GENERIC,
    )
    return step.partition(*args)


def broken_laws(case: Case, program: Any) -> list[tuple[str, str]]:
    """What does not hold of a program whatever its numbers: hints, bytes, cost."""
    problems = []
    if program.wire_bytes != sum(c.wire_bytes for c in program.collectives):
        problems.append(("bytes", f"{program.wire_bytes} is not the sum of the records"))
    plan, mesh = program.plan, program.per_device.mesh
    for index, given in plan.program.hints.items():
        found = plan.equations[index].results[0].dims
        if any(a is not None and a != b for a, b in zip(given.dims, found, strict=True)):
            problems.append(("hint", f"{given.given_as} at {given.source} became {found}"))
    ends = (
        (plan.program.in_hints, plan.in_shardings, "in"),
        (plan.program.out_hints, plan.out_shardings, "out"),
    )
    for hints, shardings, where in ends:
        for given, found in zip(hints, shardings, strict=True):
            pairs = zip(given.dims, found.dims, strict=True) if given else ()
            if found.unreduced or any(a is not None and a != b for a, b in pairs):
                problems.append(("hint", f"{where}: {given} became {found}"))
    if plan.seconds > plan.completion_seconds * (1 + 1e-6):
        problems.append(("cost", f"{plan.seconds} is dearer than {plan.completion_seconds}"))
    counted = round(_bytes_sent(program.jaxpr, mesh.axis_size))
    if abs(counted - program.wire_bytes) > len(program.collectives):
        problems.append(("bytes", f"{program.wire_bytes} recorded, {counted} in the program"))
    return problems


def _bytes_sent(jaxpr: Any, sizes: dict[str, int]) -> float:
    """Wire bytes of a jaxpr without loops, by the formulas of the design."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        for inner in (eqn.params.get("jaxpr"), eqn.params.get("call_jaxpr")):
            total += _bytes_sent(inner, sizes) if hasattr(inner, "eqns") else 0
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        over = over if isinstance(over, tuple) else (over,)
        n = math.prod(sizes[a] for a in over if isinstance(a, str))
        operands = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        if name in ("psum", "pmax", "pmin"):
            total += 2 * (n - 1) / n * operands
        elif name == "all_gather":
            total += (n - 1) * operands
        elif name in ("reduce_scatter", "all_to_all"):
            total += (n - 1) / n * operands
        elif name == "ppermute":
            total += operands
    return total


def _host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, _jax.extended):
        array = jax.random.key_data(array)
    return np.asarray(array)


def is_narrow(case: Case) -> bool:
    """Whether bfloat16 takes part."""
    return any("bfloat16" in x.dtype for x in (*case.inputs, *case.steps))


def compare(got: np.ndarray, want: np.ndarray, narrow: bool = False) -> str:
    """Where two arrays differ by more than rounding; empty where they do not."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    if got.size == 0:
        return ""
    tolerance = NARROW_TOLERANCE if narrow else TOLERANCE
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        bad = got != want
    else:
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        got, want = got.astype(wide), want.astype(wide)
        finite = np.abs(want[np.isfinite(want)])
        scale = max(1e-2, float(finite.max())) if finite.size else 1.0
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(got - want) <= tolerance * scale)
        bad &= ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if not bad.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{int(bad.sum())} of {bad.size} differ; at {list(place)} {got[place]}, not {want[place]}"
    )


def is_unstable(
    reference: Any, args: Sequence[Any], wanted: Sequence[np.ndarray], narrow: bool
) -> bool:
    """Whether a little noise on the inputs changes results as much as what is called wrong.

    A comparison or sort of almost equal numbers, say.
    """
    for trial in range(6):
        draw = np.random.default_rng(trial)
        noisy = [_noisy(a, draw, NARROW_NOISE if narrow else NOISE) for a in args]
        found = [_host(x) for x in reference(*noisy)]
        if any(compare(f, w, narrow) for f, w in zip(found, wanted, strict=True)):
            return True
    return False


def _noisy(array: Any, draw: np.random.Generator, noise: float) -> Any:
    if str(getattr(array, "dtype", "")) not in ("float32", "complex64", "bfloat16"):
        return array
    return (array * (1 + noise * draw.standard_normal(array.shape))).astype(array.dtype)
