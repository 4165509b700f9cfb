"""Pallas, loaded when the first kernel is made: it takes as long as all of this package."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name: str) -> Any:
        """A name of the module that this one stands for."""
        return getattr(importlib.import_module("jax.experimental.pallas"), name)
