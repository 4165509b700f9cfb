"""One operator a row: the bytes each device sends, beside XLA's two partitioners, in one run.

    python -m benchmarks.operators [NAME ...] [--markdown]

Every program is written as for one device; operands and results are sharded as the row says, over
a mesh of eight devices. Bytes are read from what each partitioner emits, before the passes of one
backend change it (of XLA the lower of "as emitted" and "with all-reduces of which a device keeps a
part counted as reduce-scatters"). Ours also runs on the eight devices, and its result is compared
with one device's; so is XLA's, which is not always right.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from benchmarks.peers import hlo

KIB = 2**10


@dataclass(frozen=True)
class Row:
    """A program, the shapes of its operands, and how they and the result lie on the mesh.

    A shape of integers has their bound as its last entry, behind None: `(64, None, 9)`.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int | None, ...], ...]
    ins: tuple[P, ...]
    outs: P
    mesh: tuple[int, ...] = (8,)


def conv(**options: Any) -> Callable[..., Any]:
    """A convolution of images with their channels last."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


SAME = conv(window_strides=(1, 1), padding="SAME")
GROUPED = conv(window_strides=(1, 1), padding="SAME", feature_group_count=2)


def gradient(function: Callable[..., Any], which: int = 0) -> Callable[..., Any]:
    """The gradient of one argument; the last operand is the cotangent."""
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])[which]


def max_pool(x: jax.Array) -> jax.Array:
    """Windows of three that move by two."""
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of integer labels."""
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -rows.mean()


def jacobi(u: jax.Array) -> jax.Array:
    """A step of a stencil that leaves its boundary as it is."""
    inner = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    return u.at[1:-1, 1:-1].set(inner)


X, NONE, COLUMNS, TILES = P("x"), P(), P(None, "x"), P(None, "x", "y")
IMAGE = (4, 64, 64, 16)
ROWS = (1024, 64)

TABLE = [
    Row("conv 3x3, rows sharded", SAME, (IMAGE, (3, 3, 16, 16)), (COLUMNS, NONE), COLUMNS),
    Row("conv 3x3, rows and columns", SAME, (IMAGE, (3, 3, 16, 16)), (TILES, NONE), TILES, (2, 4)),
    Row("conv 19x3, wider than a shard", SAME, (IMAGE, (19, 3, 16, 16)), (COLUMNS, NONE), COLUMNS),
    Row("conv, gradient of the kernel", gradient(SAME, 1), (IMAGE, (3, 3, 16, 16), IMAGE),
        (COLUMNS, NONE, COLUMNS), NONE),
    Row("grouped conv, batch sharded", GROUPED, ((16, 32, 32, 16), (3, 3, 8, 16)), (X, NONE), X),
    Row("max pooling", max_pool, (IMAGE,), (COLUMNS,), COLUMNS),
    Row("max pooling, gradient", gradient(max_pool), (IMAGE, (4, 32, 32, 16)), (COLUMNS, COLUMNS),
        COLUMNS),
    Row("Jacobi step of 61 x 67", jacobi, ((61, 67),), (P("x", "y"),), P("x", "y"), (2, 4)),
    Row("roll by one", lambda x: jnp.roll(x, 1, 0), (ROWS,), (X,), X),
    Row("cumsum", lambda x: jnp.cumsum(x, 0), (ROWS,), (X,), X),
    Row("associative_scan", lambda x: lax.associative_scan(jnp.add, x), (ROWS,), (X,), X),
    Row("sort, along the sharded dim", lambda x: jnp.sort(x, 0), (ROWS,), (X,), X),
    Row("sort of a vector", jnp.sort, ((1 << 20,),), (X,), X),
    Row("top_k of 8", lambda x: lax.top_k(x, 8)[0], ((4, 1 << 16),), (COLUMNS,), NONE),
    Row("argmax", lambda x: jnp.argmax(x, 1), ((64, 1 << 14),), (COLUMNS,), NONE),
    Row("fft, batch sharded", lambda x: jnp.fft.fft(x).real, ((64, 256),), (X,), X),
    Row("fft2, rows sharded", lambda x: jnp.fft.fft2(x).real, ((256, 256),), (X,), X),
    Row("fft of a vector", lambda x: jnp.fft.fft(x).real, ((1 << 16,),), (X,), X),
    Row("12 heads over 8 devices", lambda x: x.reshape(8, 12, 128), ((8, 1536),), (COLUMNS,),
        COLUMNS),
    Row("two vectors joined", lambda x, y: jnp.concatenate([x, y]), (ROWS, ROWS), (X, X), X),
    Row("dynamic_slice, 8 rows", lambda x, i: lax.dynamic_slice(x, (i[0], 0), (8, 64)),
        (ROWS, (1, None, 2000)), (X, NONE), NONE),
    Row("dynamic_update_slice, 8 rows",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], 0)),
        (ROWS, (8, 64), (1, None, 2000)), (X, NONE, NONE), X),
    Row("embedding, rows sharded", lambda w, i: w[i], (ROWS, (256, None, 1024)), (X, NONE), NONE),
    Row("segment_sum", lambda e, i: jax.ops.segment_sum(e, i, 1024),
        ((4096, 16), (4096, None, 1024)), (X, X), X),
    Row("cross-entropy, vocabulary sharded", cross_entropy, ((64, 4096), (64, None, 4096)),
        (COLUMNS, NONE), NONE),
    Row("cholesky, batch sharded", lambda x: jnp.linalg.cholesky(x @ x.mT + 8 * jnp.eye(16)),
        ((64, 16, 16),), (X,), X),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a partitioner makes of a row; `error` is the largest one beside one device's result."""

    sent: float
    kinds: str
    error: float


