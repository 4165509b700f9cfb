"""One of two processes of four CPU devices each, which reshard arrays that lie on both.

`python -m tests.api.reshard_process NUMBER PORT CASE...` prints a line `CASE: shards that are
right`, or the error, for each case. Every shard of this process is compared with NumPy.
"""

import os
import sys
from collections.abc import Callable, Sequence

os.environ["JAX_PLATFORMS"] = "cpu"
# After what the tests say of compiling, which holds here too; of two numbers the last counts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

VALUE = np.arange(1.0, 97).astype(np.float32).reshape(16, 6)
UNEVEN = np.arange(1.0, 66).astype(np.float32).reshape(13, 5)


def on(numbers: Sequence[int], sizes: Sequence[int], *spec) -> NamedSharding:
    """A sharding over some of the eight devices, 0 to 3 of this process or the other."""
    devices = sorted(jax.devices(), key=lambda device: device.id)
    grid = np.array([devices[n] for n in numbers]).reshape(sizes)
    return NamedSharding(Mesh(grid, tuple("xy"[: len(sizes)])), P(*spec))


def every(*spec) -> NamedSharding:
    return on(range(8), (8,), *spec)


def lay(value, where: NamedSharding):
    """An array of which each process puts its own shards."""
    return jax.make_array_from_callback(value.shape, where, lambda i: value[i], dtype=value.dtype)


def check(found, value: np.ndarray, where: NamedSharding) -> int:
    """How many shards are here, all of them right."""
    held = found if isinstance(found, jax.Array) else found.padded
    assert held.sharding == where, held.sharding
    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    here = {shard.device: shard for shard in found.addressable_shards}
    mine = [d for d in where.mesh.devices.flat if d.process_index == jax.process_index()]
    assert set(here) == set(mine), here
    for device, index in where.devices_indices_map(held.shape).items():
        if device in here:
            part = value[index]
            assert here[device].data.shape == part.shape, (device, here[device].data.shape)
            assert np.asarray(here[device].data).tobytes() == part.tobytes(), (device, index)
    return len(here)


def move(value, source: NamedSharding, target: NamedSharding, **options) -> int:
    return check(mw.reshard(lay(value, source), target, **options), value, target)


def move_uneven(source: NamedSharding, target: NamedSharding) -> int:
    """By way of an uneven sharding."""
    held = mw.reshard(lay(UNEVEN, NamedSharding(source.mesh, P())), source)
    assert isinstance(held, mw.UnevenArray)
    return check(mw.reshard(held, target), UNEVEN, target)


def move_keys(source: NamedSharding | None, target: NamedSharding) -> int:
    made = jax.jit(lambda: jax.random.split(jax.random.key(3), 8), out_shardings=source)()
    found = mw.reshard(made, target)
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 8)))
    for shard in found.addressable_shards:
        part = data[target.devices_indices_map((8,))[shard.device]]
        np.testing.assert_array_equal(jax.random.key_data(shard.data), part)
    return len(found.addressable_shards)


def move_tree(source: NamedSharding, target: NamedSharding) -> int:
    values = [VALUE, VALUE + 1, VALUE[:8], VALUE.astype(jax.numpy.bfloat16)]
    arrays = [lay(value, source) for value in values]
    found = mw.reshard(arrays, target, donate=True)
    assert all(array.is_deleted() for array in arrays)
    return sum(check(*pair, target) for pair in zip(found, values, strict=True))


def jitted(source: NamedSharding, target: NamedSharding) -> int:
    """Sums of a program that each process made for itself; whole numbers, so that all are exact."""

    def products(x):
        found = tuple(x.T @ (x * (k + 1)) for k in range(4))
        return tuple(2 * c for c in jax.lax.optimization_barrier(found))

    fn = mw.jit(products, in_shardings=source, out_shardings=target)
    found = fn(lay(VALUE, source))
    return sum(check(x, 2 * VALUE.T @ (VALUE * (k + 1)), target) for k, x in enumerate(found))


def without_rows(source: NamedSharding, target: NamedSharding) -> int:
    """Of an argument without elements, which XLA would give each device whole."""
    fn = mw.jit(lambda x: 2 * x, mesh=source.mesh, in_shardings=source, out_shardings=target)
    return check(fn(mw.reshard(VALUE[:0], source)), VALUE[:0], target)


def as_text() -> int:
    """In how many ways what is not all here is shown as what it is."""
    held = mw.reshard(lay(UNEVEN, every()), every("x"))
    shown = "UnevenArray(<not all here>, shape=(13, 5), dtype=float32, "
    texts = repr(held), str(held), f"{held}", f"{held:.2f}"
    return sum(text.startswith(shown) for text in texts)


