"""Step shallow water on one device and on eight, and plan it for thousands.

python -m examples.stencil [--steps N]
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from examples.beside import measure, run, runs_table, terminal
from examples.sizes import show_sizes
from examples.stencil import hints, model

COLUMNS, LINES = 96, 24  # of the picture, in characters; a character shows two cells


def stepped(config: model.Config, state: Any) -> tuple[Any, float]:
    """A step's result is the next state; the figure is its energy."""
    return state, float(model.energy(model.State(*map(np.asarray, state)), config))


def picture(height: np.ndarray) -> Text:
    """The water from above: red where it is high, blue where it is low."""
    rows = np.linspace(0, height.shape[0] - 1, 2 * LINES).round().astype(int)
    columns = np.linspace(0, height.shape[1] - 1, COLUMNS).round().astype(int)
    shown = np.clip(height[np.ix_(rows[::-1], columns)] / 0.6, -1, 1)

    def colour(value: float) -> str:
        rest = round(235 * (1 - abs(value)))
        return f"rgb(235,{rest},{rest})" if value > 0 else f"rgb({rest},{rest},235)"

    found = Text()
    for upper, lower in zip(shown[::2], shown[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            found.append("▀", f"{colour(above)} on {colour(below)}")
        found.append("\n")
    return found


def show(console: Console, state: Any, title: str) -> None:
    """The height of the water, where colours can be seen."""
    if console.is_terminal:
        console.print(f"\n{title}")
        console.print(picture(np.asarray(state[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="time steps (default: 400)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    start = jax.tree.map(np.asarray, model.init(config))
    uneven = replace(config, rows=config.rows - 5, columns=config.columns - 5)
    data: list[tuple[()]] = [()] * options.steps
    show(console, start, "The water at rest")
    rows = []
    for chosen in (config, uneven):
        begin = jax.tree.map(np.asarray, model.init(chosen))
        names = hints.SCHEMES if chosen is config else ["tiles"]
        cases = [hints.case(name, chosen) for name in names]
        single = run(jax.jit(cases[0].step), begin, data, partial(stepped, chosen))
        for case in cases:
            size = f"{chosen.rows} x {chosen.columns}"
            with console.status(f"{case.title} of {size}, on {case.devices} devices"):
                titled = replace(case, title=f"{case.title}\nof {size}")
                rows.append(measure(titled, begin, data, single.state, partial(stepped, chosen)))
        show(console, single.state, f"After {options.steps} steps, {size}")
    console.print(runs_table(rows, f"{options.steps} steps of shallow water", "energy"))
    caption = "Float32. A device sends the edges of its tile, however large the machine is."
    show_sizes(console, hints.large_cases(), caption)


if __name__ == "__main__":
    main()
