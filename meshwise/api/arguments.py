"""A call's arguments, taken apart: arrays, static values, structure, types, and their paths."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from meshwise import _jax
from meshwise.errors import ArgumentError, UnplannedError, also, message
from meshwise.run.placement import show_devices
from meshwise.run.uneven import UnevenArray


def name_of(fn: Callable[..., Any]) -> str:
    """What errors and programs call a function; a partial is called as what it calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, taken apart.

    `leaves` are the dynamic ones' arrays and `tree` the structure of `(args, kwargs)` without
    the static ones.
    """

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int, Any], ...]
    static_named: tuple[tuple[str, Any], ...]
    positions: tuple[int, ...]

    @property
    def key(self) -> Any:
        """Equal for calls of one structure with the same static values, of the same types."""
        static = *self.static, *self.static_named
        return self.tree, static, tuple([type(value) for _, value in static])

    @property
    def can_be_keys(self) -> bool:
        """Whether all static values have a hash."""
        try:
            hash(self.key)
        except TypeError:
            return False
        return True

    @property
    def names(self) -> Sequence[str]:
        """Of the dynamic arguments by keyword, in the order of their leaves."""
        return self.tree.children()[1].node_data()[1]

    @property
    def are_in_typed_trace(self) -> bool:
        """Whether some come from a trace over Explicit axes, or from any while such are set."""
        tracers = [x for x in self.leaves if isinstance(x, _jax.Tracer)]
        if tracers and _jax.is_explicit(jax.sharding.get_abstract_mesh()):
            return True
        return _jax.is_typed([_jax.array_type(x) for x in tracers])

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call with other leaves."""
        dynamic, kwargs = jax.tree.unflatten(self.tree, leaves)
        placed = dict(zip(self.positions, dynamic, strict=True)) | dict(self.static)
        positional = tuple([placed[i] for i in range(len(placed))])
        return positional, {**kwargs, **dict(self.static_named)}

    def abstract(self) -> "Arguments":
        """The same without values: types, and where arguments lie that were put there."""
        return replace(self, leaves=[_abstract(leaf) for leaf in self.leaves])


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | UnevenArray) or isinstance(leaf, _jax.Tracer):
        return leaf
    is_placed = leaf.committed or _jax.is_typed([_jax.array_type(leaf)])
    sharding = leaf.sharding if is_placed else None
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


class StaticArguments(Protocol):
    """What says which arguments are static."""

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """By position."""
        ...

    @property
    def static_argnames(self) -> tuple[str, ...]:
        """By name."""
        ...


