"""Two meshes have one mesh in common exactly where one exists, and axes are the same devices in it.

Checked on device numbers: the index of every device along an axis is what the axes of the common
mesh that stand for it count, and where there is said to be none, no mesh of any sizes will do.
"""

import itertools
import math

import numpy as np
import pytest

from meshwise.ir.mesh import refine_mesh
from meshwise.reshard.meshes import common_mesh

FOUND = [  # sizes of two meshes, and of the one in common
    ((8,), (2, 4), (2, 2, 2)),
    ((2, 4), (4, 2), (2, 2, 2)),
    ((2, 2, 2), (8,), (2, 2, 2)),
    ((6,), (2, 3), (2, 3)),
    ((6,), (3, 2), (3, 2)),
    ((3, 4), (6, 2), (3, 2, 2)),
    ((12,), (12,), (2, 2, 3)),
    ((1, 8), (8, 1), (2, 2, 2)),
    ((1,), (1, 1), ()),
    ((), (), ()),
    ((), (1,), ()),
    ((2, 1, 3), (6,), (2, 3)),
    ((30,), (5, 6), (5, 2, 3)),
    ((4, 9), (2, 6, 3), (2, 2, 3, 3)),
]
NONE = [  # neither of the numbers of devices below some axis divides the other
    ((2, 3), (3, 2)),
    ((4, 3), (3, 4)),
    ((2, 6), (3, 4)),
    ((2, 2, 3), (4, 3, 1, 2)),
    ((8,), (4,)),
    ((8,), ()),
    ((2, 4), (2, 5)),
]


def named(sizes, letters):
    return tuple(zip(letters, sizes, strict=False))


def along(sizes, place):
    """The index of every device along one axis of a mesh of these sizes."""
    return np.unravel_index(np.arange(math.prod(sizes)), sizes)[place] if sizes else np.zeros(1)


def check_common(source, target, found):
    """Every property of a mesh in common, on the numbers of the devices."""
    mesh = found.mesh
    assert found.source_axes == mesh.user_axes
    for prime in mesh.sizes:
        assert all(prime % n for n in range(2, prime))
    place = {axis: along(mesh.sizes, i) for i, axis in enumerate(mesh.names)}
    for user, shown in ((source, found.source_axes), (target, found.target_axes)):
        assert [name for name, _ in shown] == [name for name, _ in user]
        for i, (_, subs) in enumerate(shown):
            number = np.zeros(mesh.device_count, int)
            for sub in subs:
                number = number * mesh.axis_size[sub] + place[sub]
            np.testing.assert_array_equal(number, along([size for _, size in user], i))
        # Every axis is used once, in order.
        assert tuple(sub for _, subs in shown for sub in subs) == mesh.names
    for name, subs in found.source_axes:
        expected = refine_mesh((name,), (mesh.size(subs),)).names
        assert len(subs) == len(expected) and (len(subs) != 1 or subs == (name,))


@pytest.mark.parametrize("source, target, sizes", FOUND, ids=str)
def test_what_is_found(source, target, sizes):
    ends = named(source, "xyzu"), named(target, "abcd")
    found = common_mesh(*ends)
    assert found.mesh.sizes == sizes
    check_common(*ends, found)
    back = common_mesh(*reversed(ends))
    assert back.mesh.sizes == sizes
    check_common(*reversed(ends), back)


@pytest.mark.parametrize("source, target", NONE, ids=str)
def test_what_there_is_not(source, target):
    ends = named(source, "xyzu"), named(target, "abcd")
    assert common_mesh(*ends) is None
    assert common_mesh(*reversed(ends)) is None


@pytest.mark.parametrize("axes", [(), (("x", 8),), (("x", 1), ("y", 6)), (("x", 2), ("y", 4))])
def test_a_mesh_and_itself_are_the_refined_mesh(axes):
    found = common_mesh(axes, axes)
    assert found.mesh == refine_mesh([name for name, _ in axes], [size for _, size in axes])
    assert found.source_axes == found.target_axes == found.mesh.user_axes


def test_names_may_be_shared():
    """Names of the target say nothing: its `x` is other devices than the source's."""
    ends = [("x", 2), ("y", 4)], [("y", 4), ("x", 2)]
    found = common_mesh(*ends)
    check_common(*ends, found)
    assert dict(found.target_axes) == {"y": ("x", "y.0"), "x": ("y.1",)}


def factorings(total):
    """Every sequence of sizes above one with a product, orders told apart."""
    yield from [()] if total == 1 else []
    for first in range(2, total + 1):
        if total % first == 0:
            for rest in factorings(total // first):
                yield (first, *rest)


def counts_an_axis(sizes, index):
    """Whether some neighbouring axes of a mesh count what an axis of another does."""
    for start, end in itertools.combinations_with_replacement(range(len(sizes) + 1), 2):
        number = np.zeros(len(index), int)
        for i in range(start, end):
            number = number * sizes[i] + along(sizes, i)
        if (number == index).all():
            return True
    return False


@pytest.mark.parametrize("total", [4, 6, 8, 12, 16, 18])
def test_where_there_is_one_it_is_found(total):
    """Of all pairs of meshes of so many devices, by trying every mesh."""
    every = list(factorings(total))
    axes = {sizes: [along(sizes, i) for i in range(len(sizes))] for sizes in every}
    counts = {
        (fine, sizes): all(counts_an_axis(fine, index) for index in axes[sizes])
        for fine in every
        for sizes in every
    }
    for source, target in itertools.product(every, every):
        exists = any(counts[fine, source] and counts[fine, target] for fine in every)
        ends = named(source, "xyzu"), named(target, "abcd")
        found = common_mesh(*ends)
        assert (found is not None) == exists, ends
        if found is not None:
            check_common(*ends, found)


def test_axes_of_one_device_are_nothing():
    for source, target in [((4, 1, 2), (1, 8)), ((1, 2, 3), (6, 1)), ((1, 1), (1,))]:
        ends = named(source, "xyz"), named(target, "ab")
        found = common_mesh(*ends)
        check_common(*ends, found)
        ones = [name for name, size in (*ends[0], *ends[1]) if size == 1]
        shown = dict((*found.source_axes, *found.target_axes))
        assert all(shown[name] == () for name in ones)