def refused(call: Callable[[], object], error: type[Exception], text: str = "") -> int:
    """One, where a call is refused in this process; by an error of this text, if one is given."""
    try:
        call()
    except error as refusal:
        assert text in ("", str(refusal)), refusal
        return 1
    return 0


def with_nans_in_padding() -> int:
    """Only the last process has padding; what it makes is no number, and nobody's concern."""
    fn = mw.jit(lambda x: x / x + x.sum(), in_shardings=every("x"), out_shardings=every("x"))
    held = mw.reshard(lay(UNEVEN, every()), every("x"))
    with jax.debug_nans(True):
        found = [fn(held), fn(held)][1]
    return check(mw.reshard(found, every()), 1 + np.full_like(UNEVEN, UNEVEN.sum()), every())


def with_a_nan() -> int:
    """One process says so, the other goes on; both go on together afterwards."""
    bad = UNEVEN.copy()
    bad[0, 0] = -1
    fn = mw.jit(jax.numpy.sqrt, in_shardings=every("x"), out_shardings=every("x"))
    held = mw.reshard(lay(bad, every()), every("x"))
    with jax.debug_nans(True):
        found = refused(lambda: fn(held), FloatingPointError)
    sums = mw.jit(lambda x: x.sum(0), in_shardings=every("x"), out_shardings=every())
    check(sums(lay(VALUE, every("x"))), VALUE.sum(0), every())
    return found


def mine() -> NamedSharding:
    """On the devices of this process, another place in each."""
    return NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), P("x"))


def others() -> Mesh:
    """The devices of the other process."""
    away = [d for d in jax.devices() if d.process_index != jax.process_index()]
    return Mesh(np.array(away), ("x",))


def few(*spec) -> NamedSharding:
    """On four devices, two of each process."""
    return on([0, 5, 1, 4], (4,), *spec)


def mixed(*spec) -> NamedSharding:
    """On all devices in another order."""
    return on([3, 5, 7, 0, 2, 6, 1, 4], (2, 4), *spec)


def numbers() -> str:
    """Of all devices, as errors show them."""
    return ", ".join(str(number) for number in sorted(device.id for device in jax.devices()))


NOT_ONE = """\
mw.reshard was given another array in each of several processes: \
float32[16, 6] is to lie as P('x',)
What is put on the devices of all is one array: numbers on the host must be equal in all \
processes, and what lies on devices of one is that in all of them.
Make it of the parts with jax.make_array_from_process_local_data, or, where all processes have the \
same, with jax.make_array_from_callback."""
NOT_HERE = """\
cumsum cannot be simulated on arrays that are not all here: \
args[0] is on cpu devices {all}
A simulation is of one process, and reads all numbers of its arguments.
Give it NumPy's: all processes get them by process_allgather(x, tiled=True) of \
jax.experimental.multihost_utils, of an UnevenArray's .value. What the function closes over is to \
be an argument, then."""
OF_ITS_OWN = """\
<lambda> was called with arguments on other devices than its mesh \
(cpu devices {all}): \
args[0] float32[16,6] is on cpu device {own}
A committed argument must lie on exactly the mesh's devices.
Move what is one array in all processes with mw.reshard(x, NamedSharding(mesh, spec)). What each \
has for itself: make it of the parts with jax.make_array_from_process_local_data, or, where all \
processes have the same, with jax.make_array_from_callback."""

