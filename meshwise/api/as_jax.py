"""A function under `mw.jit` as `jax.jit` takes it: calls that are JAX's to run, or to refuse.

Where nothing names a mesh of several devices there is nothing to partition, and `jax.jit` runs the
function. And where meshwise cannot do what somebody wrote for `jax.jit`, JAX is asked: a program
that it accepts runs, partitioned by XLA, with a warning; one that it refuses as well is refused in
our words, by an error that is of both classes, or in JAX's where we could not plan it anyway.
Neither holds where words of our own were used (`mesh=`, `completion=`, `strict=`, `hardware=`,
`hoist_bytes=`, `schedule=`), nor where an `mw.shard` does not fit: XLA would run without it.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import Arguments
from meshwise.api.options import Choices, Options
from meshwise.errors import (
    FallbackWarning,
    HintError,
    MeshwiseError,
    NoMeshError,
    UnplannedError,
    also,
    message,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Where the frames between a user's call and a warning are.
_PACKAGES = tuple([str(Path(file).parent) for file in (_jax.__path__[0], jax.__file__)])


class AsJax:
    """What `jax.jit` makes of a function with the options that were given to `mw.jit`."""

    def __init__(self, name: str, fn: Callable[..., Any], options: Options):
        """Ask JAX nothing yet."""
        self.name = name
        self.fn = fn
        self.options = options

    @cached_property
    def jitted(self) -> Any:
        """The function under `jax.jit`. Raises what that does for such options."""
        named = [self._named(t) for t in (self.options.in_shardings, self.options.out_shardings)]
        return jax.jit(
            self.fn, in_shardings=named[0], out_shardings=named[1], **self.options.passed
        )

    @cached_property
    def _without_shardings(self) -> Any:
        return jax.jit(self.fn, **self.options.passed)

    @property
    def may_run(self) -> bool:
        """Whether everything that was said is said in JAX's words."""
        return self.options.mesh is None and self.options.choices == Choices()

    @property
    def _names_axes(self) -> bool:
        """Whether axes are named without a mesh."""
        said = jax.tree.leaves((self.options.in_shardings, self.options.out_shardings))
        return self.options.mesh is None and any(isinstance(s, PartitionSpec) for s in said)

    def mesh(self, arguments: Arguments) -> Any:
        """The first mesh of several devices that the function itself names; None if none.

        Raises what the function raises while it is traced.
        """
        if not self.may_run or self._names_axes:
            return None
        args, kwargs = arguments.call(arguments.leaves)
        closed = self.jitted.trace(*args, **kwargs).jaxpr
        return next((m for m in _jax.meshes_in(closed) if m.size > 1), None)

    @_jax.hides_frames
    def step_by_step(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the function itself, as under `jax.disable_jit`.

        What lies nowhere on purpose is on the mesh that was given, as what the function makes is.
        """
        mesh = self.options.mesh
        if isinstance(mesh, Mesh):
            args, kwargs = jax.tree.map(lambda leaf: _whole_on(mesh, leaf), (args, kwargs))
        with self._in_mesh():
            return self.fn(*args, **kwargs)

    def run(self, call: Call) -> tuple[Any, Any, bool]:
        """The results of a call, and what JAX's dispatch needs to repeat it."""
        args, kwargs = call
        with self._in_mesh():
            return _jax.call_anew(self.jitted, args, kwargs)

    def trace(self, call: Call) -> Any:
        """JAX's `Traced`, of the program and of what was said of it."""
        args, kwargs = call
        return _jax.traced_over(self._in_mesh, lambda: self.jitted.trace(*args, **kwargs))

    def trace_uneven(self, call: Call) -> Any:
        """The same; without shardings where one does not divide, which JAX refuses.

        Other mistakes in shardings are to be found before.
        """
        try:
            return self.trace(call)
        except ValueError:
            if not self.options.names_shardings:
                raise
        args, kwargs = call
        plain = self._without_shardings
        return _jax.traced_over(self._in_mesh, lambda: plain.trace(*args, **kwargs))

    def answer(self, refusal: MeshwiseError, ask: Callable[[], Any], is_first: bool = True) -> Any:
        """What JAX answers to a call that meshwise refuses; the refusal where JAX does so too."""
        is_ours = isinstance(refusal, HintError) and refusal.is_of_own_words
        if is_ours or (not self.may_run and not isinstance(refusal, NoMeshError)):
            raise refusal
        try:
            answer = ask()
        except Exception as theirs:
            if isinstance(theirs, MeshwiseError):
                raise
            if isinstance(refusal, NoMeshError) and not self._names_axes:
                raise
            if isinstance(refusal, UnplannedError):
                raise theirs from refusal  # what is theirs to do, they say what is wrong with
            raise also(refusal, type(theirs)) from theirs
        if is_first and not isinstance(refusal, NoMeshError):
            self.warn(refusal)
        return answer

    def clear_cache(self) -> None:
        """JAX forgets what it traced and compiled of the function."""
        self.jitted.clear_cache()

    def warn(self, refusal: MeshwiseError) -> None:
        """Say that XLA partitions a program, and why."""
        warnings.warn(
            message(
                f"{self.name} is partitioned by XLA instead of meshwise",
                [str(refusal).replace("\n", "\n    ")],
                "A program of jax.jit that meshwise cannot partition is left to jax.jit.",
                "Give mw.jit the mesh= to have it refused instead.",
            ),
            FallbackWarning,
            stacklevel=_level_of_caller(),
        )

    def _named(self, shardings: Any) -> Any:
        """Shardings with the mesh that was given, which JAX wants in each."""
        mesh = self.options.mesh

        def named(spec: Any) -> Any:
            return NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec

        if mesh is None:
            return shardings
        return jax.tree.map(named, shardings, is_leaf=lambda leaf: leaf is None)

    def _in_mesh(self) -> AbstractContextManager[None]:
        """The mesh that was given is the one in context, as in the user's function it is.

        A function of local arrays is one of the region that it is called in.
        """
        mesh = self.options.mesh
        return nullcontext() if mesh is None or _jax.manual_axes() else _jax.with_mesh(mesh)


def _whole_on(mesh: Mesh, leaf: Any) -> Any:
    """An array that nobody placed, on each device of a mesh; anything else as it is."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer)
    if not is_array or getattr(leaf, "committed", True):
        return leaf
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))


def _level_of_caller() -> int:
    """How many frames below the one that warns the first is that is neither ours nor JAX's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, level = frame.f_back, level + 1
    return level
