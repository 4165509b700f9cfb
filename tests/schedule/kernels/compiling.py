"""Compiles kernels for TPUs that are not there: `python -m tests.schedule.kernels.compiling`.

Prints a JSON object: for each case the kernels and collectives of the compiled program, and the
compiler's own estimate of its seconds. A program of its own, as the TPU compiler reads its settings
when it is loaded, and only one process at a time may hold it.
"""

import json
import os
import re
import sys
from collections import Counter

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwise.schedule import kernels

COLLECTIVES = re.compile(
    r"\s(all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all)(?:-start)?\("
)
PARAMETERS = 2**23


def adam(g, m, v, w, rate, count):
    g = g.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    update = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-6)
    w = w - rate * update
    return [w.astype(jnp.bfloat16), w, m, v]


def lamb(g, m, v, w, rate, count):
    g = g.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    update = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-6) + 0.01 * w
    squares = jnp.stack([jnp.sum(w * w), jnp.sum(update * update)])
    norm_w, norm_u = jnp.sqrt(lax.psum(squares, "x"))
    ratio = jnp.where((norm_w > 0) & (norm_u > 0), norm_w / norm_u, 1.0)
    w = w - rate * ratio * update
    return [w.astype(jnp.bfloat16), w, m, v]


def block(sums, mask, residual, bias, gain):
    y = jnp.where(mask, (sums + bias) * 1.25, 0).astype(sums.dtype) + residual
    mean = y.mean(-1, keepdims=True)
    return [(y - mean) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5) * gain, y]


def optimiser(computation, fused):
    """A step on parameters in one vector; state in slices if fused, whole before."""
    state = P("x") if fused else P()

    def step(g, m, v, w, rate, count):
        if not fused:
            return computation(lax.psum(g[0], "x"), m, v, w, rate, count)
        return kernels.fused_all_reduce(
            computation,
            [g[0]],
            [m, v, w],
            [rate, count],
            axis="x",
            gathered=[0, None, None, None],
            interpret=False,
        )

    types = [
        jax.ShapeDtypeStruct((8, PARAMETERS), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((PARAMETERS,), jnp.float32)] * 3,
        *[jax.ShapeDtypeStruct((), jnp.float32)] * 2,
    ]
    return step, (P("x"), state, state, state, P(), P()), [P(), state, state, state], types


def layer_end(fused, dtype=jnp.bfloat16, tokens=8192, hidden=4096, inner=16384):
    """A row-parallel product, its sum, bias, dropout, residual, layer norm, gathered."""

    def step(a, b, mask, residual, bias, gain):
        if not fused:
            sums = lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)
            norm, y = block(sums, mask, residual, bias, gain)
            return [lax.all_gather(norm, "x", axis=0, tiled=True), y]
        return kernels.matmul_reduce_scatter(
            a,
            b,
            block,
            [mask, residual],
            [bias, gain],
            axis="x",
            gathered=[0, None],
            interpret=False,
        )

    types = [
        jax.ShapeDtypeStruct((tokens, inner), dtype),
        jax.ShapeDtypeStruct((inner, hidden), dtype),
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bool_),
        jax.ShapeDtypeStruct((tokens, hidden), dtype),
        *[jax.ShapeDtypeStruct((hidden,), dtype)] * 2,
    ]
    specs = (P(None, "x"), P("x"), P("x"), P("x"), P(), P())
    return step, specs, [P(), P("x")], types


def gathered_product(gathered, fused):
    def step(a, b):
        if fused:
            return kernels.all_gather_matmul(a, b, axis="x", gathered=gathered, interpret=False)
        side, dim = gathered
        whole = lax.all_gather(a if side == "left" else b, "x", axis=dim, tiled=True)
        return whole @ b if side == "left" else a @ whole

    spec = P(None, "x") if gathered[1] else P("x")
    specs = (spec, P()) if gathered[0] == "left" else (P(), spec)
    types = [
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16),
    ]
    return step, specs, P(), types


