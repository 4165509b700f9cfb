"""Programs over Explicit axes: types say where arguments and results lie.

Where all axes of a mesh are Explicit, the type of a result is a hint that holds to the letter. Over
mixed axes a type says which Explicit axes each dim is sharded over, major to all others, and leaves
the Auto axes to completion: a result is completed first, and pinned where it came out otherwise.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import Arguments
from meshwise.choose.plan import Plan
from meshwise.errors import HintError, message
from meshwise.ir.mesh import Axes
from meshwise.ir.mesh import Mesh as RefinedMesh
from meshwise.ir.program import Hint, shape_of
from meshwise.ir.sharding import Sharding
from meshwise.run.placement import named_sharding, on_devices_of

Placements = tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]


def is_typed_call(mesh: Any, given_mesh: Any, arguments: Arguments) -> bool:
    """Whether a call is traced over Explicit axes: those of its mesh, or of its arguments."""
    if _jax.is_explicit(mesh):
        return True
    return given_mesh is None and _jax.is_typed([_jax.array_type(x) for x in arguments.leaves])


def typed_structs(
    arguments: Arguments, in_specs: Sequence[Any], given_mesh: Any
) -> list[jax.ShapeDtypeStruct]:
    """The arguments' types as `jax.jit` has them.

    Of a program that names its own mesh, what comes from the host is of the type that in_shardings
    says.
    """
    structs = [_jax.struct_of(_jax.array_type(x)) for x in arguments.leaves]
    if given_mesh is None:
        return structs
    return [
        s if spec is None or not _jax.type_mesh(s).empty else _typed_by(s, spec, given_mesh)
        for s, spec in zip(structs, in_specs, strict=True)
    ]


def plain_structs(arguments: Arguments, mesh: Any) -> list[jax.ShapeDtypeStruct]:
    """The arguments' types over Auto axes; of other meshes they say nothing."""
    auto = _jax.auto_mesh(mesh)
    return [_jax.struct_of(_jax.array_type(x), auto) for x in arguments.leaves]


def _typed_by(struct: jax.ShapeDtypeStruct, spec: Any, mesh: Any) -> jax.ShapeDtypeStruct:
    """The type as the axes of an Explicit mesh are part of it, as far as a type can say a spec."""
    abstract = getattr(mesh, "abstract_mesh", mesh)
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    known = [None if e is PartitionSpec.UNCONSTRAINED else e for e in entries]
    sharding = _jax.on_mesh(PartitionSpec(*known), abstract)
    try:
        sharding.shard_shape(struct.shape)
    except (AttributeError, ValueError):  # not for this value, found out later, or uneven
        return struct
    return struct.update(sharding=NamedSharding(abstract, sharding.spec))


