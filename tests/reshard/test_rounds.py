"""Rounds bring every device exactly its tile, in as few launches and bytes as there can be.

Of random tiles, with devices that hold nothing, uneven ends and replicas. What is said of the plan
is checked piece by piece; what the program does is simulated on one device, with garbage wherever
the array has no elements.
"""

import itertools
import math
import random

import jax
import numpy as np
import pytest
from jax import lax

from meshwise.ir.mesh import Mesh
from meshwise.reshard.exchange import Parcel, apply_rounds, travel_key
from meshwise.reshard.rounds import MOST_ROUNDS, plan_rounds
from meshwise.reshard.tiles import Tiles, received_bytes
from tests.reshard.tiling import check_rounds, held, inside, random_tiles

SHAPES = [(), (1,), (0,), (5,), (16,), (4, 6), (7, 3), (0, 3), (4, 3, 2), (1, 9, 1)]
AXIS = "devices"
GARBAGE = 99


def random_ends(seed, shape, devices):
    """Tiles before and after."""
    draw = random.Random(f"{seed} {shape} {devices}")
    source = random_tiles(draw, shape, devices, is_whole=True)
    return source, random_tiles(draw, shape, devices, is_whole=False, idle=draw.choice([0, 0.5]))


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 13])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_device_gets_its_tile_once(shape, devices):
    for seed in range(12):
        source, target = random_ends(seed, shape, devices)
        rounds = plan_rounds(source, target, most=devices)
        assert rounds is not None
        check_rounds(source, target, rounds)
        received = {p.receiver: 0 for each in rounds for p in each.pieces}
        for piece in (p for each in rounds for p in each.pieces if p.sender != p.receiver):
            received[piece.receiver] += math.prod(piece.size)
        if shape:
            assert max(received.values(), default=0) * 4 == received_bytes(source, target, 4)


@pytest.mark.parametrize("shape", [(), (16,), (7, 3)], ids=str)
def test_there_are_no_more_rounds_than_are_allowed(shape):
    """None where there is no such plan; the fewest there are always are one."""
    for seed in range(8):
        source, target = random_ends(seed, shape, 8)
        plans = [plan_rounds(source, target, most) for most in range(9)]
        fewest = next(most for most, rounds in enumerate(plans) if rounds is not None)
        for most, rounds in enumerate(plans):
            assert (rounds is None) == (most < fewest)
            if rounds is not None:
                check_rounds(source, target, rounds)
                assert sum(each.is_sent for each in rounds) <= most


