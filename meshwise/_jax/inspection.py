"""`jax.debug.inspect_array_sharding` in a program: the callback is told what meshwise decided."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise._jax.jaxprs import with_bodies, with_each


class Inspector:
    """A callback that is told once how a value lies on a mesh."""

    def __init__(self, callback: Callable[[Any], Any], mesh: Any):
        """Tell nothing yet."""
        self.callback = callback
        self.mesh = mesh
        self.was_told = False

    def tell(
        self, dims: Sequence[tuple[str, ...]], names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        """Say over which axes each dim is sharded; of the mesh refined to `names` where needed."""
        if self.was_told:
            return
        self.was_told = True
        mesh = self.mesh
        if not {a for own in dims for a in own} <= set(mesh.axis_names):
            auto = (AxisType.Auto,) * len(names)
            if isinstance(mesh, AbstractMesh):
                mesh = AbstractMesh(tuple(sizes), tuple(names), axis_types=auto)
            else:
                mesh = jax.sharding.Mesh(mesh.devices.reshape(sizes), names, axis_types=auto)
        entries = [own[0] if len(own) == 1 else own or None for own in dims]
        self.callback(NamedSharding(mesh, PartitionSpec(*entries)))


def inspected(jaxpr: Any, mesh: Any) -> Any:
    """A jaxpr, open or closed, whose inspections know the program's mesh."""

    def told(eqn: Any) -> list[Any]:
        if eqn.primitive.name != "inspect_sharding":
            return [with_bodies(eqn, lambda body: inspected(body, mesh))]
        return [eqn.replace(params={"callback": Inspector(eqn.params["callback"], mesh)})]

    return with_each(jaxpr, told)
