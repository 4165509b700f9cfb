"""CoCoNeT's programs, tuned, beside XLA's two partitioners with the natural hints, in one run.

    python -m benchmarks.schedules [--programs NAME ...] [--parameters N] [--rounds N] [--markdown]

Ours are the programs of `examples.coconet`, and whatever `mw.autotune` makes of them without being
told more. XLA's are the same functions for one device under `jax.jit`, sharded as one would: each
device's gradient on its device and everything else replicated, or Megatron's weights. All run on
eight CPU devices, in turns; seconds are medians, ratios medians of each round's. Results are
compared with one device's. Bytes are those that a device sends (of XLA, in the compiled program).
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from benchmarks.peers import hlo
from examples.coconet import programs

KIB = 2**10
RATE = 0.1


@dataclass(frozen=True)
class Case:
    """A program of ours, the same for one device, its arguments, and how XLA is to lay them out."""

    name: str
    program: Callable[[Any], Any]
    plain: Callable[..., Any]
    axis: str
    args: Callable[[int], tuple[Any, ...]]
    specs: tuple[Any, ...]


def adam(gradient, weights, mean, square, step):
    gradient = gradient.mean(0)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = step + 1
    direction = mean / (1 - 0.9**step)
    length = jnp.sqrt(square / (1 - 0.999**step)) + 1e-6
    return weights - RATE * direction / length, mean, square, step


def lamb(gradient, weights, mean, square, step):
    gradient = gradient.mean(0)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = step + 1
    length = jnp.sqrt(square / (1 - 0.999**step)) + 1e-6
    update = mean / (1 - 0.9**step) / length + 0.01 * weights
    trust = jnp.sqrt(jnp.sum(weights**2)) / jnp.sqrt(jnp.sum(update**2))
    return weights - RATE * trust * update, mean, square, step


def dropout(key, x):
    kept = jax.random.bernoulli(key, 1 - RATE, x.shape)
    return jnp.where(kept, x / (1 - RATE), 0.0).astype(x.dtype)


def mlp(weights, x, key):
    hidden = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    x = x + dropout(key, hidden @ weights["down"] + weights["bias"])
    return programs.layer_norm(x, weights["gain"])


def self_attention(weights, x, key):
    query, key_, value = (
        jnp.einsum("bsw,whd->bhsd", x, weights[name]) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key_) / query.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    shares = dropout(jax.random.fold_in(key, 0), shares)
    heads = jnp.einsum("bhqk,bhkd->bhqd", shares, value)
    product = jnp.einsum("bhsd,hdw->bsw", heads, weights["out"])
    x = x + dropout(jax.random.fold_in(key, 1), product + weights["bias"])
    return programs.layer_norm(x, weights["gain"])


def optimizer_args(parameters: int) -> tuple[Any, ...]:
    """Gradients of eight devices, weights, moments and the number of steps."""
    draw = np.random.default_rng(0)
    found = [draw.standard_normal(n, np.float32) for n in ((8, parameters), parameters, parameters)]
    return (*found, np.abs(found[1]) + 0.1, np.float32(3))


def block_args(tokens: int) -> tuple[Any, ...]:
    """Weights of an MLP block, a batch, and a key."""
    draw = np.random.default_rng(0)
    width = 512
    weights = {
        "up": draw.standard_normal((width, 4 * width), np.float32) / 32,
        "up_bias": draw.standard_normal(4 * width, np.float32),
        "down": draw.standard_normal((4 * width, width), np.float32) / 64,
        "bias": draw.standard_normal(width, np.float32),
        "gain": draw.standard_normal(width, np.float32),
    }
    return weights, draw.standard_normal((tokens // 256, 256, width), np.float32), jax.random.key(0)


def attention_args(tokens: int) -> tuple[Any, ...]:
    """Weights of an attention block with eight heads, a batch, and a key."""
    draw = np.random.default_rng(0)
    width, heads = 512, 8
    weights = {
        name: draw.standard_normal((width, heads, width // heads), np.float32) / 32
        for name in ("query", "key", "value")
    }
    weights["out"] = draw.standard_normal((heads, width // heads, width), np.float32) / 32
    weights["bias"] = draw.standard_normal(width, np.float32)
    weights["gain"] = draw.standard_normal(width, np.float32)
    return weights, draw.standard_normal((tokens // 256, 256, width), np.float32), jax.random.key(0)


MLP = {"up": P(None, "model"), "up_bias": P("model"), "down": P("model"), "bias": P(), "gain": P()}
HEADS = P(None, "model")
ATTENTION = {"query": HEADS, "key": HEADS, "value": HEADS, "out": P("model"), "bias": P(),
             "gain": P()}  # fmt: skip
STATE = (P("data"), P(), P(), P(), P())
CASES = (
    Case("adam", programs.adam, adam, "data", optimizer_args, STATE),
    Case("lamb", programs.lamb, lamb, "data", optimizer_args, STATE),
    Case("mlp", programs.mlp, mlp, "model", block_args, (MLP, P(), P())),
    Case("self_attention", programs.self_attention, self_attention, "model", attention_args,
         (ATTENTION, P(), P())),
)  # fmt: skip


@dataclass
class Contestant:
    """One way to run a case: a compiled call, and the seconds of its runs."""

    name: str
    call: Callable[[], Any]
    sent: float
    seconds: list[float]
    error: float = 0.0


def contestants(case: Case, args: tuple[Any, ...], rounds: int) -> tuple[list[Contestant], str]:
    """XLA's two and ours, compiled, arguments in place; and our script."""
    mesh = jax.make_mesh((8,), (case.axis,), (AxisType.Auto,))
    found = []
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    ins = jax.tree.map(lambda s: NamedSharding(mesh, s), case.specs, is_leaf=is_spec)
    whole = NamedSharding(mesh, P())
    for which in hlo.PARTITIONERS:
        jax.clear_caches()
        with hlo.partitioner(which):
            step = jax.jit(case.plain, in_shardings=ins, out_shardings=whole)
            placed = jax.device_put(args, ins)
            lowered = step.lower(*placed)
            compiled = lowered.compile()
        call = lambda c=compiled, a=placed: c(*a)  # noqa: E731
        found.append(Contestant(which, call, hlo.read(lowered).wire_bytes, []))
    program = case.program(mesh)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
    tuned = mw.autotune(program, *structs, rounds=max(4, rounds // 2))
    spmd = tuned.program
    leaves = spmd.executable.placed(jax.tree.leaves(args))
    ours = Contestant("meshwise", lambda: spmd.executable(leaves), spmd.wire_bytes, [])
    return [*found, ours], tuned.script()


def measure(case: Case, size: int, rounds: int) -> tuple[list[Contestant], str]:
    """All contestants in turns."""
    args = case.args(size)
    entered, script = contestants(case, args, rounds)
    wanted = jax.tree.leaves(jax.jit(case.plain)(*args))
    for one in entered:
        results = [np.asarray(x) for x in jax.tree.leaves(one.call())]
        one.error = max(_error(r, w) for r, w in zip(results, wanted, strict=True))
    for _ in range(rounds):
        for one in entered:
            start = time.perf_counter()
            jax.block_until_ready(one.call())
            one.seconds.append(time.perf_counter() - start)
    return entered, script


def _error(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.max(np.abs(found - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


def table(rows: Sequence[tuple[str, list[Contestant]]], markdown: bool) -> Table:
    """Seconds, ratios and bytes of each program."""
    shown = Table(box=box.MARKDOWN if markdown else box.SIMPLE_HEAD)
    heads = ("program", "GSPMD ms", "Shardy ms", "ours ms", "GSPMD / ours", "Shardy / ours",
             "sent KiB", "ours KiB", "error")  # fmt: skip
    for i, head in enumerate(heads):
        shown.add_column(head, justify="left" if not i else "right")
    for name, (gspmd, shardy, ours) in rows:
        ratios = [
            median(a / b for a, b in zip(peer.seconds, ours.seconds, strict=True))
            for peer in (gspmd, shardy)
        ]
        shown.add_row(
            name,
            *(f"{median(c.seconds) * 1e3:,.1f}" for c in (gspmd, shardy, ours)),
            *(f"{r:.2f}x" for r in ratios),
            f"{min(gspmd.sent, shardy.sent) / KIB:,.0f}",
            f"{ours.sent / KIB:,.0f}",
            f"{ours.error:.0e}",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.schedules")
    names = [case.name for case in CASES]
    parser.add_argument("--programs", nargs="+", choices=names, default=names)
    parser.add_argument("--parameters", type=int, default=2**23, help="of the optimizers")
    parser.add_argument("--tokens", type=int, default=2048, help="of the blocks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args(argv)
    rows = []
    console = Console(width=None if Console().is_terminal else 120)
    for case in CASES:
        if case.name not in given.programs:
            continue
        size = given.parameters if case.axis == "data" else given.tokens
        entered, script = measure(case, size, given.rounds)
        rows.append((f"{case.name} {size}", entered))
        console.print(f"[bold]{case.name}[/]\n{script}", highlight=False)
    console.print(table(rows, given.markdown))


if __name__ == "__main__":
    main()
