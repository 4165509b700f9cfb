"""Fourier transforms over sharded dims: what they send, and the numbers of one device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

C64, F32 = np.complex64, np.float32
ALL_TO_ALL = "all_to_all"


EIGHT = mesh_of(x=8)
GRID = mesh_of(x=2, y=4)
CUBE = mesh_of(x=2, y=2, z=2)


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    draw = np.random.default_rng(sum(shape))
    found = draw.normal(size=shape)
    return (found + 1j * draw.normal(size=shape) if dtype == C64 else found).astype(dtype)


def filtered(x: jax.Array) -> jax.Array:
    """There and back, and what is between them scaled by wave number."""
    spectrum = jnp.fft.fft2(x)
    rows = jnp.arange(spectrum.shape[0], dtype=F32)[:, None]
    return jnp.fft.ifft2(spectrum / (1 + rows))


def filtered_real(x: jax.Array) -> jax.Array:
    return jnp.fft.irfftn(jnp.fft.rfftn(x) * 2, s=x.shape)


def energy(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of half the energy of a transform."""
    return jax.grad(lambda x: 0.5 * (jnp.abs(transform(x)) ** 2).sum())


class Row(NamedTuple):
    function: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: Any
    mesh: AbstractMesh
    spec: P
    sends: int  # all_to_alls; nothing else is ever sent
    most: float  # their bytes, in those of the larger of a device's operand and result
    out: P | None = None


ROWS = {
    "fft, batch sharded": Row(jnp.fft.fft, (16, 64), C64, EIGHT, P("x"), 0, 0),
    "rfft, batch sharded, uneven": Row(jnp.fft.rfft, (13, 10), F32, EIGHT, P("x"), 0, 0),
    "fft2, batch over two axes": Row(jnp.fft.fft2, (16, 6, 10), C64, GRID, P(("x", "y")), 0, 0),
    "fft2, batch and one dim": Row(jnp.fft.fft2, (4, 16, 16), C64, GRID, P("x", "y"), 2, 1.5),
    "gradient, batch sharded": Row(energy(jnp.fft.rfft), (16, 10), F32, EIGHT, P("x"), 0, 0),
    "fft, moved to the batch": Row(jnp.fft.fft, (16, 64), C64, EIGHT, P(None, "x"), 2, 1.75),
    "fft": Row(jnp.fft.fft, (4096,), C64, EIGHT, P("x"), 3, 2.625),
    "ifft": Row(jnp.fft.ifft, (4096,), C64, EIGHT, P("x"), 3, 2.625),
    "fft of a batch too small": Row(jnp.fft.fft, (2, 512), C64, EIGHT, P(None, "x"), 3, 2.625),
    "fft over two axes": Row(jnp.fft.fft, (4096,), C64, GRID, P(("y", "x")), 3, 2.625),
    "fft over three axes": Row(jnp.fft.fft, (4096,), C64, CUBE, P(("x", "z", "y")), 3, 2.625),
    "fft of an uneven dim": Row(jnp.fft.fft, (1001,), C64, EIGHT, P("x"), 3, 4.5),
    "rfft": Row(jnp.fft.rfft, (8192,), F32, EIGHT, P("x"), 3, 3.2),
    "irfft": Row(jnp.fft.irfft, (4097,), C64, EIGHT, P("x"), 3, 3.2),
    "rfft of an odd length": Row(jnp.fft.rfft, (3 * 5 * 7 * 11,), F32, EIGHT, P("x"), 3, 5),
    "irfft of an odd length": Row(
        lambda x: jnp.fft.irfft(x, 1155), (578,), C64, EIGHT, P("x"), 3, 5
    ),
    "gradient of fft": Row(energy(jnp.fft.fft), (1024,), C64, EIGHT, P("x"), 6, 5.25),
    "gradient of rfft": Row(energy(jnp.fft.rfft), (4096,), F32, EIGHT, P("x"), 6, 7),
    "gradient of irfft": Row(energy(jnp.fft.irfft), (2049,), C64, EIGHT, P("x"), 6, 7),
    "fft2": Row(jnp.fft.fft2, (64, 64), C64, EIGHT, P("x"), 2, 1.75),
    "ifft2, columns": Row(jnp.fft.ifft2, (64, 64), C64, EIGHT, P(None, "x"), 2, 1.75),
    "fft2, left on columns": Row(
        jnp.fft.fft2, (64, 64), C64, EIGHT, P("x"), 1, 0.875, P(None, "x")
    ),
    "rfft2": Row(jnp.fft.rfft2, (64, 64), F32, EIGHT, P("x"), 2, 2.2),
    "rfft2, columns": Row(jnp.fft.rfft2, (64, 64), F32, EIGHT, P(None, "x"), 2, 1.6),
    "irfft2": Row(jnp.fft.irfft2, (64, 33), C64, EIGHT, P("x"), 2, 2.2),
    "fftn": Row(jnp.fft.fftn, (16, 8, 24), C64, EIGHT, P("x"), 2, 1.75),
    "fftn, uneven": Row(jnp.fft.fftn, (13, 5, 10), C64, EIGHT, P("x"), 2, 3),
    "fftn, the dim between": Row(jnp.fft.fftn, (16, 8, 24), C64, EIGHT, P(None, "x"), 2, 1.75),
    "rfftn": Row(jnp.fft.rfftn, (16, 8, 24), F32, EIGHT, P("x"), 2, 1.75),
    "irfftn": Row(jnp.fft.irfftn, (16, 8, 13), C64, EIGHT, P("x"), 2, 1.75),
    "pencils": Row(jnp.fft.fftn, (16, 16, 16), C64, GRID, P("x", "y"), 2, 1.75),
    "pencils on a cube": Row(jnp.fft.fftn, (16, 16, 16), C64, CUBE, P("z", "y"), 3, 2),
    "there and back": Row(filtered, (64, 64), C64, EIGHT, P("x"), 2, 1.75),
    "there and back, columns": Row(filtered, (64, 64), C64, EIGHT, P(None, "x"), 2, 1.75),
    "there and back, real": Row(filtered_real, (16, 16, 16), F32, EIGHT, P("x"), 2, 2),
    "gradient of there and back": Row(
        energy(filtered_real), (16, 16, 16), F32, EIGHT, P("x"), 4, 4
    ),
    "gradient of fft2": Row(energy(jnp.fft.fft2), (32, 64), C64, EIGHT, P("x"), 2, 1.75),
}


