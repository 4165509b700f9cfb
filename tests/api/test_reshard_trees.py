"""`mw.reshard` of trees: every leaf arrives, what is alike travels together, donors are freed.

What is freed is never in use: by a result, by a leaf that stays, by a batch that is still to come.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.run import transfer
from tests.api.resharding import ORDER, check, lay, numbers, on, pointers


@contextlib.contextmanager
def compiled():
    """A list of the programs that XLA compiles meanwhile."""
    found = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_every_leaf_of_a_tree_arrives():
    rows, row, columns = on((8,), "x")(), on((3,), "x", order=[6, 0, 3])(), on((8,), None, "x")()
    values = {
        "rows": numbers((8, 4)),
        "uneven": numbers((7, 3)),
        "keys": jax.random.split(jax.random.key(1), 8),
        "short": numbers((8, 8), jnp.bfloat16),
        "elsewhere": numbers((5, 4)),
        "host": numbers((8,)),
        "nothing": None,
    }
    x = {
        name: lay(value, row if name == "elsewhere" else rows)
        for name, value in values.items()
        if name not in ("host", "nothing")
    }
    x |= {"host": values["host"], "nothing": None, "again": [x["rows"], (x["rows"], x["rows"])]}
    values["again"] = [values["rows"], (values["rows"], values["rows"])]
    between = on((2, 3), None, "x")()
    targets = {
        "rows": on((8,))(),
        "uneven": on((2, 4), "y")(),
        "keys": P(),
        "short": P(None, "x"),
        "elsewhere": on((2, 4), "x", "y")(),
        "host": on((2, 4), "y", order=ORDER)(),
        "nothing": None,
        "again": [P(), between],  # a prefix of the tree
    }
    found = mw.reshard(x, targets)
    each = targets | {"keys": on((8,))(), "short": columns}
    each["again"] = [on((8,))(), (between, between)]
    assert jax.tree.structure(found) == jax.tree.structure(x)
    jax.tree.map(check, found, values, each)
    jax.block_until_ready(found)
    with compiled() as programs:
        found = mw.reshard(x, targets)
    assert not programs
    jax.tree.map(check, found, values, each)


def test_one_sharding_is_for_all_and_none_leaves_alone():
    value, target = numbers((8, 4)), on((8,), None)()
    a, b = lay(value, on((8,), "x")()), lay(value + 1, on((2, 4), "y")())
    jax.tree.map(check, mw.reshard([a, b], target), [value, value + 1], [target, target])
    stayed = mw.reshard({"a": a, "b": [b, None]}, None)
    assert stayed["a"] is a and stayed["b"][0] is b and stayed["b"][1] is None
    assert mw.reshard((), target) == () and mw.reshard(None, target) is None
    host = numbers((3,))
    kept, moved = mw.reshard((host, a), (None, P()))
    assert kept is host
    check(moved, value, on((8,))())


SEVERAL = {  # of one shape, before and after; how many, and how many programs move them
    "within": ((8, 4), on((8,), "x"), on((8,), None), 6, 1),
    "within, uneven": ((7, 4), on((8,), "x"), on((2, 4), "y"), 3, 1),
    "between": ((9, 4), on((8,), "x"), on((3,), "x", order=[5, 0, 2]), 5, 1),
    "between, then a gather": ((8, 4), on((1,), order=[6]), on((4,)), 3, 2),
    "scalars": ((), on((8,)), on((3,), order=[5, 0, 2]), 4, 1),
    "scalars to more": ((), on((1,), order=[6]), on((8,)), 4, 1),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_small_alike_arrays_travel_together(case):
    shape, source, target, count, most = SEVERAL[case]
    values = [numbers(shape) + i for i in range(count)]
    arrays = [lay(value, source()) for value in values]
    with compiled() as programs:
        found = mw.reshard(arrays, target())
    assert len(programs) <= most
    for array, value in zip(found, values, strict=True):
        check(array, value, target())


def test_arrays_of_several_kinds_travel_by_one_program():
    source, target = on((8,), "x")(), on((4,), "x", order=[1, 3, 5, 7])()
    shapes = [(8,), (8, 3), (16, 2), (7,), (8, 3)]
    kinds = [np.float32, np.int8, np.float32, np.int32, np.uint16]
    values = [numbers(n, kind) for n, kind in zip(shapes, kinds, strict=True)]
    arrays = [lay(value, source) for value in values]
    with compiled() as programs:
        found = mw.reshard(arrays, target)
    assert len(programs) == 1
    for array, value in zip(found, values, strict=True):
        check(array, value, target)


@pytest.mark.parametrize("target", [on((8,)), on((3,), "x", order=[5, 0, 2])], ids=["one", "two"])
def test_batches_are_of_so_many_bytes(monkeypatch, target):
    """Five arrays of 112 or 64 bytes a device, two at a time; the third batch is of one."""
    values = [numbers((6, 4)) + i for i in range(5)]
    sizes = []
    for kind, move in transfer._MOVE.items():

        def counted(arrays, transfers, limits, move=move):
            sizes.append(sum(t.moved_bytes for t in transfers))
            return move(arrays, transfers, limits)

        monkeypatch.setitem(transfer._MOVE, kind, counted)
    monkeypatch.setattr(transfer, "_BATCH_BYTES", 240)
    arrays = [lay(value, on((8,), "x")()) for value in values]
    found = mw.reshard(arrays, target(), donate=True)
    assert len(sizes) >= 3 and max(sizes) <= 240
    for array, value in zip(found, values, strict=True):
        check(array, value, target())
    assert all(array.is_deleted() for array in arrays)


MOVES = {
    "within": ((8, 4), on((8,), "x"), on((8,), None)),
    "uneven": ((7, 4), on((8,), "x"), on((2, 4), "y", "x")),
    "between": ((8, 4), on((8,), "x"), on((3,), "x", order=[5, 0, 2])),
    "replicas to fewer": ((8, 4), on((8,)), on((3,), order=[5, 0, 2])),
    "from one": ((8, 4), on((1,), order=[2]), on((8,), "x")),
}


@pytest.mark.parametrize("kind", [np.float32, "key"], ids=["numbers", "keys"])
@pytest.mark.parametrize("case", MOVES)
def test_a_donated_array_is_freed_when_it_has_moved(case, kind):
    shape, source, target = MOVES[case]
    value = jax.random.split(jax.random.key(0), shape) if kind == "key" else numbers(shape)
    x = lay(value, source())
    found = mw.reshard(x, target(), donate=True)
    check(found, value, target())
    assert x.is_deleted() or not set(pointers(x)).isdisjoint(pointers(found))
    assert x.is_deleted() or case == "replicas to fewer"


def test_what_lies_on_the_host_is_not_freed():
    host, target = numbers((8, 4)), on((8,), "x")()
    check(mw.reshard(host, target, donate=True), host, target)
    np.testing.assert_array_equal(host, numbers((8, 4)))
    one = jax.device_put(host, jax.devices()[3])
    check(mw.reshard([one, host], target, donate=True)[0], host, target)
    assert one.is_deleted()


ROWS = on((8,), "x")
TWICE = {  # where one array that is donated twice goes; None where it stays
    "both move": (on((8,)), on((8,))),
    "one stays": (ROWS, on((8,))),
    "one stays, another name": (on((2, 4), ("x", "y")), on((8,))),
    "one is left alone": (lambda: None, on((8,))),
    "two ways": (on((4,), "x", order=[4, 5, 6, 7]), on((8,))),
    "two ways, replicas": (on((4,), order=[4, 5, 6, 7]), on((8,), None)),
    "two meshes": (on((4,), "x", order=[4, 5, 6, 7]), on((3,), "x")),
}


@pytest.mark.parametrize("max_bytes", [None, 128], ids=["one batch", "batches"])
@pytest.mark.parametrize("flip", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", TWICE)
def test_an_array_that_is_donated_twice(case, flip, max_bytes):
    value = numbers((8, 4))
    x = lay(value, ROWS())
    targets = [target() for target in TWICE[case]]
    targets = targets[::-1] if flip else targets
    found = mw.reshard([x, x], targets, donate=True, max_bytes=max_bytes)
    for array, target in zip(found, targets, strict=True):
        check(array, value, target or ROWS())
    in_use = {p for array in found for p in pointers(array)}
    assert x.is_deleted() == (case in ("both move", *[c for c in TWICE if c.startswith("two")]))
    assert x.is_deleted() or not in_use.isdisjoint(pointers(x))


def test_nothing_is_moved_or_freed_where_one_does_not_fit():
    small, large = lay(numbers((8,)), ROWS()), lay(numbers((8, 64)), ROWS())
    with pytest.raises(mw.MemoryLimitError):
        mw.reshard([small, large], on((8,))(), donate=True, max_bytes=100)
    assert not small.is_deleted() and not large.is_deleted()
    found = mw.reshard([small, large], on((8,))(), donate=True, max_bytes=8 * 64 * 4)
    check(found[1], numbers((8, 64)), on((8,))())
    assert small.is_deleted() and large.is_deleted()


def test_too_many_rounds_are_left_to_jax(monkeypatch):
    """Where a program would be too long, the array goes by `jax.device_put`, unless it must fit."""
    monkeypatch.setattr(transfer, "plan_between", lambda *_: None)
    for shape in [(11, 4), (12, 4)]:
        value = numbers(shape)
        x = lay(value, on((8,), "x")())
        target = on((3,), "x", order=[5, 0, 2])()
        found = mw.reshard([x, x], [target, NamedSharding(target.mesh, P())], donate=True)
        check(found[0], value, target)
        check(found[1], value, NamedSharding(target.mesh, P()))
        assert x.is_deleted()
        with pytest.raises(mw.MemoryLimitError):
            mw.reshard(found[0], on((8,), "x")(), max_bytes=1 << 20)
