"""Ways to lay the graph of `model.py` over a mesh: in any order, or in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.cases import Case
from examples.gcn import model

SCHEMES: Mapping[str, tuple[str, dict[str, int], P]] = {
    "edges": ("nodes and edges in any order", {"x": 8}, P("x")),
    "grid": ("nodes and edges in any order, on two axes", {"x": 2, "y": 4}, P(("x", "y"))),
    "parts": ("a part of the graph on each device", {"x": 8}, P("x")),
}


def case(name: str, config: model.Config, nodes: Any, graph: Any) -> Case:
    """A training step on a graph, of which types are enough."""
    title, mesh, spec = SCHEMES[name]
    params = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    types = (
        params,
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (nodes, graph)),
    )
    step = partial(model.train_step, config=config)
    return Case(name, title, mesh, step, types, (P(), spec, spec), (P(), P()))


def types_of(shape: tuple[int, ...], edges: tuple[int, ...], features: int) -> tuple[Any, Any, Any]:
    """Types of the nodes; of the numbers of nodes at edges; and of the edges' scales."""
    array = jax.ShapeDtypeStruct
    nodes = model.Nodes(
        array((*shape, features), jnp.float32), array(shape, jnp.int32), array(shape, jnp.float32)
    )
    return nodes, array(edges, jnp.int32), array(edges, jnp.float32)


def large_cases() -> Iterator[Case]:
    """Graphs of the size of ogbn-products and ogbn-papers100M (edges are directed, with loops).

    A part is taken to read as many nodes of the others as it has, in equal shares.
    """
    for title, count, edges, widths, devices in (
        ("products", 2_449_029, 126_167_309, (100, 256, 256, 47), 64),
        ("papers100M", 111_059_956, 1_726_745_828, (128, 256, 256, 172), 2048),
    ):
        config = model.Config(widths)
        nodes, number, scale = types_of((count,), (edges,), widths[0])
        found = case("edges", config, nodes, model.Edges(number, number, scale))
        yield replace(found, title=f"{title}\nin any order", mesh={"x": devices})
        size, long = -(-count // devices), -(-edges // devices)
        read = jax.ShapeDtypeStruct((devices, devices, -(-size // devices)), jnp.int32)
        nodes, number, scale = types_of((devices, size), (devices, long), widths[0])
        found = case("parts", config, nodes, model.Parts(read, number, number, scale))
        yield replace(found, title=f"{title}\nin parts", mesh={"x": devices})