def scattered_product(fused):
    def step(a, b):
        if fused:
            return kernels.matmul_reduce_scatter(a, b, axis="x", interpret=False)
        return lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)

    types = [
        jax.ShapeDtypeStruct((8192, 16384), jnp.bfloat16),
        jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16),
    ]
    return step, (P(None, "x"), P("x")), P("x"), types


def other_chunks(dim):
    def step(g):
        return kernels.fused_all_reduce(
            lambda g: [g * 2, g], [g], axis="x", gathered=[dim, None], dim=dim, interpret=False
        )

    shape = [8, 64, 256]
    shape[dim] *= 8
    spec = P(*[None] * dim, "x")
    return step, (P(),), [P(), spec], [jax.ShapeDtypeStruct(tuple(shape), jnp.float32)]


def elementwise(function, shape, dtype=jnp.float32):
    def step(g):
        return kernels.fused_all_reduce(
            lambda g: [function(g)], [g], axis="x", gathered=[None], interpret=False
        )[0]

    return step, (P(),), P("x"), [jax.ShapeDtypeStruct(shape, dtype)]


FUNCTIONS = {
    "arithmetic": lambda x: lax.rem(-jnp.abs(x) * 2 + x / 3 - 1, jnp.maximum(x, 2)) ** 3,
    "powers": lambda x: x**-2 + jnp.power(jnp.abs(x) + 1, x) + lax.square(x) + lax.exp2(x),
    "roots": lambda x: jnp.sqrt(x) + lax.rsqrt(x) + lax.clamp(0.0, x, 1.0) + jnp.minimum(x, 0),
    "rounding": lambda x: jnp.floor(x) + jnp.ceil(x) + jnp.round(x) + jnp.sign(x),
    "circles": lambda x: jnp.sin(x) + jnp.cos(x) + jnp.tan(x) + lax.atan2(x, x + 1),
    "logs": lambda x: jnp.exp(x) + jnp.log(x) + jnp.log1p(x) + jnp.tanh(x) + lax.erf(x),
    "activations": lambda x: jax.nn.sigmoid(x) + jax.nn.gelu(x) + jax.nn.silu(x),
    "truth": lambda x: (
        ((x > 0) & ~(x <= 1)) | (x < -3) ^ (x != 2) | (x >= 5) & (x == 7) & jnp.isfinite(x)
    ),
    "chosen": lambda x: jnp.where(x > 0, x, lax.stop_gradient(-x)),
    "integers": lambda x: lax.shift_right_logical(((x.astype(jnp.int32) << 2) >> 1) & 7 | 8 ^ 3, 1),
    "short": lambda x: jnp.tanh(x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "norms": lambda x: (
        x / jnp.exp(lax.psum(jnp.max(x), "x")) ** 1.5 + jnp.sqrt(lax.pmax(jnp.sum(x * x), "x"))
    ),
}


def matrices(function, shape=(64, 256), dtype=jnp.float32, tiles=(), wholes=(), count=1):
    """A computation that keeps all it results in; tiles and wholes as types."""

    def step(g, *others):
        cut = len(tiles)
        return kernels.fused_all_reduce(
            function,
            [g],
            others[:cut],
            others[cut:],
            axis="x",
            gathered=[None] * count,
            interpret=False,
        )

    types = [jax.ShapeDtypeStruct(*t) for t in ((shape, dtype), *tiles, *wholes)]
    return step, (P(), *[P("x")] * len(tiles), *[P()] * len(wholes)), P("x"), types


LONG, SHORT, TRUTH = jnp.float32, jnp.bfloat16, jnp.bool_
SHAPES = {
    "halves exchanged": matrices(lambda g: [jnp.roll(g, 128, 1), jnp.roll(g, 100, 1)], count=2),
    "heads": matrices(lambda g: [jax.nn.softmax(g.reshape(8, 4, 128)).reshape(8, 512)], (64, 512)),
    "rows added": matrices(lambda g: [jnp.sum(g, 0), jnp.max(g, 1)], count=2),
    "product": matrices(lambda g, w: [g @ w], wholes=[((256, 128), LONG)]),
    "short product": matrices(lambda g, w: [g @ w], (128, 256), SHORT, [], [((256, 128), SHORT)]),
    "a scale of each row": matrices(lambda g, s: [g * s[:, None]], tiles=[((64,), LONG)]),
    "a mask": matrices(lambda g, m: [jnp.where(m, g, 0.0)], tiles=[((64, 256), TRUTH)]),
    "a switch": matrices(lambda g, b: [jnp.where(b, g, 0.0)], wholes=[((), TRUTH)]),
    "columns chosen": matrices(lambda g, b: [jnp.where(b, g, 0.0)], wholes=[((256,), TRUTH)]),
    "three dims": matrices(lambda g: [g - jnp.mean(g, (1, 2), keepdims=True)], (64, 16, 256)),
    "four small dims": matrices(lambda g: [g * 2], (64, 3, 3, 64)),
    "odd columns": matrices(lambda g: [g / lax.psum(jnp.sum(g, 0), "x")], (64, 100)),
    "odd rows": matrices(lambda g: [g * 2], (40, 128)),
    "odd vector": matrices(lambda g: [g * 2], (800,)),
    "short vector": matrices(lambda g: [g * lax.psum(jnp.sum(g), "x")], (3072,), SHORT),
    "three norms": matrices(
        lambda g: [g * lax.psum(jnp.stack([jnp.sum(g), jnp.max(g), jnp.sum(g * g)]), "x")[1]]
    ),
}


def cases():
    """Each case's name, function, specs in and out, and types of operands."""
    found = {
        f"{c.__name__} {'fused' if f else 'plain'}": optimiser(c, f)
        for c in (adam, lamb)
        for f in (False, True)
    }
    for fused in (False, True):
        kind = "fused" if fused else "plain"
        found[f"layer end {kind}"] = layer_end(fused)
        found[f"scattered product {kind}"] = scattered_product(fused)
        for gathered in (("left", 0), ("left", 1), ("right", 0)):
            name = f"gathered {gathered[0]} {gathered[1]} {kind}"
            found[name] = gathered_product(gathered, fused)
    found["layer end long fused"] = layer_end(True, jnp.float32, 1024, 1024, 1024)
    for dim in (0, 1, 2):
        found[f"chunks along {dim} fused"] = other_chunks(dim)
    found |= {f"{name} fused": case for name, case in SHAPES.items()}
    for name, function in FUNCTIONS.items():
        found[f"{name} of vectors fused"] = elementwise(function, (2**17,))
        found[f"{name} of matrices fused"] = elementwise(function, (512, 384))
    return found


def meshes():
    """Eight chips in a row, and the same with an axis of four, then of two, in the kernels."""
    devices = np.array(topologies.get_topology_desc("v5e:2x4", "tpu").devices)
    return {
        "": Mesh(devices, ("x",)),
        " on four": Mesh(devices.reshape(2, 4), ("y", "x")),
        " on two": Mesh(devices.reshape(4, 2), ("y", "x")),
    }


def compiled(case, mesh):
    function, in_specs, out_specs, types = case
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    args = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, spec))
        for t, spec in zip(types, in_specs, strict=True)
    ]
    program = jax.jit(mapped).lower(*args).compile()
    text = program.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": Counter(COLLECTIVES.findall(text)),
        "optimal_seconds": (program.cost_analysis() or {}).get("optimal_seconds"),
    }


def main(chosen):
    """Compile all cases, or those whose name begins with one of some words."""
    found = {}
    for name, case in cases().items():
        for suffix, mesh in meshes().items():
            is_wanted = not chosen or any(name.startswith(c) for c in chosen)
            # On smaller rings only what has most in it.
            if is_wanted and (not suffix or name in ("lamb fused", "layer end long fused")):
                found[name + suffix] = compiled(case, mesh)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
