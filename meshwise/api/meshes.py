"""Which mesh a program is for, and whether what it is given lies on that mesh."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.errors import (
    HintError,
    MeshError,
    MeshwiseError,
    NoMeshError,
    UnplannedError,
    also,
    message,
)
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.program import Program
from meshwise.run.placement import count_processes, on_devices_of, show_devices, way_to
from meshwise.run.uneven import UnevenArray


def find_mesh(
    name: str, mesh: Any, in_specs: Sequence[Any], out_shardings: Any, leaves: Sequence[Any]
) -> Any:
    """The mesh that was given; else that of the shardings, of the context, of the arguments."""
    return mesh_said(mesh, in_specs, out_shardings, leaves) or refuse_no_mesh(name)


def mesh_said(mesh: Any, in_specs: Sequence[Any], out_shardings: Any, leaves: Sequence[Any]) -> Any:
    """The same; None where nothing names a mesh.

    As in `jax.jit`, `with mesh:` (other than `jax.set_mesh`) alone does not: it says what axes mean
    where some are named.
    """
    said = [*in_specs, *jax.tree.leaves(out_shardings)]
    placed = [placement_of(leaf) for leaf in leaves]
    candidates = [
        mesh,
        *(s.mesh for s in said if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)),
        _jax.context_mesh(),
        _jax.block_mesh() if any(isinstance(s, PartitionSpec) for s in said) else None,
        *(s.mesh for s in (*placed, *said) if isinstance(s, NamedSharding)),
    ]
    found = next((m for m in candidates if m is not None and not m.empty), None)
    if isinstance(found, AbstractMesh) and found is not mesh:
        return _on_devices(found, [m for m in candidates if isinstance(m, Mesh)])
    return found


def _on_devices(abstract: AbstractMesh, others: Sequence[Mesh]) -> Any:
    """A mesh of the context over the devices that arguments lie on; as it is where none do."""
    return on_devices_of(abstract, next((m for m in others if m.size == abstract.size), abstract))


def refuse_no_mesh(name: str) -> NoReturn:
    """The error for a program that is for no mesh."""
    raise NoMeshError(
        message(
            f"{name} was called without a mesh",
            ["no mesh= was given, no sharding names one, and none is in context"],
            "Every program is made for a mesh.",
            "Give a mesh= or NamedShardings, or call inside jax.set_mesh(mesh).",
        )
    )


def refuse_region(name: str, axes: Sequence[Any]) -> NoReturn:
    """The error for a function of local arrays, which there is nothing of to partition."""
    raise NoMeshError(
        message(
            f"{name} was called inside a region of one device",
            [f"{', '.join(map(str, axes))} are manual axes there"],
            "Inside jax.shard_map a function is one of local arrays.",
            "Leave mesh= out, and it is part of the region as under jax.jit.",
        )
    )


def placement_of(leaf: Any) -> Any:
    """The sharding of an argument that was put in its place on purpose, None for others."""
    if isinstance(leaf, _jax.Tracer) or not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)


def with_placements(
    name: str,
    specs: Sequence[Any],
    leaves: Sequence[Any],
    paths: Sequence[str],
    mesh: Any,
    is_given: bool,
) -> list[Any]:
    """Specs with those of committed arguments filled in; an error where the two contradict.

    Where the mesh was given, arguments may lie on its devices in another order, or otherwise than a
    hint over another mesh says: they are moved then. To JAX both are mistakes.
    """
    found, strangers, contradictions = [], [], []
    for spec, leaf, path in zip(specs, leaves, paths, strict=True):
        own = placement_of(leaf)
        if own is not None and (_is_elsewhere(own, mesh) or _is_turned(own, mesh, is_given)):
            kind = _jax.array_type(leaf).str_short()
            strangers.append(f"{path} {kind} is on {show_devices(own.device_set)}")
        if not (isinstance(own, NamedSharding) and _same_axes(own.mesh, mesh)):
            found.append(own if spec is None and _is_over(own, mesh) else spec)
            if own is not None and not is_given and _lies_otherwise(own, spec, leaf.ndim):
                contradictions.append(f"{path} lies as {own}, in_shardings says {spec}")
            continue
        found.append(own.spec if spec is None else spec)
        if spec is not None and _differs(own, spec, len(leaf.shape)):
            wanted = getattr(spec, "spec", spec)
            contradictions.append(f"{path} lies as {own.spec}, in_shardings says {wanted}")
    if strangers:
        raise MeshError(
            message(
                f"{name} was called with arguments on other devices than its mesh "
                f"({_show_mesh(mesh)})",
                strangers,
                "A committed argument must lie on exactly the mesh's devices.",
                way_to(
                    () if isinstance(mesh, AbstractMesh) else mesh.devices.flat,
                    "Move it with mw.reshard(x, NamedSharding(mesh, spec)), or pass a numpy array.",
                ),
            )
        )
    if contradictions:
        raise HintError(
            message(
                f"{name} was called with arguments that lie otherwise than in_shardings says",
                contradictions,
                "A committed argument's sharding is a hint as well, and hints are never changed.",
                "Move the argument with mw.reshard, or leave its entry in in_shardings None.",
            )
        )
    return found


def refuse_other_memories(
    name: str, specs: Sequence[Any], leaves: Sequence[Any], paths: Sequence[str], mesh: Any
) -> None:
    """An error that names every argument that lies, or is to lie, in another than device memory."""
    if isinstance(mesh, AbstractMesh):
        return
    default = mesh.devices.flat[0].default_memory().kind
    offenders = []
    for spec, leaf, path in zip(specs, leaves, paths, strict=True):
        for where, what in ((spec, "is to be"), (placement_of(leaf), "lies")):
            kind = where.memory_kind if isinstance(where, jax.sharding.Sharding) else None
            if kind not in (None, default):
                offenders.append(f"{path} {what} in {kind}")
    if offenders:
        raise UnplannedError(
            message(
                f"{name} was called with arguments in the memory of the host",
                offenders,
                "Programs read their arguments in the memory of their devices.",
                "Move them before the call, with jax.device_put, and leave memory_kind= out "
                "of their shardings.",
            )
        )


def fill_placements(specs: Sequence[Any], leaves: Sequence[Any], mesh: Any) -> tuple[Any, ...]:
    """Specs with those of committed arguments in the place of None."""

    def fill(spec: Any, leaf: Any) -> Any:
        own = placement_of(leaf) if spec is None else None
        if isinstance(own, NamedSharding) and _same_axes(own.mesh, mesh):
            return own.spec
        return spec

    return tuple([fill(s, x) for s, x in zip(specs, leaves, strict=True)])


def lies_on(value: Any, mesh: Any) -> bool:
    """Whether an array lies on the mesh's axes on purpose."""
    own = placement_of(value)
    return isinstance(own, NamedSharding) and _same_axes(own.mesh, mesh)


