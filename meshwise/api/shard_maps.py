"""A function written for one device of many, as `jax.shard_map` takes it, read as a program."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import argument_types, name_of, result_paths, take_apart
from meshwise.api.options import check_is_function, check_is_mesh
from meshwise.api.specs import Described, broadcast_specs
from meshwise.errors import ArgumentError, HintError, MeshError, TreeError, message
from meshwise.flatten import inline_calls
from meshwise.ir.mesh import Mesh, plain_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.report.text import count

NAME = "SpmdProgram.from_shard_map"
# What JAX raises where a function does not pass the check of types.
_REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class ShardMapped:
    """What a program consists of; see `SpmdProgram`."""

    per_device: PerDeviceProgram
    user_mesh: Any
    in_tree: Any
    out_tree: Any
    placements: tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class _NoStatics:
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def read_shard_map(
    fn: Callable[..., Any],
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    args: Sequence[Any],
    check_vma: bool | None,
) -> ShardMapped:
    """Trace a function of local arrays on global arguments. Raises what its specs do not fit."""
    _check_mesh(mesh)
    check_is_function(fn, NAME)
    arguments = take_apart(_NoStatics(), tuple(args), {})
    paths = named_paths(fn, args)
    types = argument_types(NAME, arguments, paths)
    refined = plain_mesh(mesh.axis_names, mesh.axis_sizes)
    in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    tree = jax.tree.structure(tuple(args))
    whole = Described(tree, "the arguments", f"the call has {count(len(args), 'argument')}")
    specs = broadcast_specs(NAME, "in_specs", in_specs, whole)
    ins = _shardings(specs, types, paths, mesh, refined)
    _check_divides(ins, types, paths, refined)
    local = [
        jax.ShapeDtypeStruct(local_shape(t.shape, s, refined), t.dtype, weak_type=t.weak_type)
        for t, s in zip(types, ins, strict=True)
    ]
    structs = jax.tree.unflatten(tree, types)
    ins_ = jax.tree.unflatten(tree, [spec or PartitionSpec() for spec in specs])
    closed, out_tree = _trace(fn, mesh, ins_, out_specs, structs, local, check_vma)
    out_paths = result_paths(out_tree)
    out_specs_ = broadcast_specs(NAME, "out_specs", out_specs, Described(out_tree, "result"))
    outs = _shardings(out_specs_, closed.out_avals, out_paths, mesh, refined)
    out_types = [
        jax.ShapeDtypeStruct(
            [n * refined.size(a) for n, a in zip(t.shape, s.dims, strict=True)], t.dtype
        )
        for t, s in zip(closed.out_avals, outs, strict=True)
    ]
    return ShardMapped(
        per_device=PerDeviceProgram(
            inline_calls(closed),
            refined,
            tuple(ins),
            tuple(outs),
            tuple([_aval(t) for t in types]),
            tuple([_aval(t) for t in out_types]),
        ),
        user_mesh=mesh,
        in_tree=arguments.tree,
        out_tree=out_tree,
        placements=(_placed(mesh, specs), _placed(mesh, out_specs_)),
        in_paths=tuple(paths),
        out_paths=tuple(out_paths),
        name=name_of(fn),
    )


def _check_mesh(mesh: Any) -> None:
    check_is_mesh(mesh, NAME)
    if mesh is None:
        raise MeshError(
            message(
                f"{NAME} was given no mesh",
                ["mesh=None"],
                "The axes of the mesh are those that the function's collectives go over.",
                "Give a jax.sharding.Mesh or, without devices, an AbstractMesh.",
            )
        )


def named_paths(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """The path of every leaf of the arguments, each argument by the name of its parameter."""
    try:
        names = [*inspect.signature(fn).bind(*args).arguments]
        names = names if len(names) == len(args) else [f"args[{i}]" for i in range(len(args))]
    except (TypeError, ValueError):
        names = [f"args[{i}]" for i in range(len(args))]
    return [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, arg in zip(names, args, strict=True)
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]


def _aval(struct: Any) -> Any:
    return _jax.array_type(struct)


def _placed(mesh: Any, specs: Sequence[Any]) -> tuple[NamedSharding, ...]:
    return tuple([NamedSharding(mesh, PartitionSpec() if s is None else s) for s in specs])


def _shardings(
    specs: Sequence[Any], types: Sequence[Any], paths: Sequence[str], mesh: Any, refined: Mesh
) -> list[Sharding]:
    """What specs say, over the axes that are no more than one device wide."""
    offenders, found = [], []
    for spec, aval, path in zip(specs, types, paths, strict=True):
        dims = _jax.axes_of(spec or PartitionSpec(), len(aval.shape))
        axes = [a for dim in dims for a in (dim if isinstance(dim, tuple) else (dim,))]
        unknown = [a for a in axes if a not in mesh.axis_names]
        if len(dims) > len(aval.shape) or unknown or len(axes) != len(set(axes)):
            offenders.append(f"{path} of {len(aval.shape)} dims: {spec}")
            continue
        kept = [tuple([str(a) for a in dim if a in refined.names]) for dim in dims]
        found.append(Sharding(tuple(kept)))
    if offenders:
        raise HintError(
            message(
                f"{NAME} was given specs that do not fit",
                offenders,
                f"A spec has at most one entry a dim, of axes of the mesh {mesh.axis_names}, each "
                "once.",
                "Give each array a PartitionSpec that fits it.",
            )
        )
    return found


def _check_divides(
    shardings: Sequence[Sharding], types: Sequence[Any], paths: Sequence[str], mesh: Mesh
) -> None:
    offenders = [
        f"{path}: dim {dim} of {size} over {', '.join(axes)} ({mesh.size(axes)})"
        for sharding, aval, path in zip(shardings, types, paths, strict=True)
        for dim, (size, axes) in enumerate(zip(aval.shape, sharding.dims, strict=True))
        if size % mesh.size(axes)
    ]
    if offenders:
        raise HintError(
            message(
                f"{NAME} was given arrays that do not divide",
                offenders,
                "A function of local arrays is traced for blocks of one size, as under shard_map.",
                "Pad the array; or write it for one device, and let mw.jit partition it.",
            )
        )


def _trace(
    fn: Callable[..., Any],
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    structs: Any,
    local: Sequence[Any],
    check_vma: bool | None,
) -> tuple[Any, Any]:
    """The function's jaxpr on local arrays, and the tree of its results.

    `in_specs` and `structs` are trees of the arguments: a spec and a global type for each array.
    """
    axes = {str(n): s for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True)}
    is_spec = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
    outs = jax.tree.map(lambda s: s or PartitionSpec(), out_specs, is_leaf=is_spec)

    def arrays(*given: Any) -> Any:
        return jax.tree.map(jnp.asarray, fn(*given))

    def traced(checks: bool) -> tuple[Any, Any]:
        return _jax.shard_map_jaxpr(arrays, axes, in_specs, outs, structs, local, checks)

    try:
        if check_vma is not None:
            return traced(check_vma)
        try:
            return traced(True)
        except _REFUSALS:  # such a function can only be meant without the check
            return traced(False)
    except ValueError as why:
        if "shard_map out_specs" not in str(why):
            raise
        raise TreeError(
            message(
                f"out_specs of {NAME} does not match the tree it describes",
                [str(why).splitlines()[-1].strip()],
                "A tree of specs has the structure of the result, or is a prefix of it.",
                "Give an entry for each subtree.",
            )
        ) from None
    except NotImplementedError:
        raise ArgumentError(
            message(
                f"{NAME} cannot read this function",
                [f"{name_of(fn)} has a shard_map in it"],
                "All axes are manual already: a function of local arrays is one for all of them.",
                "Write what is inside of it in its place.",
            )
        ) from None
