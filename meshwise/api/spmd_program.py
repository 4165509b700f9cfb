"""The partitioned program as a user holds it: read it, price it, simulate it, run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.api.arguments import refuse_elsewhere
from meshwise.api.calibrate import MEASURED, links_or_figures
from meshwise.api.deleted import refuse_gone
from meshwise.api.shard_maps import read_shard_map
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.cost.links import Links
from meshwise.cost.timeline import Timeline, timeline
from meshwise.errors import ArgumentError, message
from meshwise.ir.collectives import Collective
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.report.explain import explained
from meshwise.report.facts import Facts, facts_of_program
from meshwise.report.page import page
from meshwise.report.plan_facts import facts_of_plan
from meshwise.report.text import count
from meshwise.run.execute import Executable
from meshwise.run.options import Compiling
from meshwise.run.placement import named_sharding, refined_jax_mesh
from meshwise.run.simulate import simulate


@dataclass(frozen=True, eq=False, repr=False)
class SpmdProgram:
    """One program for every device of a mesh.

    Made by `mw.jit(fn, ...).partition(*args)`, or `from_shard_map` of a function written for one
    device of many. It stands alone: nothing of the user's function is called again. Arrays that the
    function closes over and that lie on the mesh are `held`; they are the program's first inputs.
    `placements` are the shardings of all inputs and results, `in_paths` and `out_paths` their
    names, `hints` what the user said of them. `states` are pairs of positions: of an argument, and
    of the result that is its next value. A program that was not planned has no `plan`; one that
    `is_moved` has that of what it was before. `compiling` is what the user said of compiling it.
    """

    per_device: PerDeviceProgram
    user_mesh: Any
    in_tree: Any
    out_tree: Any
    placements: tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    plan: Plan | None = None
    hints: tuple[tuple[str | None, ...], tuple[str | None, ...]] = ((), ())
    held: tuple[Any, ...] = ()
    donated: tuple[int, ...] = ()
    name: str = "fn"
    states: tuple[tuple[int, int], ...] = ()
    compiling: Compiling | None = None
    is_moved: bool = False

    @classmethod
    @_jax.hides_frames
    def from_shard_map(
        cls,
        fn: Callable[..., Any],
        mesh: Any,
        in_specs: Any,
        out_specs: Any,
        *args: Any,
        check_vma: bool | None = None,
    ) -> "SpmdProgram":
        """The program of a function written for one device of many, as `jax.shard_map` takes it.

        `fn` maps local arrays to local arrays, with `jax.lax` collectives over the axes of the
        mesh; `args` are global, or `jax.ShapeDtypeStruct`s. Every axis is manual. `check_vma` is
        `jax.shard_map`'s, by which derivatives taken inside differ; by default True, as there, or
        False where JAX refuses the function with it. Then nobody checks here whether results that
        their spec calls replicated are so: `simulate` does.

        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> x = jax.ShapeDtypeStruct((8, 4), jax.numpy.float32)
        >>> fn = lambda x: jax.lax.psum(x, "data")
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> SpmdProgram.from_shard_map(fn, mesh, P("data"), P(), x).wire_bytes
        28
        """
        return cls(**vars(read_shard_map(fn, mesh, in_specs, out_specs, args, check_vma)))

    def with_per_device(self, per_device: PerDeviceProgram) -> "SpmdProgram":
        """The same program computed in another way; arguments may lie in another way too."""
        before, mesh = self.per_device, self.user_mesh

        def placed(side: Any, old: Any, new: Any) -> tuple[NamedSharding, ...]:
            found = zip(side, old, new, strict=True)
            return tuple(
                [p if o == n else named_sharding(n, per_device.mesh, mesh) for p, o, n in found]
            )

        ins, outs = self.placements
        placements = (
            placed(ins, before.in_shardings, per_device.in_shardings),
            placed(outs, before.out_shardings, per_device.out_shardings),
        )
        return replace(self, per_device=per_device, placements=placements, is_moved=True)

    @property
    def jaxpr(self) -> _jax.ClosedJaxpr:
        """The per-device closed jaxpr: lax primitives and explicit collectives."""
        return self.per_device.jaxpr

    @cached_property
    def mesh(self) -> Any:
        """The refined mesh whose axis names the jaxpr uses (abstract where the user's is)."""
        return refined_jax_mesh(self.per_device.mesh, self.user_mesh)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, with its line in the user's code and the decision that made it."""
        return self.per_device.collectives

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends in one call, in all trips of loops; of unknown trips in one."""
        return self.per_device.wire_bytes

    @cached_property
    def in_shardings(self) -> Any:
        """Sharding of every argument: a tuple of trees, and `(args, kwargs)` with keywords."""
        args, kwargs = jax.tree.unflatten(self.in_tree, self.placements[0][len(self.held) :])
        return (args, kwargs) if kwargs else args

    @cached_property
    def out_shardings(self) -> Any:
        """Sharding of every result, a tree like the function's result."""
        return jax.tree.unflatten(self.out_tree, self.placements[1])

    def __str__(self) -> str:
        """The per-device jaxpr as text."""
        return str(self.jaxpr)

    def explain(self) -> str:
        """The decisions, each collective with its line and reason, what is held, what beat what."""
        return explained(self._facts)

    def to_html(self) -> str:
        """What `explain` says as one page, with a timeline, and the code beside what it sends.

        The page loads nothing from anywhere. Lines are read from the files as they are now.

        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> x = jax.ShapeDtypeStruct((8, 4), jax.numpy.float32)
        >>> fn = lambda x: jax.lax.psum(x, "data")
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> page = SpmdProgram.from_shard_map(fn, mesh, P("data"), P(), x).to_html()
        >>> page[:15]
        '<!doctype html>'
        """
        return page(self._facts)

    @_jax.hides_frames
    def timeline(
        self, hardware: Hardware | Links | str | None = None, overlaps: bool = True
    ) -> Timeline:
        """When each kernel and collective of one call runs, predicted; `print` shows a chart.

        `hardware` are figures of a device, or of each axis's link too (`Links`), or "measured" for
        what `mw.calibrate` measured of the mesh, else of its devices; by default those that the
        program was planned by, else `GENERIC`.
        """
        planned = GENERIC if self.plan is None else self.plan.hardware
        figures = planned if hardware is None else hardware
        if figures == MEASURED:
            figures = links_or_figures(self.user_mesh)
        if not isinstance(figures, Hardware | Links):
            raise ArgumentError(
                message(
                    f"A timeline of {self.name} was asked for by figures that are none",
                    [f"hardware={hardware!r:.60}"],
                    "They are of one device (Hardware), or of each axis's link too (Links), or "
                    '"measured".',
                    "Give those in meshwise.cost.hardware, or what mw.calibrate measured.",
                )
            )
        return timeline(self.jaxpr, self.per_device.mesh.axis_size, figures, overlaps=overlaps)

    @property
    def _facts(self) -> Facts:
        if self.plan is None:
            paths = self.in_paths, self.out_paths
            return facts_of_program(self.per_device, self.name, paths, self.donated, self.hints)
        return facts_of_plan(self.plan, self.per_device, self.name, self.donated, self.is_moved)

    @_jax.hides_frames
    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on pretended devices, as many as the mesh has, on one real device.

        Arguments and results are global. Raises `ReplicationError` where a replicated result
        differs between devices.
        """
        program = self.per_device
        arrays = [*self.held, *self.leaves(args, kwargs)]
        refuse_gone(self.name, arrays, lambda: self.in_paths)
        refuse_elsewhere(self.name, arrays, self.in_paths)
        with _jax.as_wide_as(program.jaxpr), _jax.promoting():
            results = simulate(
                program.jaxpr,
                program.mesh,
                program.in_shardings,
                program.out_shardings,
                [t.shape for t in program.out_types],
                arrays,
            )
        outs = zip(results, program.out_types, strict=True)
        results = [_jax.with_weak_type(x, getattr(t, "weak_type", False)) for x, t in outs]
        return jax.tree.unflatten(self.out_tree, results)

    @cached_property
    def executable(self) -> Executable:
        """The program compiled for the devices of the mesh (made at the first use)."""
        return Executable(
            self.per_device,
            self.user_mesh,
            self.donated,
            name=self.name,
            arg_names=self.in_paths,
            placements=self.placements,
            held=self.held,
            compiling=self.compiling,
        )

    @_jax.hides_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices of the mesh."""
        leaves = self.leaves(args, kwargs)
        if self.donated:  # a donated buffer that is read may end the process
            self.look(leaves)
        try:
            outs = self.executable(leaves)
        except (RuntimeError, ValueError):
            self.look(leaves)
            raise
        return jax.tree.unflatten(self.out_tree, outs)

    def __repr__(self) -> str:
        """What it is of, and what it sends; `explain()` says more."""
        devices, sent = self.per_device.mesh.device_count, self.wire_bytes / 1024
        calls = count(len(self.collectives), "collective")
        return (
            f"<SpmdProgram of {self.name} for {count(devices, 'device')}, {calls}, "
            f"{sent:,.1f} KiB sent by each>"
        )

    def look(self, leaves: Sequence[Any]) -> None:
        """An error where buffers that a call reads are gone, or donated and read elsewhere."""
        refuse_gone(self.name, [*self.held, *leaves], lambda: self.in_paths, self.donated)

    def compile(self) -> Any:
        """The `jax.stages.Compiled` of the program, for its cost and memory analysis."""
        return self.executable.compile()

    def leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, or_types: bool = False
    ) -> list[Any]:
        """The arguments' leaves; an error for other arguments than the program is made for.

        With `or_types` a `jax.ShapeDtypeStruct` may stand for an array.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        rule = "A program is made for one structure and for arrays of one shape and type."
        way_out = "Call it with such arguments, or partition the function for these."
        if tree != self.in_tree:
            raise ArgumentError(
                message(
                    f"{self.name} is called with other arguments than it was partitioned for",
                    [
                        f"partitioned for {_call_text(self.in_tree)}",
                        f"called with {_call_text(tree)}",
                    ],
                    rule,
                    way_out,
                )
            )
        first = len(self.held)
        found = zip(leaves, self.per_device.in_types[first:], self.in_paths[first:], strict=True)
        offenders = [
            o
            for leaf, wanted, path in found
            if (o := _difference(leaf, wanted, path, or_types=or_types))
        ]
        if offenders:
            raise ArgumentError(
                message(
                    f"{self.name} is called with other arrays than it was partitioned for",
                    offenders,
                    rule,
                    way_out,
                )
            )
        return leaves


def _call_text(tree: Any) -> str:
    """The structure of a call's arguments, `*` for an array."""
    try:
        args, kwargs = jax.tree.unflatten(tree, [_STAR] * tree.num_leaves)
    except Exception:  # a class takes nothing but arrays
        return str(tree)
    return f"({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def _difference(leaf: Any, wanted: Any, path: str, *, or_types: bool) -> str | None:
    """What is wrong with an argument, None where it fits."""
    is_type = isinstance(leaf, jax.ShapeDtypeStruct) and not or_types
    aval = None if is_type else _jax.array_type(leaf)
    if aval is None:
        return f"{path} is a {type(leaf).__name__}, wanted is {wanted.str_short()}"
    if (aval.shape, aval.dtype) == (wanted.shape, wanted.dtype):
        return None
    return f"{path} is {aval.str_short()}, wanted is {wanted.str_short()}"
