"""A function under `mw.jit` inside another trace: `jax.jit`, `grad`, `vmap`, another `mw.jit`.

The call becomes one equation that JAX's transformations know how to differentiate and batch; each
program that comes of it is completed and partitioned by meshwise like any other. Between such
programs values are ordinary arrays of their logical shape, so a dim that does not divide is whole
there; inside one program it stays padded and sharded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh

from meshwise import _jax
from meshwise.api.arguments import Arguments, argument_paths, argument_types
from meshwise.api.build import (
    Choices,
    Options,
    find_mesh,
    given_in_specs,
    given_out_specs,
    partition_jaxpr,
    trace_call,
)
from meshwise.errors import MeshError
from meshwise.run.execute import Executable
from meshwise.run.uneven import UnevenArray


@dataclass(frozen=True)
class Runner:
    """Partitions the jaxprs that JAX's transformations make of a call, and runs them."""

    choices: Choices
    mesh: Any
    name: str
    executables: dict[Any, Executable] = field(default_factory=dict, compare=False, repr=False)

    def run(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...], args: Sequence[Any]
    ) -> list[Any]:
        """Run on the devices of the mesh; results are ordinary arrays."""
        outs = self._executable(jaxpr, in_specs, out_specs)(args)
        return [o.value if isinstance(o, UnevenArray) else o for o in outs]

    def function(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The partitioned program as a function that may be traced."""
        return self._executable(jaxpr, in_specs, out_specs).as_function()

    def _executable(
        self, jaxpr: Any, in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
    ) -> Executable:
        key = jaxpr, in_specs, out_specs
        if key not in self.executables:
            names = [f"argument {i}" for i in range(len(in_specs))]
            results = [f"result {i}" for i in range(len(out_specs))]
            per_device, _ = partition_jaxpr(
                jaxpr, self.mesh, in_specs, out_specs, self.choices, self.name, names, results
            )
            self.executables[key] = Executable(
                per_device, self.mesh, name=self.name, arg_names=names
            )
        return self.executables[key]


def call_in_trace(
    fn: Callable[..., Any], options: Options, arguments: Arguments, runners: dict[Any, Runner]
) -> Any:
    """Trace the function and bind it to its traced arguments as one call.

    `runners` remembers, for each mesh, what was compiled for earlier calls.
    """
    name = getattr(fn, "__name__", "fn")
    types = argument_types(name, arguments, argument_paths(arguments))
    in_specs = given_in_specs(name, options, arguments)
    mesh = find_mesh(name, options, in_specs, arguments.leaves)
    if isinstance(mesh, AbstractMesh):
        raise MeshError(
            f"{name} is called in a trace with an AbstractMesh, which has no devices to run on. "
            "Give mw.jit a jax.sharding.Mesh, or use partition(...) to look at the program."
        )
    closed, captured, out_tree = trace_call(name, fn, options, arguments, types, mesh)
    out_specs = given_out_specs(name, options, out_tree)
    leaves = [x.value if isinstance(x, UnevenArray) else x for x in arguments.leaves]
    runner = runners.setdefault(mesh, Runner(options.choices, mesh, name))
    outs = _jax.call(
        closed,
        [None] * len(captured) + in_specs,
        out_specs,
        {"runner": runner, "witness": _jax.witness_of(mesh)},
        captured + leaves,
    )
    return jax.tree.unflatten(out_tree, outs)