CASES: dict[str, Callable[[], int]] = {
    "within": lambda: move(VALUE, every("x"), every()),
    "within, other dim": lambda: move(
        VALUE, on(range(8), (2, 4), "y", "x"), on(range(8), (2, 4), "x")
    ),
    "within, uneven": lambda: move_uneven(
        on(range(8), (2, 4), "y", "x"), on(range(8), (2, 4), "x", "y")
    ),
    "refined": lambda: move(VALUE, every("x"), on(range(8), (4, 2), "y")),
    "stays": lambda: move(VALUE, every("x"), on(range(8), (2, 4), ("x", "y"))),
    "another order": lambda: move(VALUE, every("x"), mixed("y", "x")),
    "another order, donated": lambda: move(VALUE, mixed("x"), every("x"), donate=True),
    "fewer": lambda: move(VALUE, every("x"), few("x")),
    "fewer, replicated": lambda: move(VALUE, every("x"), few(), max_bytes=VALUE.nbytes),
    "more": lambda: move(VALUE, few("x"), every("x")),
    "unlike processes": lambda: move(VALUE, every("x"), on([1, 5, 6], (3,), None, "x")),
    "fewer, uneven": lambda: move_uneven(every("x"), on([6, 1, 5], (3,), "x")),
    "more, uneven": lambda: move_uneven(few("x"), mixed("y", "x")),
    "scalar": lambda: move(np.float32(3.5), every(), few()),
    "keys": lambda: move_keys(every("x"), few("x")),
    "keys, in another order": lambda: move_keys(every("x"), mixed("y")),
    "tree": lambda: move_tree(every("x"), few("x")),
    "from one process": lambda: move(VALUE, on(range(4), (4,), "x"), every("x")),
    "from one device": lambda: move(VALUE, on([6], (1,)), every(None)),
    "under mw.jit": lambda: jitted(every("x"), every()),
    "under mw.jit, over two axes": lambda: jitted(
        on(range(8), (2, 4), "y", "x"), on(range(8), (2, 4), "x")
    ),
    "under mw.jit, no elements": lambda: without_rows(every(None, "x"), every(None, "x")),
    "under mw.jit, no elements, even": lambda: without_rows(
        on([0, 4, 5], (3,)), on([0, 4, 5], (3,), None, "x")
    ),
    "under mw.jit, no elements, of the other": lambda: without_rows(
        on([4, 5, 6], (3,)), on([4, 5, 6], (3,), None, "x")
    ),
    "as text": as_text,
    "simulated": lambda: refused(
        lambda: (
            mw.jit(jax.numpy.cumsum, in_shardings=every("x"))
            .partition(VALUE[:, 0])
            .simulate(lay(VALUE[:, 0], every("x")))
        ),
        mw.ArgumentError,
        NOT_HERE.format(all=numbers()),
    ),
    "simulated, replicated": lambda: (
        mw.jit(jax.numpy.negative, in_shardings=every())
        .partition(VALUE)
        .simulate(lay(VALUE, every()))
        .shape[0]
    ),
    "NaNs in padding": with_nans_in_padding,
    "a NaN": with_a_nan,
    "NumPy's in shards": lambda: refused(
        lambda: mw.jit(lambda x: x * 2, in_shardings=every("x"))(VALUE), ValueError
    ),
    "NumPy's in uneven shards": lambda: refused(
        lambda: mw.jit(lambda x: x * 2, mesh=every().mesh, in_shardings=P("x"))(UNEVEN),
        mw.ArgumentError,
    ),
    "NumPy's on every device": lambda: check(
        mw.jit(lambda x: x * 2, in_shardings=every(), out_shardings=every("x"))(VALUE),
        VALUE * 2,
        every("x"),
    ),
    "figures of both": lambda: refused(mw.calibrate, mw.ArgumentError),
    "figures of the other": lambda: refused(
        lambda: mw.calibrate(list(others().devices.flat)), mw.ArgumentError
    ),
    "times of the other": lambda: refused(
        lambda: mw.autotune(mw.jit(lambda x: x.sum(), mesh=others()), VALUE), mw.ArgumentError
    ),
    "from the host": lambda: check(mw.reshard(VALUE, every("x")), VALUE, every("x")),
    "from the host, uneven": lambda: check(
        mw.reshard(jax.numpy.asarray(UNEVEN), every("x")), UNEVEN, every("x")
    ),
    "from the host, NaNs": lambda: check(
        mw.reshard(VALUE * np.nan, few("x")), VALUE * np.nan, few("x")
    ),
    "from the host, a number": lambda: check(mw.reshard(3.5, few()), np.float32(3.5), few()),
    "from the host, keys": lambda: move_keys(None, few("x")),
    "from the host, to one process": lambda: check(mw.reshard(VALUE, mine()), VALUE, mine()),
    "from each host another": lambda: refused(
        lambda: mw.reshard(VALUE + jax.process_index(), every("x")), mw.MeshError, NOT_ONE
    ),
    "from devices of each": lambda: refused(
        lambda: mw.reshard(jax.device_put(VALUE, mine()), every("x")), mw.MeshError, NOT_ONE
    ),
    "to a program, from devices of each": lambda: refused(
        lambda: mw.jit(lambda x: x, mesh=every().mesh)(
            jax.device_put(VALUE, jax.local_devices()[0])
        ),
        mw.MeshError,
        OF_ITS_OWN.format(all=numbers(), own=jax.local_devices()[0].id),
    ),
    "to one process": lambda: move(VALUE, every("x"), on(range(4), (4,), "x")),
    "to one process, gathered": lambda: move(VALUE, few("x"), on(range(4), (4,))),
    "to one process, other axes": lambda: move(VALUE, every("x"), on(range(4), (2, 2), "y", "x")),
    "to one process, keys": lambda: move_keys(every("x"), on(range(4), (4,), "x")),
    "from one to the other": lambda: move(
        VALUE, on(range(4), (4,), "x"), on(range(4, 8), (4,), "x")
    ),
    "no elements": lambda: move(VALUE[:0], every("x"), few(None, "x")),
}


def main() -> None:
    number, port, *names = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    for name in names:
        try:
            print(f"{name}: {CASES[name]()}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main()
