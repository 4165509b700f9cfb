"""Random bits by threefry; a key is one 64-bit word, its two words side by side."""

import math
from typing import Any

import numpy as np

from tests.fuzz.evaluate.elementwise import Function

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(first: Any, second: Any, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two words hashed with a key of two words."""
    first, second, x, y = (np.asarray(w, np.uint32) for w in (first, second, x, y))
    keys = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for turn in range(5):
        for amount in ROTATIONS[turn % 2]:
            x = x + y
            y = ((y << np.uint32(amount)) | (y >> np.uint32(32 - amount))) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def words_of(keys: np.ndarray) -> np.ndarray:
    """`[..]` keys to `[.., 2]` words."""
    if not keys.size:
        return np.zeros((*keys.shape, 2), np.uint32)
    return np.ascontiguousarray(keys).reshape(-1).view(np.uint32).reshape(*keys.shape, 2)


def keys_of(words: np.ndarray) -> np.ndarray:
    """`[.., 2]` words to `[..]` keys."""
    if not words.size:
        return np.zeros(words.shape[:-1], np.uint64)
    flat = np.ascontiguousarray(words, np.uint32).reshape(-1)
    return flat.view(np.uint64).reshape(words.shape[:-1])


def _hashed(keys: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    words = words_of(keys).reshape(*keys.shape, *(1,) * len(shape), 2)
    count = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    high, low = (count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32)
    return threefry(words[..., 0], words[..., 1], high, low)


def _bits(params: Any, keys: np.ndarray) -> np.ndarray:
    first, second = _hashed(keys, tuple(params["shape"]))
    width = params["bit_width"]
    if width == 64:
        return (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
    return (first ^ second).astype(np.dtype(f"uint{width}"))


def _split(params: Any, keys: np.ndarray) -> np.ndarray:
    return keys_of(np.stack(_hashed(keys, tuple(params["shape"])), -1))


def _seed(params: Any, seeds: np.ndarray) -> np.ndarray:
    low = seeds.astype(np.int64).astype(np.uint32)
    return keys_of(np.stack([np.zeros_like(low), low], -1))


def _fold_in(params: Any, keys: np.ndarray, data: np.ndarray) -> np.ndarray:
    words = words_of(keys)
    low = data.astype(np.uint32)
    found = threefry(words[..., 0], words[..., 1], np.zeros_like(low), low)
    return keys_of(np.stack(np.broadcast_arrays(*found), -1))


def _counts(params: Any, *_: Any) -> list[np.ndarray]:
    shape = tuple(params["shape"])
    count = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return [(count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32)]


KEYS: dict[str, Function] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_seed": _seed,
    "random_fold_in": _fold_in,
    "random_wrap": lambda params, words: keys_of(words),
    "random_unwrap": lambda params, keys: words_of(keys),
    "threefry2x32": lambda params, *words: list(np.broadcast_arrays(*threefry(*words))),
    "iota_2x32_shape": _counts,
}