def spec_key(spec: Any) -> Any:
    """Equal for hints that say the same: `P("x")`, `P(("x",))` and `P("x", None)` do."""
    if isinstance(spec, NamedSharding):
        return spec.mesh, spec_key(spec.spec)
    if not isinstance(spec, PartitionSpec):
        return spec
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in spec.partitions]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries), getattr(spec, "unreduced", None), getattr(spec, "reduced", None)


def _is_elsewhere(own: Any, mesh: Any) -> bool:
    if isinstance(mesh, AbstractMesh):
        return False
    if isinstance(own, NamedSharding) and isinstance(own.mesh, AbstractMesh):
        return False
    return own.device_set != set(mesh.devices.flat)


def _is_turned(own: Any, mesh: Any, is_given: bool) -> bool:
    """Whether an argument lies on the mesh's devices in an order that JAX does not take."""
    if is_given or not isinstance(own, NamedSharding):
        return False
    if isinstance(own.mesh, AbstractMesh) or isinstance(mesh, AbstractMesh):
        return False
    return own.mesh.devices.size > 1 and list(own.mesh.devices.flat) != list(mesh.devices.flat)


def _is_over(own: Any, mesh: Any) -> bool:
    """Whether an argument lies on another mesh of the same devices in the same order."""
    if not isinstance(own, NamedSharding) or isinstance(own.mesh, AbstractMesh):
        return False
    if isinstance(mesh, AbstractMesh) or own.mesh.devices.size != mesh.devices.size:
        return False
    if list(own.mesh.devices.flat) != list(mesh.devices.flat):
        return False
    refined = refine_mesh(mesh.axis_names, mesh.axis_sizes)
    return refined.under(own.mesh.axis_names, own.mesh.axis_sizes) is not None


def _lies_otherwise(own: Any, spec: Any, rank: int) -> bool:
    """Whether an argument lies otherwise than a hint over another mesh of devices says."""
    if not isinstance(own, NamedSharding) or not isinstance(spec, NamedSharding):
        return False
    if isinstance(own.mesh, AbstractMesh) or isinstance(spec.mesh, AbstractMesh):
        return False
    return len(spec.spec) <= rank and not own.is_equivalent_to(spec, rank)


def _same_axes(theirs: Any, ours: Any) -> bool:
    same = (theirs.axis_names, theirs.axis_sizes) == (ours.axis_names, ours.axis_sizes)
    if not same or isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return same
    return bool((theirs.devices == ours.devices).all())


def _differs(own: NamedSharding, wanted: Any, rank: int) -> bool:
    """Whether a hint is for another placement; not where it is none for the mesh or the rank."""
    if isinstance(wanted, NamedSharding):
        if not _same_axes(own.mesh, wanted.mesh):
            return False
        wanted = wanted.spec
    if not isinstance(wanted, PartitionSpec) or len(wanted) > rank:
        return False
    sizes = dict(zip(own.mesh.axis_names, own.mesh.axis_sizes, strict=True))
    pairs = zip(_entries(own.spec, rank, sizes), _entries(wanted, rank, sizes), strict=True)
    return any(b is not PartitionSpec.UNCONSTRAINED and a != b for a, b in pairs)


