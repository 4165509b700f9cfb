"""What an autotuner tries: moves that belong together, made wherever a program has room for them.

A policy is a function of a schedule that makes moves and says whether it made any. What is not
legal somewhere is left as it is there. Policies know no program by name: they look for collectives,
by kind and axes, and at what the cost model says of sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise._jax import named_axes
from meshwise.api.schedule import Schedule
from meshwise.errors import ArgumentError, IllegalMove
from meshwise.ir.mesh import Axes
from meshwise.ir.program import bytes_of, shape_of
from meshwise.schedule.handles import Handle, depths, feeding, found, handle_of

# All_reduces up to this size (bytes of the local operand) are not worth two collectives each.
SMALL_BYTES = 4096
# In so many parts is cut what is overlapped in chunks.
CHUNKS = 4


@dataclass(frozen=True)
class Policy:
    """Moves that are tried together, and how a table names them.

    Of one `kind`, such as slices along this dim or that, one is tried on a program. Policies are
    tried in their `order`: in another one they would come to the same, or to nothing.
    """

    order: int
    name: str
    apply: Callable[[Schedule], bool]
    kind: str = ""

    def may_follow(self, applied: Sequence["Policy"]) -> bool:
        """Whether it is tried after some others."""
        return not any(
            self.name == p.name or self.order < p.order or (self.kind and self.kind == p.kind)
            for p in applied
        )


def policies(schedule: Schedule) -> Iterator[Policy]:
    """What may be tried on a program as it is now."""
    if _peek(schedule, "scan"):
        yield Policy(0, "hoist", out_of_loops)
    if _peek(schedule, "all_reduce"):
        yield Policy(1, "merge", merged_sums)
    for axes in _groups(schedule, "all_reduce"):
        over = "*".join(axes)
        own = lambda s, axes=axes: compute_on_slices(s, axes, None)  # noqa: E731
        yield Policy(2, f"slices({over})", own, f"slices({over})")
        for dim in _dims(schedule, axes):
            name = f"slices({over}, dim {dim})"
            apply = lambda s, axes=axes, dim=dim: compute_on_slices(s, axes, dim)  # noqa: E731
            yield Policy(2, name, apply, f"slices({over})")
        yield Policy(3, f"small sums together({over})", lambda s, axes=axes: small_sums(s, axes))
    for axes in _groups(schedule, "all_gather") if schedule.may_slice else ():
        name = f"state in slices({'*'.join(axes)})"
        yield Policy(2, name, lambda s, axes=axes: state_in_slices(s, axes))
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        for axes in _groups(schedule, kind):
            name = f"bucket {kind}({'*'.join(axes)})"
            yield Policy(4, name, lambda s, k=kind, axes=axes: one_bucket(s, k, axes))
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for axes in _groups(schedule, kind):
            name = f"overlap {kind}({'*'.join(axes)})"
            yield Policy(5, name, lambda s, k=kind, axes=axes: overlap_products(s, k, axes))
    if _peek(schedule, "dot_general"):
        yield Policy(6, f"{CHUNKS} chunks", products_in_chunks)
    if schedule.platform == "tpu":  # elsewhere XLA fuses computations, and collectives stay apart
        yield Policy(7, "kernels", one_kernel_each)


def out_of_loops(s: Schedule) -> bool:
    """Collectives out of loops, wherever they can leave one."""
    return any([_tried(s, lambda loop=loop: s.hoist(loop)) for loop in s.find("scan")])


def merged_sums(s: Schedule) -> bool:
    """Sums in a row as one; sums of which only parts are read as reduce_scatters."""
    return any([_tried(s, lambda h=h: s.merge(h)) for h in s.find("all_reduce")])


def compute_on_slices(s: Schedule, axes: Axes, dim: int | None) -> bool:
    """Large all_reduces in two halves, what reads them between, and state kept in slices.

    Each tensor is cut along `dim`, or the first dim of its own that divides. Sums of slices that
    the computations need (norms) are reduced together.
    """
    reduced = _of_size(s.find("all_reduce", axes=axes), small=False)
    cut = [h for h in reduced if dim is None or dim < len(shape_of(h.value))]
    if not _together_or_each(s, cut, lambda handles: _split_and_reorder(s, handles, dim)):
        return False
    _together_or_each(s, s.may_slice, s.slice_state)
    small_sums(s, axes)
    return True


def state_in_slices(s: Schedule, axes: Axes) -> bool:
    """State kept in slices where what it is made of is gathered: gradients that come in parts."""
    gathered = _of_size(s.find("all_gather", axes=axes), small=False)
    later = _together_or_each(s, gathered, lambda handles: s.reorder(handles, more_bytes=True))
    return later and _together_or_each(s, s.may_slice, s.slice_state)


def _split_and_reorder(s: Schedule, reduced: Sequence[Handle], dim: int | None) -> None:
    _, gathered = s.split(reduced, dim)
    s.reorder(gathered, more_bytes=True)


def _together_or_each(s: Schedule, what: Sequence[Any], move: Callable[[Any], object]) -> bool:
    """Whether a move was legal for all together, or else for any by itself."""
    if what and _tried(s, lambda: move(list(what))):
        return True
    return len(what) > 1 and any([_tried(s, lambda one=one: move([one])) for one in what])


def small_sums(s: Schedule, axes: Axes) -> bool:
    """Small all_reduces that do not wait for each other in one: the norms of all tensors."""
    return _bucket_apart(s, _of_size(s.find("all_reduce", axes=axes), small=True))


def one_bucket(s: Schedule, kind: str, axes: Axes) -> bool:
    """All collectives of a kind over some axes in one."""
    return _bucket_apart(s, _of_size(s.find(kind, axes=axes), small=False))


def overlap_products(s: Schedule, kind: str, axes: Axes) -> bool:
    """Collectives of a kind as rings with the products next to them, where there are any."""
    handles = _of_size(s.find(kind, axes=axes), small=False)
    return any([_tried(s, lambda h=h: s.overlap(h)) for h in handles])


def products_in_chunks(s: Schedule) -> bool:
    """Products and the large sums or sends of them in chunks that follow each other."""
    moved = False
    products = {h.value: h for h in s.find("dot_general")}
    for kind in ("ppermute", "all_reduce", "reduce_scatter"):
        for sent in _of_size(s.find(kind), small=False):
            source = feeding(s.view, sent.value, "dot_general")
            product = None if source is None else products.get(source)
            if product is not None:
                chain = [product, sent]
                moved = _tried(s, lambda c=chain: s.overlap(c, chunks=CHUNKS)) or moved
    return moved


def _bucket_apart(s: Schedule, handles: Sequence[Handle]) -> bool:
    """Buckets of collectives none of which waits for another one of its bucket."""
    levels = [level for level in _levels(s, handles) if len(level) > 1]
    return any([_tried(s, lambda level=level: s.bucket(level)) for level in levels])


def one_kernel_each(s: Schedule) -> bool:
    """A reduce_scatter, what is computed from it and the all_gathers of that as one kernel."""
    moved = False
    for scattered in s.find("reduce_scatter"):
        gathered = s.find("all_gather")
        if gathered:
            moved = _tried(s, lambda r=scattered, g=gathered: _one_kernel(s, [r, *g])) or moved
    return moved


def _one_kernel(s: Schedule, values: Sequence[Handle]) -> None:
    s.fuse(values, kernel="pallas")


def _tried(s: Schedule, move: Callable[[], object]) -> bool:
    """Whether a move was legal; where it was not nothing has changed."""
    state = s.mark()
    try:
        move()
    except (IllegalMove, ArgumentError):
        s.back_to(state)
        return False
    return True


def _of_size(handles: Sequence[Handle], small: bool) -> list[Handle]:
    return [h for h in handles if (bytes_of(h.value) <= SMALL_BYTES) == small]


def _peek(s: Schedule, kind: str, axes: Axes | None = None) -> list[Handle]:
    """As `find`, but no line of the script."""
    return [handle_of(s.view, v, "") for v in found(s.view, kind, None, axes)]


def _levels(s: Schedule, handles: Sequence[Handle]) -> list[list[Handle]]:
    """Values in groups, in order, none of which is computed from another one of its group."""
    depth = depths(s.view, [h.value for h in handles])
    grouped: dict[int, list[Handle]] = {}
    for handle in handles:
        grouped.setdefault(depth[handle.value], []).append(handle)
    return [grouped[level] for level in sorted(grouped)]


def _groups(s: Schedule, kind: str) -> list[Axes]:
    """The axes that collectives of a kind go over."""
    view = s.view
    eqns = [view.eqns[view.maker[h.value]] for h in _peek(s, kind)]
    return list(dict.fromkeys(named_axes(eqn) for eqn in eqns))


def _dims(s: Schedule, axes: Axes) -> range:
    """Dims along which large all_reduces may be cut."""
    handles = [h for h in _peek(s, "all_reduce", axes) if bytes_of(h.value) > SMALL_BYTES]
    return range(max((len(shape_of(h.value)) for h in handles), default=0))
