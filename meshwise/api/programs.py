"""`mw.program`: a function with layouts, made into a program for every device of a mesh."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise.api.annotations import layouts_of
from meshwise.api.arguments import (
    Arguments,
    argument_types,
    describe,
    name_of,
    result_paths,
)
from meshwise.api.options import check_is_function, check_is_mesh
from meshwise.api.specs import Described, broadcast_specs
from meshwise.api.spmd_program import SpmdProgram
from meshwise.errors import ArgumentError, LayoutError, MeshError, message
from meshwise.flatten import flatten
from meshwise.ir.mesh import Axes, plain_mesh
from meshwise.run.placement import named_sharding
from meshwise.schedule.language.infer import verbs_of
from meshwise.schedule.language.listing import Listing, listing
from meshwise.schedule.language.lower import lower
from meshwise.schedule.language.scene import AllAxes, Scene
from meshwise.schedule.language.specs import (
    Boundary,
    as_spec,
    axes_of,
    boundary,
    says,
)
from meshwise.schedule.language.verbs import update_p


@_jax.hides_frames
def program(
    mesh: Any,
    *,
    axes: str | Sequence[str] | None = None,
    layouts: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], "Program"]:
    """Make a program of computation and communication of a function, its arguments with layouts.

    The function is written with whole shapes: a Sliced value has its whole shape, a Local or
    Unreduced one the shape that each device has. Layouts are the annotations of its parameters
    (`mw.Replicated`, `mw.Sliced(dim)`, `mw.Local`, `mw.Unreduced(op)`, several joined with `&`,
    a tree of them for a tree, also inside `typing.Annotated`); a parameter without one is
    Replicated. All other values' layouts follow, and are checked.

    Args:
        mesh: `jax.sharding.Mesh`, or `AbstractMesh` to plan without devices.
        axes: the program's group: the axes that layouts and verbs mean where they name none. By
            default the only axis of the mesh.
        layouts: by the parameter's name, instead of annotations.

    >>> from jax.sharding import AbstractMesh
    >>> @program(AbstractMesh((8,), ("data",)))
    ... def mean(x: Local):
    ...     return all_reduce(x) / 8
    >>> mean.partition(jax.ShapeDtypeStruct((8, 4), jnp.float32)).wire_bytes
    28
    """
    _check(mesh, layouts)
    sizes = AllAxes.of(mesh.axis_names, mesh.axis_sizes)
    group = axes_of(axes)
    if group is None and len(sizes.names) == 1:
        group = sizes.names
    unknown = [a for a in group or () if a not in sizes.names]
    if unknown:
        raise MeshError(
            message(
                "mw.program was given a group that is none",
                [f"axes={axes!r}"],
                f"A group is one or more axes of the mesh, {', '.join(sizes.names)}.",
                "Name axes of the mesh.",
            )
        )

    @_jax.hides_frames
    def of(fn: Callable[..., Any]) -> Program:
        return Program(fn, mesh, sizes, group, dict(layouts or {}))

    return of


def _check(mesh: Any, layouts: Any) -> None:
    """An error for what is no mesh, or are no layouts of parameters."""
    check_is_mesh(mesh, "mw.program")
    if layouts is not None and not isinstance(layouts, Mapping):
        raise LayoutError(
            message(
                "mw.program was given layouts that name no parameters",
                [f"layouts={layouts!r:.60}"],
                "Layouts are a dict, by the names of the function's parameters.",
                'Write layouts={"x": mw.Sliced(0)}, or annotate the parameters.',
            )
        )
    if mesh is None:
        raise MeshError(
            message(
                "mw.program was given no mesh",
                ["mesh=None"],
                "Layouts and verbs speak of axes of a mesh.",
                "Give a jax.sharding.Mesh or, without devices, an AbstractMesh.",
            )
        )


@dataclass(frozen=True, eq=False)
class _Call:
    """A call's arguments by parameter: leaves, their tree, paths and layouts."""

    arguments: Arguments
    paths: list[str]
    types: list[jax.ShapeDtypeStruct]
    boundaries: list[Boundary]

    @property
    def key(self) -> Any:
        """Equal for calls that one program serves."""
        types = tuple([(t.shape, t.dtype, t.weak_type) for t in self.types])
        return self.arguments.tree, types, _jax.settings_key()


