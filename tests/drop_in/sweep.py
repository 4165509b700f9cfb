"""Calls of the array API through `mw.jit` with inputs sharded at random, beside one device.

`python -m tests.drop_in.sweep [--only NAMES] [--seeds A:B]` runs every row of the tables with
random arguments and prints where values, types or errors differ, with the seed that repeats it.
"""

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":  # before the first import of jax, which reads both
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_llvm_disable_expensive_passes=true"
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.drawing import Call, Dice, Scalar
from tests.drop_in.tables import ROWS, TOLERANCE, TOLERANCE_IN_64_BITS

MESHES = ((8,), (2, 4), (2, 2, 2), (4, 2), (2, 2), (3,), (6,), (2, 3), (5,))


@dataclass(frozen=True)
class Placed:
    """How the arrays of a call lie: on which mesh, by `in_shardings` or where they come from."""

    mesh: Mesh
    specs: tuple[Any, ...]
    committed: tuple[bool, ...]
    out_spec: Any

    def __str__(self) -> str:
        pairs = zip(self.specs, self.committed, strict=True)
        how = [f"{s}{' placed' if c else ''}" for s, c in pairs]
        return f"mesh {dict(self.mesh.shape)}, in {how}, out {self.out_spec}"


def drawn_mesh(dice: Dice) -> Mesh:
    sizes = dice.pick(*MESHES)
    count = int(np.prod(sizes))
    devices = np.array(jax.devices())[: 8 if count == 8 else None]
    if dice.flag(0.2):
        devices = dice.rng.permutation(devices)
    return Mesh(devices[:count].reshape(sizes), tuple("xyz"[: len(sizes)]))


def drawn_spec(dice: Dice, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Axes of the mesh at random dims."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in dice.rng.permutation(list(mesh.axis_names)):
        if shape and dice.flag(0.75):
            dims[dice.integer(0, len(shape) - 1)].append(str(axis))
    return P(*(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims))


def divides(shape: tuple[int, ...], spec: P, mesh: Mesh) -> bool:
    sharding = NamedSharding(mesh, spec)
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def drawn_placement(dice: Dice, arrays: list[Any]) -> Placed:
    mesh = drawn_mesh(dice)
    shapes = [np.shape(a) for a in arrays]
    specs = [drawn_spec(dice, shape, mesh) for shape in shapes]
    committed = [
        not isinstance(a, Scalar) and divides(shape, spec, mesh) and dice.flag()
        for a, shape, spec in zip(arrays, shapes, specs, strict=True)
    ]
    out = "x" if dice.flag(0.25) else None
    pairs = zip(specs, committed, strict=True)
    given = [None if not c and dice.flag(0.15) else s for s, c in pairs]
    return Placed(mesh, tuple(given), tuple(committed), out)


def run(call: Call, placed: Placed) -> Any:
    """Through `mw.jit`."""
    args = [
        jax.device_put(a, NamedSharding(placed.mesh, s)) if c else _plain(a)
        for a, s, c in zip(call.arrays, placed.specs, placed.committed, strict=True)
    ]
    specs = tuple(None if c else s for s, c in zip(placed.specs, placed.committed, strict=True))
    outs = None
    if placed.out_spec is not None:
        shapes = jax.eval_shape(call.function, *args)
        outs = jax.tree.map(lambda s: P(placed.out_spec) if s.shape else P(), shapes)
    kwargs = {} if outs is None else {"out_shardings": outs}
    step = mw.jit(call.function, mesh=placed.mesh, in_shardings=specs, **kwargs)
    return step(*args)


def _plain(a: Any) -> Any:
    return float(a) if isinstance(a, Scalar) else a


def tried(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # whatever a call raises is what is compared
        return None, error


def check(name: str, seed: int) -> str | None:
    """What is wrong with one call; None where it is right."""
    dice = Dice(zlib.crc32(name.encode()) + 7919 * seed)
    call = ROWS[name](dice)
    placed = drawn_placement(dice, call.arrays)
    with np.errstate(all="ignore"):
        expected, refused = tried(lambda: jax.jit(call.function)(*map(_plain, call.arrays)))
        found, raised = tried(lambda: run(call, placed))
    try:
        loose = TOLERANCE_IN_64_BITS if jax.config.jax_enable_x64 else TOLERANCE
        wrong = difference(expected, refused, found, raised, loose.get(name, 1.0))
    except Exception as error:  # the result is no array that can be read
        wrong = f"reading it raised {type(error).__name__}: {str(error)[:300]}"
    if wrong is None:
        return None
    types = [f"{a.dtype}{list(a.shape)}" if hasattr(a, "shape") else "float" for a in call.arrays]
    return f"{name} seed {seed}: {' '.join(types)}, {placed}: {wrong}"


def difference(expected: Any, refused: Any, found: Any, raised: Any, loose: float) -> str | None:
    """Values, types, trees and classes of errors compared."""
    if raised is not None and refused is None:
        return f"raised {type(raised).__name__}: {str(raised)[:600]}"
    if refused is not None and raised is None:
        return f"did not raise {type(refused).__name__}: {str(refused)[:200]}"
    if refused is not None:
        if isinstance(raised, type(refused)):
            return None
        return f"raised {type(raised).__name__}, not {type(refused).__name__}: {str(refused)[:200]}"
    if jax.tree.structure(expected) != jax.tree.structure(found):
        return f"tree {jax.tree.structure(found)}, not {jax.tree.structure(expected)}"
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        wrong = leaf_difference(want, got, loose)
        if wrong:
            return wrong
    return None


def leaf_difference(want: Any, got: Any, loose: float) -> str | None:
    def kind(a: Any) -> Any:
        return a.dtype, a.shape, getattr(a, "weak_type", False)

    if kind(want) != kind(got):
        return f"type {kind(got)}, not {kind(want)}"
    if jnp.issubdtype(want.dtype, jax.dtypes.extended):
        want, got = jax.random.key_data(want), jax.random.key_data(got)
    want, got = np.asarray(want), np.asarray(got)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = want != got
    else:
        eps = float(jnp.finfo(want.dtype).eps)
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        want, got = want.astype(wide), got.astype(wide)
        finite = np.abs(want[np.isfinite(want)])
        limit = 40 * eps * loose * max(1e-30, float(finite.max()) if finite.size else 1.0)
        with np.errstate(all="ignore"):
            near = (want == got) | (np.abs(want - got) <= limit)
        wrong = ~(near | (np.isnan(want) & np.isnan(got)))
    if not np.any(wrong):
        return None
    places = np.argwhere(wrong)
    at = tuple(places[0])
    which = f"{len(places)} of {want.size} wrong in {want.dtype}{want.shape}"
    return f"{which}, first at {at}: {got[at]}, not {want[at]}"


def sweep(names: list[str], seeds: range) -> Iterator[str]:
    for count, name in enumerate(names):
        if count % 20 == 19:
            jax.clear_caches()
        for seed in seeds:
            try:
                wrong = check(name, seed)
            except Exception as error:  # the row itself
                wrong = f"{name} seed {seed}: NO CALL {type(error).__name__}: {error}"
            if wrong:
                yield wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose names hold one of these words")
    parser.add_argument("--seeds", default="0:2")
    parser.add_argument("--x64", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.x64)
    words = options.only.split(",")
    names = [n for n in ROWS if any(w in n for w in words)]
    low, high = map(int, options.seeds.split(":"))
    wrong = 0
    for text in sweep(names, range(low, high)):
        print(text, flush=True)
        wrong += 1
    print(f"{len(names)} rows, seeds {options.seeds}: {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
