"""Which device sends its shard to which, where shards of equal size change places."""

from functools import lru_cache
from itertools import product

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Sharding

Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 12)
def permute_pairs(source: Sharding, target: Sharding, axes: Axes, mesh: Mesh) -> Pairs:
    """(sender, receiver) pairs over `axes`, those whose place differs, in the mesh's order.

    The other axes have the same dim and place value at both ends, so the same pairs hold at each
    of their indices. A device that already holds its target shard keeps it; the others are
    matched in order.
    """
    sizes = [mesh.axis_size[axis] for axis in axes]
    devices = list(product(*map(range, sizes)))
    held: dict[tuple[int, ...], list[int]] = {}
    wanted: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(devices):
        index = dict(zip(axes, place, strict=True))
        held.setdefault(_tile(source, index, mesh), []).append(number)
        wanted.setdefault(_tile(target, index, mesh), []).append(number)
    pairs = []
    for tile, receivers in wanted.items():
        senders = held[tile]
        kept = set(senders) & set(receivers)
        pairs += [(device, device) for device in kept]
        pairs += zip(
            (d for d in senders if d not in kept),
            (d for d in receivers if d not in kept),
            strict=True,
        )
    return tuple(sorted(pairs))


def _tile(sharding: Sharding, index: dict[str, int], mesh: Mesh) -> tuple[int, ...]:
    """Number of a device's shard in each dim, with axes that are not in `index` at zero."""
    tile = []
    for axes in sharding.dims:
        number = 0
        for axis in axes:
            size, place = mesh.axis_size[axis], index.get(axis, 0)
            number = number * size + (size - 1 - place if axis in sharding.turned else place)
        tile.append(number)
    return tuple(tile)