def partitioned(row: Row) -> Any:
    out = row.spec if row.out is None else row.out
    function = mw.jit(row.function, mesh=row.mesh, in_shardings=row.spec, out_shardings=out)
    return function.partition(jax.ShapeDtypeStruct(row.shape, row.dtype))


@pytest.mark.parametrize("name", ROWS)
def test_only_all_to_alls_are_sent(name: str):
    row = ROWS[name]
    program = partitioned(row)
    kinds = [c.kind.value for c in program.collectives]
    assert kinds == [ALL_TO_ALL] * row.sends
    sent = sum(c.wire_bytes for c in program.collectives)
    avals = (*program.per_device.jaxpr.in_avals, *program.per_device.jaxpr.out_avals)
    assert sent <= row.most * max(a.size * a.dtype.itemsize for a in avals)


@pytest.mark.parametrize("name", ROWS)
def test_numbers_of_one_device(name: str):
    row = ROWS[name]
    x = values(row.shape, row.dtype)
    close(partitioned(row).simulate(x), jax.jit(row.function)(x))


def close(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    limit = 1e-6 * np.log2(wanted.size) * np.sqrt(np.mean(np.abs(wanted) ** 2))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("name", ["fft of an uneven dim", "irfft", "fftn, uneven"])
def test_on_devices(name: str):
    row = ROWS[name]
    x = values(row.shape, row.dtype)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    found = mw.jit(row.function, mesh=mesh, in_shardings=row.spec)(x)
    close(found, row.function(x))


@pytest.mark.parametrize(
    "function, dtype", [(jnp.fft.fft, C64), (jnp.fft.rfft, F32), (jnp.fft.irfft, C64)]
)
def test_size_does_not_depend_on_devices(function: Callable[..., Any], dtype: Any):
    struct = jax.ShapeDtypeStruct(((1 << 26) + 1 if function is jnp.fft.irfft else 1 << 27,), dtype)
    few, many = (
        mw.jit(function, mesh=mesh_of(x=n), in_shardings=P("x")).partition(struct)
        for n in (8, 4096)
    )
    assert len(few.jaxpr.eqns) == len(many.jaxpr.eqns)
    assert [c.kind for c in many.collectives] == [ALL_TO_ALL] * 3
    sent = [sum(c.wire_bytes for c in program.collectives) for program in (few, many)]
    assert sent[1] < sent[0] / 200


@pytest.mark.parametrize("length", [1, 2, 5, 13, 10007])
def test_a_length_that_does_not_factor_is_transformed_whole(length: int):
    """Primes, and so few rows that each device would send more than all there are."""
    x = values((length,), C64)
    function = mw.jit(jnp.fft.fft, mesh=EIGHT, in_shardings=P("x"), out_shardings=P("x"))
    program = function.partition(x)
    assert [c.kind.value for c in program.collectives] == ["all_gather"]
    close(np.asarray(program.simulate(x)), np.fft.fft(x).astype(C64))


def test_double_precision():
    with jax.enable_x64(True):
        x = values((4096,), C64).astype(np.complex128)
        function = mw.jit(jnp.fft.fft, mesh=EIGHT, in_shardings=P("x"))
        found = np.asarray(function.partition(x).simulate(x))
    assert found.dtype == np.complex128
    np.testing.assert_allclose(found, np.fft.fft(x), atol=1e-11)