def specs_of_types(avals: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """What is given of some values; else, what their types say of a wholly Explicit mesh."""
    return [_spec_of_type(a) if s is None else s for s, a in zip(given, avals, strict=True)]


def _spec_of_type(aval: Any) -> Any:
    mesh = _jax.type_mesh(aval)
    if mesh.empty or any(t != AxisType.Explicit for t in mesh.axis_types):
        return None
    return NamedSharding(mesh, aval.sharding.spec)


def refuse_uneven(
    name: str, mesh: Any, paths: Sequence[str], types: Sequence[Any], specs: Sequence[Any]
) -> None:
    """An error for shardings that do not divide: over Explicit axes they would be in types."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    offenders = []
    for path, kind, spec in zip(paths, types, specs, strict=True):
        said = spec.spec if isinstance(spec, NamedSharding) else spec
        entries = said.partitions if isinstance(said, PartitionSpec) else ()
        for dim, (size, entry) in enumerate(zip(kind.shape, entries, strict=False)):
            axes = entry if isinstance(entry, tuple) else (entry,)
            shards = math.prod(sizes.get(a, 1) for a in axes)
            if size % shards:
                offenders.append(f"{path}: dim {dim} of {size} is sharded {shards} times by {said}")
    if offenders:
        raise HintError(
            message(
                f"{name} has shardings that do not divide their dims",
                offenders,
                "Over Explicit axes shardings are part of types, and a type's shards are equal.",
                "Pad the array, give another sharding, or make the mesh of Auto axes.",
            )
        )


def pinned(
    plan: Plan, avals: Sequence[Any], specs: Sequence[Any], meshes: Sequence[Any], are_plain: bool
) -> list[Any] | None:
    """Hints for the results over mixed axes that did not come out as their types say.

    With `are_plain` also for those that came out over a part of an axis of every mesh, and for
    those that came out uneven in a program of which nobody said that anything is. None where there
    are none.
    """
    mesh, said = plan.program.mesh, plan.program
    hints = zip((*said.in_hints, *said.out_hints), (*said.inputs, *said.outputs), strict=True)
    divides = all(_divides(mesh, hint, shape_of(atom)) for hint, atom in hints)

    def pin(lies: Sharding, aval: Any) -> Any:
        if _is_mixed(aval):
            return _pin(mesh, lies, aval)
        return _plain(mesh, meshes, lies, aval.shape, divides) if are_plain else None

    found = [
        pin(lies, aval) if spec is None else None
        for lies, aval, spec in zip(plan.out_shardings, avals, specs, strict=True)
    ]
    if all(p is None for p in found):
        return None
    return [s if p is None else p for p, s in zip(found, specs, strict=True)]


def _divides(mesh: RefinedMesh, hint: Hint | None, shape: Sequence[int]) -> bool:
    """Whether a hint shards no dim that does not divide."""
    dims = hint.dims if hint is not None else ()
    return all(n % mesh.size(axes or ()) == 0 for n, axes in zip(shape, dims, strict=False))


def _plain(
    mesh: RefinedMesh, meshes: Sequence[Any], lies: Sharding, shape: Sequence[int], is_even: bool
) -> PartitionSpec | None:
    """As much of a sharding as is over whole axes, and divides if it is to; None where all is.

    JAX's other functions take a result on the user's mesh, and know no parts of its axes.
    """

    def divides(size: int, axes: Axes) -> bool:
        return not is_even or size % mesh.size(axes) == 0

    pairs = list(zip(shape, lies.dims, strict=True))
    if all(divides(*pair) for pair in pairs) and mesh_of(lies, mesh, meshes) is not None:
        return None
    entries: list[Any] = []
    for size, axes in pairs:
        prefixes = [p for k in range(len(axes), -1, -1) if divides(size, p := axes[:k])]
        whole = next(w for p in prefixes if (w := mesh.restore(p)) is not None)
        entries.append(whole[0] if len(whole) == 1 else whole or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def mesh_of(lies: Sharding, mesh: RefinedMesh, meshes: Sequence[Any]) -> Any:
    """The first of some meshes whose axes are whole where a value lies; None if none is."""
    for theirs in meshes:
        own = mesh.under(theirs.axis_names, theirs.axis_sizes)
        if own is not None and all(own.restore(axes) is not None for axes in lies.dims):
            return theirs
    return None


def _is_mixed(aval: Any) -> bool:
    kinds = set(_jax.type_mesh(aval).axis_types)
    return AxisType.Explicit in kinds and kinds != {AxisType.Explicit}


def _pin(mesh: RefinedMesh, lies: Sharding, aval: Any) -> NamedSharding | None:
    """The type's axes and what completion put minor to them of Auto axes; None if it is so."""
    theirs = _jax.type_mesh(aval)
    kinds = dict(zip(theirs.axis_names, theirs.axis_types, strict=True))
    mesh = mesh.under(theirs.axis_names, theirs.axis_sizes) or mesh
    entries: list[tuple[str, ...]] = []
    for axes, entry, size in zip(lies.dims, aval.sharding.spec.partitions, aval.shape, strict=True):
        typed = tuple(entry) if isinstance(entry, tuple) else (entry,) if entry else ()
        own = mesh.refine(typed)
        rest = axes[len(own) :] if axes[: len(own)] == own else ()
        auto = tuple([a for a in _whole_axes(mesh, rest) if kinds.get(a) != AxisType.Explicit])
        wanted = mesh.refine((*typed, *auto))
        entries.append((*typed, *auto) if size % mesh.size(wanted) == 0 else typed)
    same = all(mesh.refine(e) == axes for e, axes in zip(entries, lies.dims, strict=True))
    return None if same else NamedSharding(theirs, PartitionSpec(*entries))


def _whole_axes(mesh: RefinedMesh, axes: Axes) -> list[str]:
    """The user's axes that lie whole among some sub-axes, in the order of these."""
    names = dict.fromkeys(mesh.user_axis_of[a] for a in axes)
    return [n for n in names if set(mesh.sub_axes[n]) <= set(axes)]


def placements(
    plan: Plan,
    meshes: Sequence[Any],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    avals: Sequence[Any],
) -> Placements:
    """Where arguments and results lie, in the words of the user's hint wherever one says it.

    A result lies on the mesh of its type, under its own names and kinds of axes; else on the first
    of the meshes whose axes it is, of which the program's is the first.
    """
    program, mesh = plan.program, meshes[0]

    def placement(found: Sharding, hint: Hint | None, spec: Any, own: Any) -> NamedSharding:
        if hint is None or hint.closed != found.dims:
            own = mesh_of(found, program.mesh, [own, *meshes]) or own
            theirs = program.mesh.under(own.axis_names, own.axis_sizes)
            return named_sharding(found, theirs or program.mesh, own if theirs else mesh)
        if not isinstance(spec, PartitionSpec):
            return _as_said(spec, own)
        return NamedSharding(own if _is_said(spec, own, found, program.mesh) else mesh, spec)

    each_in = zip(plan.in_shardings, program.in_hints, in_specs, strict=True)
    each_out = zip(plan.out_shardings, program.out_hints, out_specs, avals, strict=True)
    ins = tuple([placement(*each, mesh) for each in each_in])
    spelling = next((s for s, h in zip(ins, program.in_hints, strict=True) if h), None)
    outs = [
        _in_memory(
            _worded(placement(found, hint, spec, mesh_of_type(a, mesh)), a, hint, spelling), spec, a
        )
        for found, hint, spec, a in each_out
    ]
    return ins, tuple(outs)


def _in_memory(lies: NamedSharding, spec: Any, aval: Any) -> NamedSharding:
    """A placement in the memory that was asked for, or that the function moved the result to."""
    kind = getattr(spec, "memory_kind", None)
    if kind is None and _jax.is_on_host(aval):
        kind = _HOST
    if kind is None or isinstance(lies.mesh, AbstractMesh):
        return lies
    return lies.with_memory_kind(kind)


_HOST = "pinned_host"  # where JAX puts what is moved to the host's memory


def _is_said(spec: PartitionSpec, own: Any, found: Sharding, mesh: RefinedMesh) -> bool:
    """Whether a spec over the axes of a mesh says where a value lies."""
    theirs = mesh.under(own.axis_names, own.axis_sizes)
    said = _jax.axes_of(spec, len(found.dims))
    dims = [() if axes is PartitionSpec.UNCONSTRAINED else axes for axes in said]
    if theirs is None or not {a for axes in dims for a in axes} <= {*own.axis_names}:
        return False
    return found.dims == tuple(theirs.refine(axes) for axes in dims)


def _as_said(said: NamedSharding, own: Any) -> NamedSharding:
    """A sharding as the user wrote it, if that names devices; else over the mesh of the type."""
    if isinstance(said.mesh, AbstractMesh) or isinstance(own, AbstractMesh):
        return NamedSharding(own, said.spec)
    same = (said.mesh.axis_names, said.mesh.axis_sizes) == (own.axis_names, own.axis_sizes)
    return NamedSharding(own, said.spec) if same else said


def _worded(
    found: NamedSharding, aval: Any, hint: Hint | None, spelling: NamedSharding | None
) -> NamedSharding:
    """A completed placement in the words of its type, or of the first argument's, as JAX does."""
    rank = len(aval.shape)
    if _is_mixed(aval):
        typed = NamedSharding(found.mesh, aval.sharding.spec)
        return typed if typed.is_equivalent_to(found, rank) else found
    if hint is not None or spelling is None or spelling.mesh != found.mesh:
        return found
    fits = len(spelling.spec) <= rank and spelling.is_equivalent_to(found, rank)
    return spelling if fits else found


def mesh_of_type(aval: Any, mesh: Any) -> Any:
    """The mesh of a type over the devices of a program's mesh."""
    theirs = _jax.type_mesh(aval)
    if theirs.empty or theirs.size != mesh.size or isinstance(mesh, AbstractMesh):
        return mesh
    if theirs == mesh.abstract_mesh:
        return mesh
    return on_devices_of(theirs, mesh)
