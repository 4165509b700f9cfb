"""Programs that are refused for their layouts, and words that several messages share."""

from typing import Any

import pytest

import meshwise as mw
from tests.meshes import mesh_of

ONE = mesh_of(d=4)
TWO = mesh_of(a=2, b=3)
L, R, S0, S1, T = mw.Local, mw.Replicated, mw.Sliced(0), mw.Sliced(1), mw.Unreduced("sum")
AB = ("a", "b")


def refused(mesh: Any, fn: Any, *args: Any, axes: Any = None, **layouts: Any) -> str:
    with pytest.raises(mw.LayoutError) as caught:
        mw.program(mesh, axes=axes, layouts=layouts)(fn).partition(*args)
    return str(caught.value).replace(
        f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}", "HERE"
    )


EVEN = (
    "A part is cut further, or joined in part, only where it divides: else parts of parts are no "
    "parts of the whole.\nUse another dim for one of the axes, or pad the dim."
)
GIVEN = "does not go with the layouts it is given:"
