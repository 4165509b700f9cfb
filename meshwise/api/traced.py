"""The function of a call, traced: over plain axes, or with the types that `jax.jit` gives it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import Arguments, argument_paths, result_paths
from meshwise.api.options import Options
from meshwise.api.specs import given_out_specs
from meshwise.api.typed import is_typed_call, plain_structs, refuse_uneven, typed_structs
from meshwise.errors import MeshwiseError, TracerLeakError, message


def trace_call(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    arguments: Arguments,
    in_specs: Sequence[Any],
    mesh: Any,
) -> tuple[Any, list[Any], Any]:
    """The function's jaxpr, the traced values it closes over, and the tree of its results.

    Over Explicit axes its types are those that `jax.jit` has. With `mesh=`, a word of ours, all
    axes are completion's; only a function that speaks of types itself is traced with types.
    """

    def traced(types: Sequence[Any], auto_mesh: Any = None) -> tuple[Any, list[Any], Any]:
        statics = options.static_argnums, options.static_argnames
        try:
            return _jax.trace_function(fn, arguments.call, types, *statics, auto_mesh)
        except jax.errors.UnexpectedTracerError as leak:
            raise leaked_tracers(name, [leak]) from None

    is_typed = is_typed_call(mesh, options.mesh, arguments)
    if not is_typed:
        # As under `jax.jit`, axes that the function names are those of the mesh in context.
        around = None if options.mesh is not None else _jax.context_mesh()
        return traced(plain_structs(arguments, mesh), around or mesh)
    if options.mesh is not None and not arguments.are_in_typed_trace:
        try:
            with _jax.over_auto_axes(mesh):
                closed, captured, out_tree = traced(plain_structs(arguments, mesh))
            return _jax.plain_jaxpr(closed), captured, out_tree
        except (TypeError, ValueError) as error:
            if isinstance(error, MeshwiseError):
                raise
    types = typed_structs(arguments, in_specs, options.mesh)
    with _jax.over_typed_axes(options.mesh):
        closed, captured, out_tree = traced(types)
    if options.mesh is None:
        out_specs = given_out_specs(name, options.out_shardings, out_tree)
        places = *argument_paths(arguments), *result_paths(out_tree)
        refuse_uneven(name, mesh, places, [*types, *closed.out_avals], [*in_specs, *out_specs])
    return closed, captured, out_tree


def leaked_tracers(name: str, leaks: Sequence[Any]) -> TracerLeakError:
    """The error for traced values of another trace, or for JAX's error about one."""
    return TracerLeakError(
        message(
            f"{name} uses traced values that an earlier trace left behind",
            [_jax.leak_summary(leak) for leak in leaks],
            "A value computed while a function is traced exists in that trace alone.",
            "Return it from the function that makes it and pass it on as an argument; "
            "jax.checking_leaks() shows where it was stored.",
        )
    )
