"""What the worked models share: a step of a model and the hints on it, as data.

A step is an ordinary function, and all that is hinted of it is how its arguments and results lie:
`ours` is what meshwise makes of that, `peer` what XLA's partitioners do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.peers import hlo


@dataclass(frozen=True)
class Case:
    """A step, the types of its arguments, and the hints on them and on its results.

    `ins` and `outs` are trees of specs, or prefixes of them.
    """

    name: str
    title: str
    mesh: Mapping[str, int]
    step: Callable[..., Any]
    types: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: Any

    @property
    def devices(self) -> int:
        return prod(self.mesh.values())


def abstract_mesh(case: Case) -> AbstractMesh:
    """A case's mesh without devices."""
    auto = (AxisType.Auto,) * len(case.mesh)
    return AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh), axis_types=auto)


def real_mesh(case: Case) -> Mesh:
    """A case's mesh over the first devices there are."""
    auto = (AxisType.Auto,) * len(case.mesh)
    devices = jax.devices()[: case.devices]
    return jax.make_mesh(tuple(case.mesh.values()), tuple(case.mesh), auto, devices=devices)


def ours(case: Case, mesh: Mesh | AbstractMesh) -> Any:
    """The step through meshwise."""
    return mw.jit(case.step, mesh=mesh, in_shardings=case.ins, out_shardings=case.outs)


def program_of(case: Case) -> mw.SpmdProgram:
    """What each device does in a step; nothing is compiled, and no device is needed."""
    return ours(case, abstract_mesh(case)).partition(*case.types)


def peer(case: Case, which: hlo.Partitioner) -> hlo.Report:
    """The collectives that one of XLA's partitioners emits for the step.

    The hints are constraints inside, as `jax.jit` takes no uneven arguments and results.
    """
    mesh = real_mesh(case)

    def constrained(*args: Any) -> Any:
        given = (constrain(a, spec, mesh) for a, spec in zip(args, case.ins, strict=True))
        return constrain(case.step(*given), case.outs, mesh)

    with hlo.partitioner(which):
        return hlo.read(jax.jit(constrained).lower(*case.types))


def constrain(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Every array of a tree with the spec that a prefix of the tree has for it."""

    def each(spec: P | None, part: Any) -> Any:
        if spec is None:
            return part
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding), part)

    return jax.tree.map(each, specs, tree, is_leaf=lambda s: s is None or isinstance(s, P))
