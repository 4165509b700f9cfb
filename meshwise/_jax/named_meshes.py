"""The meshes that a traced function names itself: in constraints, calls, regions and constants."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshwise._jax.jaxprs import ClosedJaxpr, Tracer, is_jaxpr, opened

# Where an equation was traced, perhaps by an earlier call, of a function that JAX keeps. And types:
# for these JAX wants a mesh in context.
_SAY_NOTHING = ("context_mesh", "ctx_mesh", "concrete_mesh", "out_sharding")


def meshes_in(closed: ClosedJaxpr) -> Iterator[Mesh]:
    """Each mesh of devices that a jaxpr names, in the order of its equations; arrays it holds last.

    An array that nobody put in its place says nothing.
    """
    yield from _in_value(closed.jaxpr)
    yield from _in_value(closed.consts)


def _in_value(value: Any) -> Iterator[Mesh]:
    """The meshes in what may be a parameter of an equation."""
    if isinstance(value, Mesh):
        if not value.empty:
            yield value
    elif isinstance(value, NamedSharding):
        yield from _in_value(value.mesh)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _in_value(part)
    elif is_jaxpr(value):
        yield from _in_jaxpr(value)
    elif isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.committed:
        yield from _in_value(value.sharding)


def _in_jaxpr(jaxpr: Any) -> Iterator[Mesh]:
    for eqn in opened(jaxpr).eqns:
        for name, value in eqn.params.items():
            if name not in _SAY_NOTHING:
                yield from _in_value(value)
    yield from _in_value(list(getattr(jaxpr, "consts", ())))
