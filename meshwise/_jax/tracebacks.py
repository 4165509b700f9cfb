"""Tracebacks of errors without frames of this package and of JAX, as JAX's functions leave them.

What `JAX_TRACEBACK_FILTERING` says of JAX's own frames (whether they are hidden, and how) holds for
ours, and so it does of the line of the user's that an equation or a trace comes of.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util

_Fn = TypeVar("_Fn", bound=Callable)
_Class = TypeVar("_Class", bound=type)

_PACKAGE = str(Path(__file__).parents[1])
_traceback_util.register_exclusion(_PACKAGE)
# Nor is a line of ours one that JAX names, in its errors and in what it says of its caches.
_source_info_util.register_exclusion(_PACKAGE + os.sep)


def hides_frames(fn: _Fn) -> _Fn:
    """A function whose errors show the frames of its caller and of what the user wrote alone."""

    @functools.wraps(fn)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            _hide(error)
            raise

    return outermost  # pyright: ignore[reportReturnType]


def hides_frames_of_methods(cls: _Class) -> _Class:
    """The same of all functions by which users use a class."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or name[0] != "_"):
            setattr(cls, name, hides_frames(method))
    return cls


def _hide(error: Exception) -> None:
    mode = _traceback_util._filtering_mode()
    if mode == "tracebackhide":
        _traceback_util._add_tracebackhide_to_hidden_frames(error.__traceback__)
    elif mode != "off" and error.__traceback__ is not None:
        error.with_traceback(_traceback_util.filter_traceback(error.__traceback__))
