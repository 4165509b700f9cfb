"""The 3-D U-Net: its halos are sent, to the byte; XLA's bytes; the numbers of one device."""

from math import prod

import jax
import numpy as np
import pytest

from examples.cases import Case, program_of
from examples.unet import hints, model
from tests.examples.stepping import F32, all_reduce, check_numbers, check_peers, host, sent

SMALL = model.Config(size=(32, 16, 16))
UNEVEN = model.Config(size=(28, 12, 20))
CASES = {name: hints.case(name, SMALL) for name in hints.SCHEMES}


# Inside, one axis cuts the batch, and on the lower level the other one cuts the depth, of which
# slabs are smaller: to bring volumes there and back is less than their halos.
LESS = {"bars": {"ppermute": (22, 133_120), "all_to_all": (6, 26_624)}}


def shards_of(case: Case) -> tuple[int, ...]:
    """In how many pieces each dim of the volumes is cut: batch, depth, height, width."""
    spec = tuple(case.ins[1])
    spec += (None,) * (4 - len(spec))
    return tuple(case.mesh[axis] if axis else 1 for axis in spec)


def halo(case: Case, level: int, channels: int, again: bool = False) -> tuple[int, int]:
    """Ppermutes and bytes that bring each block the voxels around it, corners included.

    A cut dim takes one ppermute from each side (of two blocks each has one neighbour, and both
    send in one), of a slab a voxel thick. Dims that came before have their halo already.

    Where the same is wanted `again`, what was sent from two sides is there, unless it was cut of
    what one exchange had made, which is made again.
    """
    config = case.step.keywords["config"]
    batch, *shards = shards_of(case)
    size = [n // 2**level // s for n, s in zip(config.size, shards, strict=True)]
    count = total = 0
    for dim, pieces in enumerate(shards):
        if pieces > 1:
            sides = 1 if pieces == 2 else 2
            slab = prod(size[:dim] + size[dim + 1 :])
            is_there = again and sides == 2 and 2 not in shards[:dim]
            if not is_there:
                count += sides
                total += sides * slab * config.batch // batch * channels * F32
            size[dim] += 2
    return count, total


def convolutions(config: model.Config) -> list[tuple[int, int, int]]:
    """Level, channels before and after, of each convolution of 3 x 3 x 3, the first one first."""
    widths = config.channels
    found = []
    for level, (before, width) in enumerate(zip((1, *widths), widths, strict=False)):
        found += [(level, before, width), (level, width, width)]
    for level, width in reversed(list(enumerate(widths[:-1]))):
        found += [(level, 2 * width, width), (level, width, width)]
    return found


def halos(case: Case) -> tuple[int, int]:
    """All halos of a training step.

    A convolution takes one of what it reads; its kernel's gradient wants that again; the gradient
    of what it reads takes one of what arrives, but for the first, which reads the volumes.
    """
    wanted = []
    for number, (level, before, after) in enumerate(convolutions(case.step.keywords["config"])):
        wanted += [halo(case, level, before), halo(case, level, before, again=True)]
        wanted += [halo(case, level, after)] if number else []
    counts, totals = zip(*wanted, strict=True)
    return sum(counts), sum(totals)


def gradients(case: Case) -> int:
    """Bytes of the sums over all devices: of each parameter's gradient, and of the loss."""
    elements = sum(prod(leaf.shape) for leaf in jax.tree.leaves(case.types[0]))
    return all_reduce(elements + 1, case.devices)


@pytest.mark.parametrize(
    "name", ["slabs", "bars", "blocks", pytest.param("batch", marks=pytest.mark.slow)]
)
def test_sends_halos_and_gradients_to_the_byte(name: str):
    found = sent(CASES[name])
    around = halos(CASES[name])
    assert found.pop("all_reduce")[1] == gradients(CASES[name])
    assert found == LESS.get(name, {"ppermute": around})
    assert sum(total for _, total in found.values()) <= around[1]


@pytest.mark.parametrize(
    "place", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_large_volumes_send_halos_and_gradients_to_the_byte(place: int):
    case = list(hints.large_cases())[place]
    found = sent(case)
    assert found["ppermute"] == halos(case)
    count, total = found["all_reduce"]
    assert total == pytest.approx(gradients(case), abs=count)  # each is rounded
    assert set(found) == {"ppermute", "all_reduce"}


def start(config: model.Config):
    return host(jax.jit(model.init, static_argnums=1)(jax.random.key(0), config))


def volumes(config: model.Config, steps: int):
    spheres = jax.jit(model.spheres, static_argnums=1)
    return [host(spheres(jax.random.key(i), config)) for i in range(steps)]


QUICK = pytest.mark.parametrize(
    "name",
    ["blocks", *(pytest.param(n, marks=pytest.mark.slow) for n in ("slabs", "bars", "batch"))],
)


@QUICK
def test_training_has_the_numbers_of_one_device(name: str):
    params = start(SMALL)
    check_numbers(CASES[name], params, volumes(SMALL, 1), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_uneven_volumes_have_the_numbers_of_one_device(name: str):
    """28, 12 and 20 voxels in eight, four and two; halved once, and still uneven."""
    case = hints.case(name, UNEVEN)
    program = program_of(case)
    assert not any(str(c.kind) == "all_gather" and len(c.shape) == 5 for c in program.collectives)
    params = start(UNEVEN)
    check_numbers(case, params, volumes(UNEVEN, 1), 1e-5)


@pytest.mark.parametrize("which", ["gspmd", "shardy"])
@QUICK
def test_sends_no_more_than_xla(name: str, which):
    check_peers(CASES[name], which)


def test_spheres_are_volumes_with_an_inside():
    bright, inside = volumes(SMALL, 1)[0]
    assert bright.shape == (*inside.shape, 1) == (SMALL.batch, *SMALL.size, 1)
    assert set(np.unique(inside)) == {0, 1}
    assert bright[..., 0][inside == 1].mean() - bright[..., 0][inside == 0].mean() > 0.9
