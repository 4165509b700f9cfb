"""Run a program partitioned and on one device, and say where the two differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.choose.plan import Plan
from meshwise.errors import HintError, ReplicationError
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.run.simulate import simulate as simulate_compiled
from tests.fuzz.evaluate.run import evaluate, on_host
from tests.fuzz.evaluate.simulate import simulate
from tests.fuzz.pipeline import COMPLETIONS, per_device, step_of, trace
from tests.fuzz.programs import Case, all_steps, arguments_of, function_of

# Relative to the largest number of a result. Programs here are up to 30 operators deep.
# A program with a narrow float in it rounds on the way, so all of its results are looser.
TOLERANCE, NARROW_TOLERANCE = 2e-4, 1e-1
# Relative noise on float inputs, to tell an ill-conditioned program from a wrong one.
NOISE, NARROW_NOISE = 2e-6, 4e-3
NARROW = ("bfloat16", "float16", "float8")

# How a program is run: with numpy (nothing is compiled, and a hundred times faster), compiled for
# pretended devices, or on eight CPU devices.
ENGINES = ("numpy", "compiled", "real")


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


def ways_of(seed: int) -> tuple[str, ...]:
    """The ways in which the programs of a long run are planned: by dice, and as a user's are."""
    return ("dice 0", ("gspmd", "dice 1", "spread", "dice 1", "improved", "dice 1")[seed % 6])


def check(case: Case, ways: Sequence[str] = COMPLETIONS, engine: str = "compiled") -> list[Failure]:
    """Failures of a case; none where it is right, or where one device is unstable itself."""
    args = arguments_of(case)
    if engine == "numpy":
        failures, reference, wanted = _check_with_numpy(case, ways, args)
    else:
        compiled = jax.jit(function_of(case, hinted=False))

        def reference(given: Sequence[Any], noise: Any = None) -> list[np.ndarray]:
            del noise  # it computes as it is compiled
            return [on_host(x) for x in jax.tree.leaves(compiled(*given))]

        wanted = reference(args)
        failures = []
        for way in ways:
            failures += _check_compiled(case, way, args, wanted, engine == "real")
    wrong = any(f.kind == "wrong" for f in failures)
    if wrong and is_unstable(reference, args, wanted, is_narrow(case)):
        failures = [f for f in failures if f.kind != "wrong"]
    return failures


def _check_with_numpy(case: Case, ways: Sequence[str], args: list[Any]) -> tuple[Any, Any, Any]:
    """Failures of every way; the reference, and what it gives."""
    try:
        traced = trace(case, args)
    except Exception as error:
        if jax.make_jaxpr(function_of(case, hinted=False))(*args):
            return [f for way in ways for f in _raised(way, error)], None, []

    def reference(given: Sequence[Any], noise: Any = None) -> list[np.ndarray]:
        return evaluate(traced.closed, given, noise)

    wanted = reference(args)
    failures: list[Failure] = []
    for way in ways:
        try:
            plan, program = per_device(traced, way, case.seed)
            results = simulate(program, args, cuts_inside=True)
        except Exception as error:
            failures += _raised(way, error)
            continue
        failures += _judged(case, way, plan, program, results, wanted)
    return failures, reference, wanted


def _check_compiled(
    case: Case, way: str, args: list[Any], wanted: list[np.ndarray], real: bool
) -> list[Failure]:
    """By the public functions, as a user would."""
    try:
        if way.startswith("dice"):  # no public function plans so
            plan, made = per_device(trace(case, args), way, case.seed)
            return _judged(case, way, plan, made, _simulated(made, args), wanted)
        mesh = None
        if real:
            axes = tuple(a for a, _ in case.axes), tuple(n for _, n in case.axes)
            auto = (jax.sharding.AxisType.Auto,) * len(case.axes)
            devices = jax.devices()[: math.prod(axes[1])]
            mesh = jax.make_mesh(axes[1], axes[0], auto, devices=devices)
        program = step_of(case, way, mesh).partition(*args)
        results = program(*args) if real else program.simulate(*args)
    except Exception as error:
        return _raised(way, error)
    # Of an empty array, XLA's shards have the whole shape (under jax.jit as well).
    results = [
        np.zeros(x.shape, x.dtype)
        if not x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        else on_host(x)
        if isinstance(x, jax.Array)
        else np.asarray(x)
        for x in jax.tree.leaves(results)
    ]
    return _judged(case, way, program.plan, program.per_device, results, wanted)