class Program:
    """A function under `mw.program`; call it, or look at what it becomes with `partition`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Any,
        sizes: AllAxes,
        group: Axes | None,
        layouts: dict[str, Any],
    ):
        """Nothing is traced yet."""
        check_is_function(fn, "mw.program")
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.mesh = mesh
        self.name = name_of(fn)
        self._sizes = sizes
        self._group = group
        self._signature = inspect.signature(fn)
        self._given = layouts_of(fn, self._signature, layouts, self.name)
        self._made: dict[Any, _Made] = {}

    @_jax.hides_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices of the mesh; traced and compiled once for each kind of arguments."""
        call = self._call(args, kwargs)
        program = self._make(call).program
        positional, named = jax.tree.unflatten(call.arguments.tree, call.arguments.leaves)
        return program(*positional, **named)

    def __repr__(self) -> str:
        """The function it is of."""
        return f"<mw.program of {self.fn!r}>"

    @_jax.hides_frames
    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._make(self._call(args, kwargs)).program

    @_jax.hides_frames
    def layouts(self, *args: Any, **kwargs: Any) -> Listing:
        """Every value with its line, type and layout; `print` it."""
        return self._make(self._call(args, kwargs)).listing

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        bound = self._bound(args, kwargs)
        paths, specs = [], []
        for name, value, spec in _parameters(self._signature, bound, self._given):
            whole = Described(jax.tree.structure(value), name)
            specs += broadcast_specs(self.name, f"the layout of {name}", spec, whole)
            found = jax.tree_util.tree_flatten_with_path(value)[0]
            paths += [f"{name}{jax.tree_util.keystr(path)}" for path, _ in found]
        leaves, tree = jax.tree.flatten((bound.args, bound.kwargs))
        _check_arrays(self.name, leaves, paths)
        arguments = Arguments(leaves, tree, (), (), tuple(range(len(bound.args))))
        types = argument_types(self.name, arguments, paths)
        boundaries = self._boundaries(paths, types, specs)
        return _Call(arguments, paths, types, boundaries)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as mismatch:
            raise ArgumentError(
                message(
                    f"{self.name} was called with other arguments than it takes",
                    [str(mismatch)],
                    f"Its parameters are {', '.join(self._signature.parameters) or 'none'}.",
                    "Call it as the function itself.",
                )
            ) from None

    def _boundaries(
        self, paths: Sequence[str], types: Sequence[Any], specs: Sequence[Any]
    ) -> list[Boundary]:
        found, offenders = [], []
        for path, struct, said in zip(paths, types, specs, strict=True):
            try:
                spec = as_spec(said)
                found.append(boundary(spec, struct.shape, self._group, self._sizes.axis_size))
            except ValueError as problem:
                aval = _jax.array_type(struct)
                offenders.append(f"{path} {aval.str_short(short_dtypes=True)}: {problem}")
        if offenders:
            raise LayoutError(
                message(
                    f"{self.name} was called with arguments that do not fit their layouts",
                    offenders,
                    "A Sliced argument is the whole array; a Local or Unreduced one has a leading "
                    "dim that counts the devices of its axes. Along an axis a value is one thing.",
                    "Give each argument as its layout says, or another layout; name axes, or give "
                    "the program a group with mw.program(mesh, axes=...).",
                )
            )
        return found

    def _make(self, call: _Call) -> "_Made":
        made = self._made.get(call.key)
        if made is None:
            made = self._made[call.key] = self._build(call)
        return made

    def _build(self, call: _Call) -> "_Made":
        closed, out_tree = self._trace(call)
        flat = flatten(closed)
        names = dict(zip(flat.jaxpr.invars, call.paths, strict=True))
        scene = Scene(self._sizes, self._group, names=names)
        mesh = plain_mesh(self.mesh.axis_names, self.mesh.axis_sizes)
        lowered = lower(flat, call.boundaries, scene, mesh)
        _check_updates(self.name, closed, flat, lowered.states)
        per_device = lowered.per_device
        placements = tuple(
            tuple([named_sharding(s, mesh, self.mesh) for s in shardings])
            for shardings in (per_device.in_shardings, per_device.out_shardings)
        )
        out_paths = tuple(result_paths(out_tree))
        self._check_results(out_tree, out_paths, lowered.outs)
        made = SpmdProgram(
            per_device=per_device,
            user_mesh=self.mesh,
            in_tree=call.arguments.tree,
            out_tree=out_tree,
            placements=(placements[0], placements[1]),
            in_paths=tuple(call.paths),
            out_paths=out_paths,
            states=lowered.states,
            name=self.name,
        )
        return _Made(made, listing(flat, lowered, scene, out_paths))

    def _check_results(self, tree: Any, paths: Sequence[str], found: Sequence[Boundary]) -> None:
        """Results lie as the annotation of the function's result says, where it says anything."""
        said = self._given.get("return")
        offenders: list[str] = []
        if said is None:
            return
        whole = Described(tree, "result")
        specs = broadcast_specs(self.name, "the layout of the result", said, whole)
        for path, spec, lies in zip(paths, map(as_spec, specs), found, strict=True):
            try:
                fits = says(spec, lies.layout, self._group, self._sizes.axis_size)
            except ValueError as problem:
                offenders.append(f"{path}: {problem}")
            else:
                offenders += [] if fits else [f"{path} is {lies.layout}, not {spec}"]
        if offenders:
            raise LayoutError(
                message(
                    f"{self.name} has results that do not lie as its annotation says",
                    offenders,
                    "The layouts of results follow from those of arguments; an annotation of the "
                    "result is checked.",
                    "Change the layout with a verb, or the annotation.",
                )
            )

    def _trace(self, call: _Call) -> tuple[Any, Any]:
        """The function's jaxpr of whole shapes, and the tree of its results."""
        trees: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(call.arguments.tree, leaves)
            results, tree = jax.tree.flatten(self.fn(*args, **kwargs))
            trees.append(tree)
            return [jnp.asarray(x) for x in results]

        bodies = [
            jax.ShapeDtypeStruct(b.body_shape(t.shape), t.dtype, weak_type=t.weak_type)
            for t, b in zip(call.types, call.boundaries, strict=True)
        ]
        try:
            closed = _jax.make_jaxpr_over_axes(flat, [], bodies, self.name, call.paths)
        except NameError as unbound:
            if "unbound axis name" not in str(unbound):
                raise
            raise LayoutError(
                message(
                    f"{self.name} uses a collective of jax.lax",
                    [str(unbound)],
                    "A program is written with whole values; verbs say what is communicated.",
                    "Use mw.all_reduce, mw.reduce_scatter, mw.all_gather, mw.all_to_all, mw.send; "
                    "a function of local arrays is read by mw.SpmdProgram.from_shard_map.",
                )
            ) from unbound
        return closed, trees[0]


