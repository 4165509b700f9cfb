"""Sizes, types, paths and axes as text."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.ir.mesh import refine_mesh
from meshwise.ir.numbers import microseconds
from meshwise.ir.sharding import Reduction, Sharding, unreduced
from meshwise.ir.source import place
from meshwise.report.text import (
    aligned,
    array_text,
    count,
    in_user_axes,
    kib,
    listed,
    percent,
    sharding_text,
    wrapped,
)

MESH = refine_mesh(("data", "model"), (3, 4))


def test_columns_are_aligned():
    assert aligned([("a", "1", "x"), ("long", "100", "y")], "<><") == [
        "  a       1  x",
        "  long  100  y",
    ]


def test_sentences_are_wrapped_with_a_hanging_indent():
    lines = wrapped("word " * 30, indent=2, hang=4)
    assert [line[:7] for line in lines] == ["  word ", "      w"]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (kib(0), "0.0 KiB"),
        (kib(64), "0.062 KiB"),
        (kib(1024.5 * 1024), "1,024.5 KiB"),
        (percent(1, 8), "12.5%"),
        (percent(1, 0), "-"),
        (microseconds(2.34567e-7), "0.235 us"),
        (microseconds(1.5e-3), "1,500 us"),
        (count(1, "device"), "1 device"),
        (count(8, "device"), "8 devices"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (array_text((16, 128), np.dtype("float32")), "f32[16,128]"),
        (array_text((2,), jnp.dtype("bfloat16")), "bf16[2]"),
        (array_text((), np.dtype("uint8")), "u8[]"),
        (array_text((3,), np.dtype("int32")), "i32[3]"),
        (array_text((3,), np.dtype("complex64")), "c64[3]"),
        (array_text((3,), np.dtype("bool")), "bool[3]"),
    ],
)
def test_sizes_and_types(found: str, text: str):
    assert found == text


def test_shardings_name_the_users_axes_where_they_are_whole():
    whole = Sharding((("data", "model.0", "model.1"), ()))
    assert sharding_text(whole, MESH) == "[data*model, -]"
    assert sharding_text(Sharding((("model.0",), ("model.1",))), MESH) == "[model.0, model.1]"
    terms = unreduced(((),), ("model.0", "model.1"), Reduction.MAX)
    assert sharding_text(terms, MESH) == "[-] max over model"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f32[4] [model.0*model.1] -> [-] for add", "f32[4] [model] -> [-] for add"),
        ("[data*model.0*model.1, -] for dot_general", "[data*model, -] for dot_general"),
        ("[model.0, model.1] -> [-, -] for mul", "[model.0, model.1] -> [-, -] for mul"),
        ("[-] sum over model.0, model.1 -> [-]", "[-] sum over model -> [-]"),
        ("[-] sum over data, model.1 -> [-]", "[-] sum over data, model.1 -> [-]"),
        ("part of the operator's own computation", "part of the operator's own computation"),
    ],
)
def test_texts_name_the_users_axes(text: str, shown: str):
    assert in_user_axes(text, MESH) == shown


def test_paths_are_short(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert place(f"{tmp_path}/train/step.py:12") == "train/step.py:12"
    assert place("/opt/lab/code/step.py:12") == "code/step.py:12"
    assert place("/lib/python3/site-packages/flax/linen/linear.py:7") == "flax/linen/linear.py:7"
    assert place(f"{tmp_path}/.venv/site-packages/optax/alias.py:7") == "optax/alias.py:7"
    in_library = f"{tmp_path}/my (own)/step.py:12 (/lib/site-packages/flax/linen/linear.py:7)"
    assert place(in_library) == "my (own)/step.py:12 (flax/linen/linear.py:7)"
    assert place("in_shardings") == "in_shardings"
    assert place("<stdin>:1") == "<stdin>:1"
