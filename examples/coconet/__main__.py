"""CoCoNeT's programs, each as it is written and as it is tuned, on eight devices.

    python -m examples.coconet [NAME ...]

Runs every program under the straight schedule (an all_reduce, then computation on every device)
and under the best one that the autotuner finds by timing, and prints what changed: the moves,
bytes, memory, and seconds of both.
"""

import examples.devices  # noqa: F401, I001  (eight CPU devices, before JAX starts)

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import meshwise as mw
from examples.coconet import programs

WIDTH, HEADS, TOKENS = 256, 8, (4, 128)


def draw(*shape: int) -> np.ndarray:
    """Random numbers, the same in every run."""
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def optimizer(parameters: int = 2**20) -> tuple[Any, ...]:
    """Gradients of eight devices, weights, moments, and the number of steps."""
    square = np.abs(draw(parameters)) + 0.1
    return draw(8, parameters), draw(parameters), draw(parameters), square, np.float32(3)


def mlp() -> tuple[Any, ...]:
    """Weights of an MLP block, a batch, a key."""
    weights = {
        "up": draw(WIDTH, 4 * WIDTH) / 16,
        "up_bias": draw(4 * WIDTH),
        "down": draw(4 * WIDTH, WIDTH) / 32,
        "bias": draw(WIDTH),
        "gain": draw(WIDTH),
    }
    return weights, draw(*TOKENS, WIDTH), jax.random.key(0)


def attention() -> tuple[Any, ...]:
    """Weights of a self-attention block, a batch, a key."""
    names = ("query", "key", "value")
    weights: dict[str, Any] = {n: draw(WIDTH, HEADS, WIDTH // HEADS) / 16 for n in names}
    weights |= {"out": draw(HEADS, WIDTH // HEADS, WIDTH) / 16}
    return (
        weights | {"bias": draw(WIDTH), "gain": draw(WIDTH)},
        draw(*TOKENS, WIDTH),
        jax.random.key(0),
    )


def stage() -> tuple[Any, ...]:
    """Weights, activations and keys of two stages."""
    weights = jax.tree.map(lambda x: np.stack([x, x[::-1]]), (attention()[0], mlp()[0]))
    return weights, draw(2, *TOKENS, WIDTH), jax.random.split(jax.random.key(0), 2)


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, int], Callable[[], tuple[Any, ...]]]] = {
    "sgd": (programs.sgd, {"data": 8}, lambda: optimizer()[:2]),
    "adam": (programs.adam, {"data": 8}, optimizer),
    "lamb": (programs.lamb, {"data": 8}, optimizer),
    "mlp": (programs.mlp, {"model": 8}, mlp),
    "self_attention": (programs.self_attention, {"model": 8}, attention),
    "pipeline_stage": (programs.pipeline_stage, {"stage": 2, "model": 4}, stage),
}


def show(name: str) -> None:
    """One program before and after."""
    make, axes, args = CASES[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args())
    tuned = mw.autotune(make(mesh), *structs, progress=True)
    before, best = tuned.original, tuned.best
    timed = {c.name: c for c in tuned.candidates}[before.name]
    print(f"\n{'=' * 88}\n{best.schedule.diff()}\n")
    if best.measured_s and timed.measured_s:
        gain = timed.measured_s / best.measured_s
        print(f"{timed.measured_s * 1e3:.1f} ms before, {best.measured_s * 1e3:.1f} ms after: "
              f"{gain:.2f}x, by")  # fmt: skip
    print(tuned.script())


def main(argv: Sequence[str] | None = None) -> None:
    """Show the programs that are named, by default all."""
    parser = argparse.ArgumentParser(prog="examples.coconet")
    parser.add_argument("programs", nargs="*", choices=[[], *CASES])
    for name in parser.parse_args(argv).programs or CASES:
        show(name)


if __name__ == "__main__":
    main()