def _simulated(program: PerDeviceProgram, args: Sequence[Any]) -> list[np.ndarray]:
    shapes = [t.shape for t in program.out_types]
    ends = program.in_shardings, program.out_shardings
    found = simulate_compiled(program.jaxpr, program.mesh, *ends, shapes, args)
    return [on_host(x) for x in found]


def _raised(way: str, error: Exception) -> list[Failure]:
    if isinstance(error, ReplicationError):
        return [Failure(way, "copies differ", str(error))]
    if isinstance(error, HintError) and "use lax.with_sharding_constraint" in str(error):
        return []  # two hints on what turned out to be one value
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return [Failure(way, "error", f"{type(error).__name__}: {' '.join(lines)[:600]}")]


def _judged(
    case: Case,
    way: str,
    plan: Plan,
    program: PerDeviceProgram,
    results: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
) -> list[Failure]:
    problems = broken_laws(plan, program)
    if problems:
        return [Failure(way, kind, detail) for kind, detail in problems]
    names = [n for n, _ in case.outputs] + [f"gradient {k}" for k in range(len(wanted))]
    for name, got, want in zip(names, results, wanted, strict=False):
        difference = compare(got, want, is_narrow(case))
        if difference:
            return [Failure(way, "wrong", f"{name}: {difference}")]
    return []


def broken_laws(plan: Plan, program: PerDeviceProgram) -> list[tuple[str, str]]:
    """What does not hold of a program whatever its numbers: hints, types, bytes, cost.

    Hints are those that somebody gave: what is derived may lie otherwise.
    """
    problems = []
    wire_bytes = sum(c.wire_bytes for c in program.collectives)
    for index, given in plan.program.hints.items():
        found = plan.equations[index].results[0].dims
        differs = any(a is not None and a != b for a, b in zip(given.dims, found, strict=True))
        if differs and not given.derived:
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
    for made, wanted in zip(program.jaxpr.out_avals, program.out_types, strict=True):
        if (made.dtype, _is_weak(made)) != (wanted.dtype, _is_weak(wanted)):
            problems.append(("type", f"{made} is made for {wanted}"))
    if plan.seconds > plan.completion_seconds * (1 + 1e-6):
        problems.append(("cost", f"{plan.seconds} is dearer than {plan.completion_seconds}"))
    counted = round(_bytes_sent(program.jaxpr, program.mesh.axis_size))
    if abs(counted - wire_bytes) > len(program.collectives):
        problems.append(("bytes", f"{wire_bytes} recorded, {counted} in the program"))
    return problems


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)


def _bytes_sent(jaxpr: Any, sizes: dict[str, int]) -> float:
    """Wire bytes of a jaxpr, by the formulas of the design.

    Of a branch the most that one sends; of a loop that ends when its data says so, one trip.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = [params.get(key) for key in ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr")]
        bytes_inside = sum(_bytes_sent(body, sizes) for body in inner if hasattr(body, "eqns"))
        total += bytes_inside * (params["length"] if name == "scan" else 1)
        if name == "cond":
            total += max(_bytes_sent(branch, sizes) for branch in params["branches"])
        over = params.get("axes", params.get("axis_name", ()))
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


def is_narrow(case: Case) -> bool:
    """Whether a narrow float takes part."""
    steps = list(all_steps(case.steps))
    types = any(x.dtype.startswith(NARROW) for x in (*case.inputs, *steps))
    return types or any(n in s.text for n in NARROW for s in steps)


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
    """Whether a little noise on inputs and sums changes results as much as what is called wrong.

    A comparison or sort of almost equal numbers, say, or a loop that makes differences grow.
    """
    for trial in range(6):
        draw = np.random.default_rng(trial)
        noise = NARROW_NOISE if narrow else NOISE
        noisy = [_noisy(a, draw, noise) for a in args]
        found = reference(noisy, partial(_noisy, draw=draw, noise=noise / 10))
        if any(compare(f, w, narrow) for f, w in zip(found, wanted, strict=True)):
            return True
    return False


def _noisy(array: Any, draw: np.random.Generator, noise: float) -> Any:
    if str(getattr(array, "dtype", "")) not in ("float32", "complex64", *NARROW):
        return array
    return (array * (1 + noise * draw.standard_normal(array.shape))).astype(array.dtype)
