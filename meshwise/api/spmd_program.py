"""The partitioned program as a user holds it: read it, price it, simulate it, run it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwise._jax import ClosedJaxpr
from meshwise.choose.plan import Plan
from meshwise.errors import ArgumentError, MeshError
from meshwise.ir.collectives import Collective
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding
from meshwise.report.explain import explain_plan
from meshwise.run.execute import Executable
from meshwise.run.simulate import simulate


@dataclass(frozen=True, eq=False)
class SpmdProgram:
    """One program for every device of a mesh.

    Made by `mw.jit(fn, ...).partition(*args)`. It stands alone: nothing of the user's function is
    called again.
    """

    per_device: PerDeviceProgram
    plan: Plan
    user_mesh: Any
    in_tree: Any
    out_tree: Any
    donated: tuple[int, ...] = ()
    name: str = "fn"

    @property
    def jaxpr(self) -> ClosedJaxpr:
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
    def wire_bytes(self) -> int:
        """Bytes each device sends in one call, loop trips included."""
        return sum(c.wire_bytes for c in self.collectives)

    @cached_property
    def in_shardings(self) -> Any:
        """Sharding of every argument: a tuple of trees, and `(args, kwargs)` with keywords."""
        args, kwargs = jax.tree.unflatten(
            self.in_tree, [self._named(s) for s in self.per_device.in_shardings]
        )
        return (args, kwargs) if kwargs else args

    @cached_property
    def out_shardings(self) -> Any:
        """Sharding of every result, a tree like the function's result."""
        return jax.tree.unflatten(
            self.out_tree, [self._named(s) for s in self.per_device.out_shardings]
        )

    def _named(self, sharding: Sharding) -> NamedSharding:
        return named_sharding(sharding, self.per_device.mesh, self.user_mesh)

    def __str__(self) -> str:
        """The per-device jaxpr as text."""
        return str(self.jaxpr)

    def explain(self) -> str:
        """The decisions, each collective with its line and reason, and what beat what."""
        return explain_plan(self.plan, self.per_device, self.name)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on pretended devices, as many as the mesh has, on one real device.

        Arguments and results are global. Raises `ReplicationError` where a replicated result
        differs between devices.
        """
        program = self.per_device
        results = simulate(
            program.jaxpr,
            program.mesh,
            program.in_shardings,
            program.out_shardings,
            [t.shape for t in program.out_types],
            self._leaves(args, kwargs),
        )
        return jax.tree.unflatten(self.out_tree, results)

    @cached_property
    def executable(self) -> Executable:
        """The program compiled for the devices of the mesh (made at the first use)."""
        if isinstance(self.user_mesh, AbstractMesh):
            raise MeshError(
                f"{self.name} was partitioned for an AbstractMesh, which has no devices: it can be "
                "read, priced and simulated. Partition it for a jax.sharding.Mesh to run it."
            )
        return Executable(self.per_device, self.user_mesh, self.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices of the mesh."""
        return jax.tree.unflatten(self.out_tree, self.executable(self._leaves(args, kwargs)))

    def compile(self) -> Any:
        """The `jax.stages.Compiled` of the program, for its cost and memory analysis."""
        return self.executable.compile()

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            raise ArgumentError(
                f"{self.name} was partitioned for arguments {self.in_tree}, and is called with "
                f"{tree}. Call it with the same structure, or partition it again."
            )
        return leaves


def refined_jax_mesh(mesh: Mesh, user_mesh: Any) -> Any:
    """The user's mesh with its devices laid out over the refined axes."""
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.names)
    if isinstance(user_mesh, AbstractMesh):
        return AbstractMesh(mesh.sizes, mesh.names, axis_types=auto)
    return jax.sharding.Mesh(user_mesh.devices.reshape(mesh.sizes), mesh.names, axis_types=auto)


def named_sharding(sharding: Sharding, mesh: Mesh, user_mesh: Any) -> NamedSharding:
    """A sharding over the user's mesh where its axes are whole, else over the refined one."""
    restored = [mesh.restore(axes) for axes in sharding.dims]
    if any(axes is None for axes in restored):
        return NamedSharding(refined_jax_mesh(mesh, user_mesh), _spec(sharding.dims))
    return NamedSharding(user_mesh, _spec([a for a in restored if a is not None]))


def _spec(dims: Any) -> PartitionSpec:
    entries: list[Any] = [axes[0] if len(axes) == 1 else (axes or None) for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