def rows(count, devices=None, shape=(12,)):
    """A dim in so many parts, on the devices in turn or on those given; others hold none."""
    block = -(-shape[0] // count)
    on = range(count) if devices is None else devices
    starts = {device: (i % count * block,) for i, device in enumerate(on)}
    return Tiles(shape, (block,), tuple(starts.get(d) for d in range(max(12, *on) + 1)))


HOW_MANY = {  # from, to: launches, elements that travel from the busiest device
    "the same": (rows(4), rows(4), 0, 0),
    "to the neighbour": (rows(4), rows(4, [1, 2, 3, 0]), 1, 3),
    "to other devices": (rows(4), rows(4, [4, 5, 6, 7]), 1, 3),
    "to more devices": (rows(2), rows(4), 2, 6),
    "to fewer devices": (rows(4), rows(2), 2, 6),
    "from a replica to shards": (rows(1, [0, 1, 2, 3]), rows(4), 0, 0),
    "from one to all": (rows(1), rows(12), 11, 11),
    "from all to one": (rows(12), rows(1), 11, 11),
    "from one replica to another": (rows(1, [0]), rows(1, [5]), 1, 12),
    "from half to all": (rows(1, [0, 1, 2, 3]), rows(1, range(8)), 1, 12),
    "a third each to a quarter each": (rows(3), rows(4), 1, 3),
}


@pytest.mark.parametrize("case", HOW_MANY)
def test_how_many_launches_and_elements(case):
    source, target, launches, elements = HOW_MANY[case]
    devices = max(len(source.starts), len(target.starts))
    source, target = (
        Tiles(t.shape, t.block, (*t.starts, *[None] * (devices - len(t.starts))))
        for t in (source, target)
    )
    rounds = plan_rounds(source, target)
    check_rounds(source, target, rounds)
    sent = [each for each in rounds if each.is_sent]
    assert (len(sent), sum(math.prod(each.shape) for each in sent)) == (launches, elements)
    assert launches <= MOST_ROUNDS


def test_large_pieces_travel_together():
    # Device 1 sends two rows to 0; 2 sends four to 0, and 0 four to 1: those two at a time.
    source = Tiles((12,), (4,), ((0,), (4,), (8,)))
    target = Tiles((12,), (6,), ((6,), (0,), None))
    sent = [each for each in plan_rounds(source, target) if each.is_sent]
    assert [(each.shape, len(each.pieces)) for each in sent] == [((4,), 2), ((2,), 1)]


@pytest.fixture
def simulated(monkeypatch):
    """Target tiles on all devices of `jax.vmap`, and how many launches there were.

    There a `ppermute` must be of all devices. Those to which nothing is sent get garbage here.
    """

    def simulate(values, ends):
        devices = len(ends[0][0].starts)
        mesh = Mesh((AXIS,), (devices,), ((AXIS, (AXIS,)),))
        launches = []

        def ppermute(x, axes, pairs):
            assert len({s for s, _ in pairs}) == len({r for _, r in pairs}) == len(pairs)
            launches.append(pairs)
            sender = np.full(devices, devices)
            for source, target in pairs:
                sender[target] = source
            unsent = jax.numpy.full((1, *x.shape), GARBAGE, x.dtype)
            held = jax.numpy.concatenate([lax.all_gather(x, axes), unsent])
            return held[jax.numpy.asarray(sender)[lax.axis_index(axes)]]

        def per_device(*arrays):
            parcels = [
                Parcel(array, plan_rounds(source, target), source, target)
                for array, (source, target) in zip(arrays, ends, strict=True)
            ]
            return apply_rounds(parcels, (AXIS,), mesh)

        local = [held(v, s, GARBAGE) for v, (s, _) in zip(values, ends, strict=True)]
        with monkeypatch.context() as patch:
            patch.setattr(lax, "ppermute", ppermute)
            outs = jax.jit(jax.vmap(per_device, axis_name=AXIS))(*local)
            return outs, len(launches)

    return simulate


def check_held(out, value, target):
    """Every device holds its part of the value; what padding holds is not asked."""
    out = np.asarray(out)
    assert out.shape == (len(target.starts), *target.block, *value.shape[len(target.shape) :])
    for device, start in enumerate(target.starts):
        if start is not None:
            part = value[inside(target, device)]
            got = out[(device, *map(slice, part.shape[: len(target.shape)]))]
            np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize(
    "shape, devices, seed",
    [
        *[((), 6, 3), ((), 4, 8), ((11,), 6, 0), ((11,), 6, 1), ((7, 5), 8, 2), ((7, 5), 5, 3)],
        *[((4, 3, 2), 8, 4), ((1, 9), 7, 5), ((16,), 8, 6)],
    ],
)
@pytest.mark.parametrize("element", [(), (2,)], ids=["numbers", "pairs"])
def test_what_devices_hold_afterwards(simulated, shape, devices, seed, element):
    source, target = random_ends(seed, shape, devices)
    value = np.arange(1, 1 + math.prod((*shape, *element)), dtype=np.int32)
    value = value.reshape((*shape, *element))
    [out], sent = simulated([value], [(source, target)])
    check_held(out, value, target)
    assert sent == sum(each.is_sent for each in plan_rounds(source, target))


def test_parcels_travel_together(simulated):
    cuts = [((11,), (4,), (3,)), ((6, 3), (2, 3), (2, 3)), ((12, 2), (4, 2), (3, 2))]
    ends = []
    for shape, before, after in cuts:
        first = range(0, 12, before[0])[:3]
        then = range(0, 12, after[0])[: -(-shape[0] // after[0])]
        source = [*[(i, *[0] * (len(shape) - 1)) for i in first], None, None]
        target = [None, *[(i, *[0] * (len(shape) - 1)) for i in then]]
        target += [None] * (5 - len(target))
        ends.append((Tiles(shape, before, tuple(source)), Tiles(shape, after, tuple(target))))
    keys = [travel_key(plan_rounds(*pair)) for pair in ends]
    alike = [pair for pair, key in zip(ends, keys, strict=True) if key == keys[0]]
    assert len(alike) == 2  # the one in the middle goes to other devices
    values = [np.arange(1, 1 + math.prod(s.shape)).reshape(s.shape) for s, _ in alike]
    outs, sent = simulated(values, alike)
    for out, value, (_, target) in zip(outs, values, alike, strict=True):
        check_held(out, value, target)
    assert sent == sum(each.is_sent for each in plan_rounds(*alike[0]))


def test_travel_keys_tell_who_sends_to_whom():
    ends = [random_ends(seed, (8,), 4) for seed in range(6)]
    for a, b in itertools.product(ends, ends):
        one, other = (
            [sorted((p.sender, p.receiver) for p in r.pieces) for r in plan_rounds(*e)]
            for e in (a, b)
        )
        keys = travel_key(plan_rounds(*a)), travel_key(plan_rounds(*b))
        assert (one == other) == (keys[0] == keys[1])