def take_apart(
    options: StaticArguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Separate a call's arrays from its static arguments."""
    if not options.static_argnums and not options.static_argnames:
        leaves, tree = jax.tree.flatten((args, kwargs))
        return Arguments(leaves, tree, (), (), tuple(range(len(args))))
    nums = {n % len(args) for n in options.static_argnums if -len(args) <= n < len(args)}
    positions = tuple(i for i in range(len(args)) if i not in nums)
    named = {k: v for k, v in kwargs.items() if k not in options.static_argnames}
    leaves, tree = jax.tree.flatten((tuple(args[i] for i in positions), named))
    return Arguments(
        leaves,
        tree,
        tuple((i, args[i]) for i in sorted(nums)),
        tuple((k, kwargs[k]) for k in sorted(kwargs) if k in options.static_argnames),
        positions,
    )


def leaf_key(leaf: Any) -> Any:
    """What a program depends on of one argument: its type, and its placement if committed."""
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return leaf.aval, sharding
    if isinstance(leaf, UnevenArray):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    dtype = getattr(leaf, "dtype", None)
    return (
        getattr(leaf, "shape", None),
        dtype,
        getattr(leaf, "weak_type", False),
        getattr(leaf, "sharding", None),
    )


def argument_paths(arguments: Arguments) -> list[str]:
    """The path of every dynamic leaf, e.g. `args[0]['w']`."""
    args, kwargs = arguments.tree.children()
    paths = []
    for position, arg in zip(arguments.positions, args.children(), strict=True):
        paths += [f"args[{position}]{path}" for path in _jax.paths_of(arg)]
    return paths + [f"kwargs{path}" for path in _jax.paths_of(kwargs)]


def result_paths(out_tree: Any) -> list[str]:
    """The path of every leaf of the result."""
    return [f"result{path}" for path in _jax.paths_of(out_tree)]


def describe(leaf: Any) -> str:
    """What is no array, in a few words."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "a NumPy array with a mask: pass x.filled(), and x.mask where it is read"
    if isinstance(leaf, np.ndarray):
        strange = _jax.array_type(leaf) is None
        return f"a NumPy array of {leaf.dtype}{', a type that JAX does not have' * strange}"
    kind = type(leaf).__name__
    text = f"{leaf!r:.60}"
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind}" if " at 0x" in text else f"{article} {kind}: {text}"


def argument_types(
    name: str, arguments: Arguments, paths: Sequence[str]
) -> list[jax.ShapeDtypeStruct]:
    """The types of the leaves; an error for what is no array.

    Of where a leaf lies they say what axes of an Explicit mesh say in its type. None stands for
    what JAX takes beside arrays, as tokens and references are.
    """
    types: list[Any] = []
    offenders = []
    for leaf, path in zip(arguments.leaves, paths, strict=True):
        try:
            aval = _jax.array_type(leaf)
        except OverflowError as error:
            error.add_note(f"It is {path} of {name}.")
            raise
        if aval is None:
            offenders.append(f"{path} is {describe(leaf)}")
        elif not isinstance(aval, _jax.ShapedArray):
            types.append(None)
        else:
            types.append(_jax.struct_of(aval if _jax.is_typed([aval]) else _jax.plain_type(aval)))
    if offenders:
        refusal = ArgumentError(
            message(
                f"{name} was called with arguments that are no arrays",
                offenders,
                "Arguments are arrays, numbers, or trees of them.",
                "Name others in static_argnums or static_argnames; they then select a program."
                " Of a tree that has arrays as well, pass those alone, as equinox.partition and"
                " flax.nnx.split give them.",
            )
        )
        # JAX raises this where an object could be made an array, which it no longer does.
        convertible = any(hasattr(x, "__jax_array__") for x in arguments.leaves)
        raise also(refusal, ValueError) if convertible else refusal
    return types


def refuse_structs(name: str, arguments: Arguments) -> None:
    """An error for arguments of which only the type is given, where their numbers are wanted."""
    leaves = arguments.leaves
    found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if found:
        paths = argument_paths(arguments)
        raise ArgumentError(
            message(
                f"{name} was called with types in the place of arrays",
                [f"{paths[i]} is {leaves[i]}" for i in found],
                "A call computes with numbers, of which a type has none.",
                "Give arrays, or ask for the program alone: partition, trace and lower take types.",
            )
        )


def refuse_elsewhere(name: str, arrays: Sequence[Any], paths: Sequence[str]) -> None:
    """An error, a RuntimeError too, for arrays whose numbers are not all in this process."""
    offenders = [
        f"{path} is on {show_devices(x.sharding.device_set)}"
        for x, path in zip(arrays, paths, strict=True)
        if isinstance(x, jax.Array | UnevenArray)
        and not x.is_fully_addressable
        and not (x.is_fully_replicated and x.addressable_shards)
    ]
    if offenders:
        refusal = ArgumentError(
            message(
                f"{name} cannot be simulated on arrays that are not all here",
                offenders,
                "A simulation is of one process, and reads all numbers of its arguments.",
                "Give it NumPy's: all processes get them by process_allgather(x, tiled=True) of "
                "jax.experimental.multihost_utils, of an UnevenArray's .value. What the function "
                "closes over is to be an argument, then.",
            )
        )
        raise also(refusal, RuntimeError)


def refuse_others(name: str, arguments: Arguments, paths: Sequence[str], types: Any) -> None:
    """An error for what JAX takes beside arrays."""
    found = zip(arguments.leaves, paths, types, strict=True)
    offenders = [f"{path} is {describe(leaf)}" for leaf, path, kind in found if kind is None]
    if offenders:
        raise UnplannedError(
            message(
                f"{name} was called with what is no array",
                offenders,
                "Programs of meshwise take arrays.",
                "Pass what a Ref holds, as ref[...]. A Ref itself is left to jax.jit, where "
                "neither mesh= nor another word of meshwise's own is given.",
            )
        )


def refuse_symbolic(name: str, paths: Sequence[str], types: Sequence[Any]) -> None:
    """An error for arrays of symbolic shapes, as `jax.export` may have."""
    unsized = [
        f"{path} is {kind.dtype}[{', '.join(map(str, kind.shape))}]"
        for path, kind in zip(paths, types, strict=True)
        if not all(isinstance(size, int) for size in kind.shape)
    ]
    if unsized:
        raise UnplannedError(
            message(
                f"{name} was called with arrays whose sizes are no numbers",
                unsized,
                "How a program is partitioned depends on its sizes, so they must be known.",
                "Export it for each shape that is wanted; or leave the mesh= to the shardings, and "
                "jax.jit partitions it.",
            )
        )