def operands(row: Row) -> list[np.ndarray]:
    """Random operands, the same in every run."""
    draw = np.random.default_rng(0)
    found = []
    for shape in row.shapes:
        if None in shape:
            dims = tuple(n for n in shape[: shape.index(None)] if n is not None)
            found.append(draw.integers(0, shape[-1], dims, np.int32))
        else:
            found.append(draw.normal(size=shape).astype(np.float32))
    return found


def short(counts: Counter[str]) -> str:
    """Kinds of collectives and how many, as text."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def error(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest number."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.max(np.abs(found - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


def measure(row: Row) -> dict[str, Outcome]:
    """One row: XLA's partitioners, and ours."""
    names = ("x", "y")[: len(row.mesh)]
    mesh = jax.make_mesh(row.mesh, names, axis_types=(AxisType.Auto,) * len(names))
    args = operands(row)
    wanted = jax.jit(row.function)(*args)
    found = {}
    for which in hlo.PARTITIONERS:
        jax.clear_caches()
        ins = tuple(NamedSharding(mesh, spec) for spec in row.ins)
        placed = [*zip(row.shapes, row.ins, strict=True), (wanted.shape, row.outs)]
        uneven = any(
            n and entry and n % mesh.shape[entry]
            for shape, spec in placed
            for n, entry in zip(shape, spec, strict=False)
        )
        if uneven:  # refused at the boundary: constrained inside
            step = jax.jit(constrained(row, mesh))
        else:
            step = jax.jit(row.function, in_shardings=ins,
                           out_shardings=NamedSharding(mesh, row.outs))  # fmt: skip
        with hlo.partitioner(which):
            lowered = step.lower(*args)
            report = hlo.read(lowered)
            result = lowered.compile()(*args)
        sent = min(report.wire_bytes, report.credited_bytes)
        kinds = Counter({k: int(n) for k, n in report.by_kind.items()})
        found[which] = Outcome(sent, short(kinds), error(result, wanted))
    ours = mw.jit(row.function, mesh=mesh, in_shardings=row.ins, out_shardings=row.outs)
    program = ours.partition(*args)
    kinds = Counter(c.kind.value for c in program.collectives)
    found["meshwise"] = Outcome(program.wire_bytes, short(kinds), error(ours(*args), wanted))
    return found


def constrained(row: Row, mesh: Any) -> Callable[..., Any]:
    """The program with its shardings as constraints inside."""

    def function(*args: Any) -> Any:
        given = [
            lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, row.ins, strict=True)
        ]
        return lax.with_sharding_constraint(row.function(*given), NamedSharding(mesh, row.outs))

    return function


def kib(sent: float) -> str:
    """Bytes as text."""
    return f"{sent / KIB:,.1f}" if sent else "0"


def ratio(outcomes: dict[str, Outcome]) -> str:
    """What the better of XLA's two sends, in units of what ours does."""
    best, ours = min(outcomes[w].sent for w in hlo.PARTITIONERS), outcomes["meshwise"].sent
    if not ours:
        return "-" if not best else "all"
    return f"{best / ours:,.2f}"


def main() -> None:
    """Measure the rows asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all rows without any")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    options = parser.parse_args()
    rows = [r for r in TABLE if not options.names or any(n in r.name for n in options.names)]
    heads = ("program", "GSPMD KiB", "Shardy KiB", "ours KiB", "ratio", "ours", "errors")
    lines = []
    for row in rows:
        found = measure(row)
        sent = [kib(found[w].sent) for w in (*hlo.PARTITIONERS, "meshwise")]
        errors = " ".join(f"{found[w].error:.0e}" for w in (*hlo.PARTITIONERS, "meshwise"))
        lines.append((row.name, *sent, ratio(found), found["meshwise"].kinds, errors))
        if not options.markdown:
            print(*lines[-1], sep=" | ", flush=True)
    if options.markdown:
        print(f"| {' | '.join(heads[:5])} |\n|{'---|' * 5}")
        for line in lines:
            print(f"| {' | '.join(line[:5])} |")
        return
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(*line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
