"""A function under `mw.jit` inside another trace: `jax.jit`, `grad`, `vmap`, another `mw.jit`.

The call becomes one equation that JAX's transformations know how to differentiate and batch; each
program that comes of it is completed and partitioned by meshwise like any other. Between such
programs values are ordinary arrays of their logical shape, so a dim that does not divide is whole
there; inside one program it stays padded and sharded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import Arguments, argument_paths, argument_types
from meshwise.api.build import circumstances, in_specs_of, partition_typed
from meshwise.api.meshes import fill_placements, find_mesh, refuse_region, with_placements
from meshwise.api.options import Choices, Options
from meshwise.api.specs import given_out_specs
from meshwise.api.traced import leaked_tracers, trace_call
from meshwise.api.typed import specs_of_types
from meshwise.run.execute import Executable
from meshwise.run.uneven import UnevenArray


@dataclass(frozen=True, repr=False)
class Runner:
    """Partitions the jaxprs that JAX's transformations make of a call, and runs them."""

    choices: Choices
    mesh: Any
    name: str
    executables: dict[Any, Executable] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        """Its function and mesh, as a jaxpr shows it among the parameters of a call."""
        return f"<mw.jit of {self.name} over {dict(self.mesh.shape)}>"

    def run(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...], args: Sequence[Any]
    ) -> list[Any]:
        """Run on the devices of the mesh; results are ordinary arrays.

        Arguments that lie on the mesh keep their place where no hint says another.
        """
        placed = fill_placements(in_specs, args, self.mesh)
        outs = self._executable(jaxpr, placed, out_specs)(args)
        return [o.value if isinstance(o, UnevenArray) else o for o in outs]

    def function(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The partitioned program as a function that may be traced."""
        return self._executable(jaxpr, in_specs, out_specs).as_function()

    def _executable(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
    ) -> Executable:
        key = _jax.structure_key(jaxpr), in_specs, out_specs, circumstances(self.choices)
        found = self.executables.get(key)
        if found is None:
            names, results = _names("argument", in_specs), _names("result", out_specs)
            # What is made over Auto axes lies on those, all of it: JAX mixes no kinds of meshes.
            typed = _jax.is_typed((*jaxpr.in_avals, *jaxpr.out_avals))
            mesh = self.mesh if typed else _jax.auto_twin(self.mesh)
            per_device, _, places = partition_typed(
                _jax.plain_jaxpr(jaxpr),
                jaxpr.out_avals,
                mesh,
                specs_of_types(jaxpr.in_avals, in_specs),
                out_specs,
                self.choices,
                self.name,
                names,
                results,
            )
            found = Executable(per_device, mesh, name=self.name, arg_names=names, placements=places)
            self.executables[key] = found
        return found


def _names(kind: str, specs: Sequence[Any]) -> list[str]:
    return [f"{kind} {i}" for i in range(len(specs))]


def call_in_trace(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    arguments: Arguments,
    runners: dict[Any, Runner],
) -> Any:
    """Trace the function and bind it to its traced arguments as one call.

    `runners` remembers, for each mesh, what was compiled for earlier calls.
    """
    if _jax.manual_axes():
        refuse_region(name, _jax.manual_axes())
    paths = argument_paths(arguments)
    argument_types(name, arguments, paths)  # an error for what is no array
    in_specs = in_specs_of(name, options, arguments)
    leaves = [x.value if isinstance(x, UnevenArray) else x for x in arguments.leaves]
    mesh = find_mesh(name, options.mesh, in_specs, options.out_shardings, leaves)
    if not _jax.is_staged():  # what runs at once is held to the same as without a trace
        known = list(map(_jax.primal_of, leaves))
        said = [
            s if _divides(s, np.shape(x), mesh) else None
            for s, x in zip(in_specs, known, strict=True)
        ]
        with_placements(name, said, known, paths, mesh, options.mesh is not None)
    closed, captured, out_tree = trace_call(name, fn, options, arguments, in_specs, mesh)
    out_specs = given_out_specs(name, options.out_shardings, out_tree)
    runner = runners.setdefault(mesh, Runner(options.choices, mesh, name))
    try:
        outs = _jax.call(
            closed,
            [None] * len(captured) + [_on_mesh(s, mesh) for s in in_specs],
            [_on_mesh(s, mesh) for s in out_specs],
            {"runner": runner, "witness": _jax.witness_of(mesh)},
            captured + leaves,
        )
    except jax.errors.UnexpectedTracerError as leak:
        raise leaked_tracers(name, [leak]) from None
    return jax.tree.unflatten(out_tree, outs)


def _on_mesh(spec: Any, mesh: Any) -> Any:
    return _jax.on_mesh(spec, mesh) if isinstance(spec, PartitionSpec) else spec


def _divides(spec: Any, shape: Sequence[int], mesh: Any) -> bool:
    """Whether results of another call may lie as a spec says: where it leaves a rest, they do not.

    They are ordinary arrays, and whole in such a dim.
    """
    sizes, spec = getattr(spec, "mesh", mesh).shape, getattr(spec, "spec", spec)
    if not isinstance(spec, PartitionSpec):
        return True
    dims = zip(shape, _jax.axes_of(spec, len(shape)), strict=False)
    return not any(
        size % math.prod(sizes.get(axis, 1) for axis in axes)
        for size, axes in dims
        if axes is not PartitionSpec.UNCONSTRAINED
    )
