"""Train a graph convolutional network on one device and on eight, and plan it for thousands.

    python -m examples.gcn [--steps N] [--metis]

The graph is Zachary's karate club. The two who quarrelled are labelled; the network finds with
whom each of the others went.
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.gcn import graphs, hints, model
from examples.sizes import show_sizes

DEVICES = 8


def club() -> tuple[model.Nodes, model.Edges]:
    """The karate club: a feature for each member, and the two who quarrelled labelled."""
    pairs, sides = graphs.karate()
    count = len(sides)
    known = np.isin(np.arange(count), (0, count - 1))
    nodes = model.Nodes(
        np.eye(count, dtype=np.float32), sides.astype(np.int32), known.astype(np.float32)
    )
    return nodes, graphs.normalised(pairs, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    parser.add_argument("--metis", action="store_true", help="cut the graph by METIS (pymetis)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    nodes, edges = club()
    cut = graphs.metis if options.metis else graphs.blocks
    part = cut(graphs.karate()[0], len(nodes.classes), DEVICES)
    parts, places = graphs.in_parts(edges, part)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), config))
    given = {name: (nodes, edges) for name in hints.SCHEMES}
    given["parts"] = (graphs.placed(nodes, places, DEVICES), parts)
    single = None
    rows = []
    for name, data in given.items():
        case = hints.case(name, config, *data)
        with console.status(f"{case.title}, on {case.devices} devices"):
            steps = [data] * options.steps
            single = single or run(jax.jit(case.step), params, steps, trained)
            rows.append(measure(case, params, steps, single.state))
    found = np.asarray(model.forward(single.state, nodes.features, edges)).argmax(-1)
    right = int((found == nodes.classes).sum())
    console.print(
        runs_table(
            rows,
            f"{options.steps} steps; one device's loss goes from {single.figures[0]:.4f} to "
            f"{single.figures[-1]:.6f}, and {right} of {len(found)} members are placed right",
        )
    )
    show_sizes(
        console, hints.large_cases(), "In parts: each reads as many nodes of the others as it has."
    )


if __name__ == "__main__":
    main()
