"""The layouts of a function's parameters: given by name, or in their annotations."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax

from meshwise.errors import LayoutError, message
from meshwise.schedule.language.specs import is_spec


def layouts_of(
    fn: Callable[..., Any],
    signature: inspect.Signature,
    given: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """Each parameter's layout, or tree of layouts: what is given, else its annotation.

    That of the result is called `return`.
    """
    declared = {p: d.annotation for p, d in signature.parameters.items()}
    declared["return"] = signature.return_annotation
    unknown = [p for p in given if p not in declared]
    if unknown:
        raise LayoutError(
            message(
                f"layouts= of {name} names parameters that it does not have",
                unknown,
                f"Its parameters are {', '.join(signature.parameters)}; 'return' is its result.",
                "Give layouts by the names of parameters.",
            )
        )
    found = dict(given)
    for parameter, annotation in declared.items():
        if parameter in given or annotation is inspect.Signature.empty:
            continue
        is_text = isinstance(annotation, str)
        layout = _layout_in(_evaluated(fn, annotation, parameter, name) if is_text else annotation)
        if layout is not None:
            found[parameter] = layout
    return found


def _evaluated(fn: Callable[..., Any], text: str, parameter: str, name: str) -> Any:
    """An annotation that is written as text, as all are under `from __future__ annotations`."""
    inner = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inner.func
    scope: dict[str, Any] = dict(getattr(inner, "__globals__", {}))
    try:
        scope.update(inspect.getclosurevars(inner).nonlocals)
    except (TypeError, ValueError):  # no Python function, or one that reads what is not made yet
        pass
    try:
        return eval(text, scope)
    except Exception as problem:
        raise LayoutError(
            message(
                f"The annotation of {parameter} of {name} cannot be read",
                [f"{text}: {problem}"],
                "Annotations that are text are read where the function is defined in its module; "
                "names of a function around it are not seen there unless it uses them.",
                f"Give the layout as mw.program(mesh, layouts={{{parameter!r}: ...}}).",
            )
        ) from None


def _layout_in(annotation: Any) -> Any:
    """The layout, or tree of them, that an annotation is or holds; None where it is a type."""
    if typing.get_origin(annotation) is typing.Annotated:
        return next(filter(_says_layout, annotation.__metadata__), None)
    return annotation if _says_layout(annotation) else None


def _says_layout(annotation: Any) -> bool:
    leaves = jax.tree.leaves(annotation)
    return bool(leaves) and any(is_spec(leaf) for leaf in leaves)