def _entries(spec: PartitionSpec, rank: int, sizes: dict[Any, int]) -> list[Any]:
    """For each dim the axes of more than one device, or UNCONSTRAINED."""
    return [
        axes if axes is PartitionSpec.UNCONSTRAINED else tuple(a for a in axes if sizes.get(a) != 1)
        for axes in _jax.axes_of(spec, rank)
    ]


def check_effects(name: str, mesh: Any, jaxpr: Any) -> None:
    """An error where something is to be done in order that JAX orders on one device alone.

    Or where something is checked, and nothing collects what it comes to.
    """
    if _jax.has_checks(jaxpr):
        refusal = MeshwiseError(
            message(
                f"{name} checks what nobody would be told",
                ["checkify.check, without checkify.checkify inside of mw.jit"],
                "checkify.checkify makes a result of a check, and a check is that alone.",
                f"Partition mw.jit(checkify.checkify({name})), and throw the error it returns.",
            )
        )
        raise also(refusal, ValueError)
    offenders = _jax.kept_in_order(jaxpr)
    if mesh.size > 1 and offenders:
        raise MeshError(
            message(
                f"{name} prints or calls back in order, and its mesh has {mesh.size} devices",
                offenders,
                "JAX keeps the order of jax.debug's effects on one device alone.",
                "Leave out ordered=True, or use jax.experimental.io_callback(..., ordered=True).",
            )
        )


def check_saved(name: str, jaxpr: Any) -> None:
    """An error for programs of `jax.export` inside in which devices have parts of their own."""
    offenders = list(dict.fromkeys(_jax.saved_with_regions(jaxpr)))
    if offenders:
        raise UnplannedError(
            message(
                f"{name} calls programs that were saved for several devices",
                offenders,
                "In a program that mw.jit or jax.shard_map made, and jax.export saved, each device "
                "does its own part: it cannot be a part of another device's program.",
                "Call it outside of the function, or jit both by jax.jit; or partition the "
                "function that was saved.",
            )
        )


def check_hint_devices(
    name: str, mesh: Any, program: Program, in_specs: Sequence[Any], out_specs: Sequence[Any]
) -> None:
    """An error that names every hint on a mesh of other devices, or of another order of them."""
    if isinstance(mesh, AbstractMesh):
        return
    given = [(f"in_shardings of {p}", s) for p, s in zip(program.in_paths, in_specs, strict=True)]
    given += [
        (f"out_shardings of {p}", s) for p, s in zip(program.out_paths, out_specs, strict=True)
    ]
    given += [
        (f"the hint at {program.source(i)}", program.equations[i].params["sharding"])
        for i in program.hints
    ]
    ours = list(mesh.devices.flat)
    offenders = [
        f"{where}, {s.spec}, is for {_show_mesh(s.mesh)}"
        for where, s in given
        if isinstance(s, NamedSharding)
        and isinstance(s.mesh, Mesh)
        and list(s.mesh.devices.flat) != ours
    ]
    if offenders:
        raise MeshError(
            message(
                f"{name} has hints for other devices than those of its mesh ({_show_mesh(mesh)})",
                list(dict.fromkeys(offenders)),
                "All hints of one program are for the same devices in the same order.",
                "Write hints as PartitionSpecs, or make the NamedShardings with the mesh that "
                "mw.jit is given.",
            )
        )


def check_regions(name: str, mesh: Any, program: Program) -> None:
    """An error that names every `jax.shard_map` inside over a mesh of more or fewer devices."""
    regions = [
        (i, eqn.params["mesh"])
        for i, eqn in enumerate(program.equations)
        if eqn.primitive.name == "shard_map"
    ]
    offenders = [
        f"that at {program.source(i)} is over {dict(own.shape)}, {own.size} devices"
        for i, own in regions
        if own.size != mesh.size
    ]
    if offenders:
        raise MeshError(
            message(
                f"{name} has a jax.shard_map for other devices than its {mesh.size}",
                offenders,
                "All of a program runs on the same devices.",
                "Give the shard_map the program's mesh, or call it outside of the function.",
            )
        )


def _show_mesh(mesh: Any) -> str:
    return "no devices" if isinstance(mesh, AbstractMesh) else show_devices(mesh.devices.flat)


def platform_of(mesh: Any) -> str | None:
    """What the devices of a mesh are (`cpu`, `tpu`, ...); None of a mesh without devices."""
    return None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform


def process_count(mesh: Any) -> int:
    """How many processes the devices of a mesh belong to."""
    return 1 if isinstance(mesh, AbstractMesh) else count_processes(mesh.devices.flat)


def lies_as(leaf: Any, placement: NamedSharding) -> bool:
    """Whether an argument lies as a program wants it, or nowhere in particular."""
    held = leaf.padded if isinstance(leaf, UnevenArray) else leaf
    own = placement_of(held)
    return own is None or own.is_equivalent_to(placement, len(held.shape))