@dataclass(frozen=True, eq=False)
class _Made:
    program: SpmdProgram
    listing: Listing


def _check_updates(name: str, closed: Any, flat: Any, states: Sequence[tuple[int, int]]) -> None:
    """Every update is returned, and no argument twice: else the next value would be lost."""
    made = Counter(_jax.source_summary(e) for e in verbs_of(closed) if e.primitive is update_p)
    updates = [e for e in flat.jaxpr.eqns if e.primitive is update_p]
    returned = {flat.jaxpr.invars[argument] for argument, _ in states}
    kept = Counter(_jax.source_summary(e) for e in updates if e.invars[0] in returned)
    targets = Counter(e.invars[0] for e in updates)
    offenders = [f"the update at {line} is not among the results" for line in made - kept]
    offenders += [
        f"the update at {_jax.source_summary(e)} is of an argument that has another"
        for e in updates
        if targets[e.invars[0]] > 1
    ]
    if offenders:
        raise LayoutError(
            message(
                f"{name} updates arguments that it does not hand on",
                offenders,
                "An update gives an argument its next value, once; the caller gets it as a result.",
                "Return what mw.update returns.",
            )
        )


def _check_arrays(name: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    offenders = [
        f"{path} is {describe(leaf)}"
        for leaf, path in zip(leaves, paths, strict=True)
        if _jax.array_type(leaf) is None
    ]
    if offenders:
        raise ArgumentError(
            message(
                f"{name} was called with arguments that are no arrays",
                offenders,
                "Arguments of a program are arrays, numbers, or trees of them.",
                "Let the function close over anything else, or be a functools.partial.",
            )
        )


def _parameters(
    signature: inspect.Signature, bound: inspect.BoundArguments, layouts: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Name, value and layout of each argument, in the order of the leaves of `(args, kwargs)`."""
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    positional: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            positional += [(f"{name}[{i}]", layouts.get(name)) for i in range(len(value))]
        elif kinds[name] is not inspect.Parameter.VAR_KEYWORD:
            positional.append((name, layouts.get(name)))
    rest = next((n for n, k in kinds.items() if k is inspect.Parameter.VAR_KEYWORD), "")
    found = [(n, v, s) for (n, s), v in zip(positional, bound.args, strict=False)]
    for name in sorted(bound.kwargs):
        found.append((name, bound.kwargs[name], layouts.get(name if name in kinds else rest)))
    return found
