"""What calls of one function under `mw.jit` come to: programs, kept, or `jax.jit`'s answer."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import (
    Arguments,
    argument_paths,
    leaf_key,
    refuse_structs,
    take_apart,
)
from meshwise.api.as_jax import AsJax
from meshwise.api.autotune import scheduled
from meshwise.api.build import (
    Resolved,
    TracedCall,
    build,
    circumstances,
    donated_leaves,
    in_specs_of,
    planning,
    resolve,
    traced,
)
from meshwise.api.calibrate import figures_of
from meshwise.api.deleted import base_of, refuse_gone
from meshwise.api.meshes import lies_as, placement_of
from meshwise.api.options import Options
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.transform import Runner, call_in_trace
from meshwise.cost.hardware import GENERIC
from meshwise.errors import MeshwiseError, NoMeshError, forgotten
from meshwise.schedule.handles import type_key


@dataclass(frozen=True)
class _Kept:
    """What earlier calls made: programs by the call, by what it says, and for traces, by mesh."""

    programs: dict[Any, SpmdProgram | MeshwiseError] = field(default_factory=dict)
    shared: dict[Any, SpmdProgram] = field(default_factory=dict)
    runners: dict[Any, Runner] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)  # by id, what donating programs hold


@_jax.kept_with_function
def _kept(_: Callable[..., Any], __: Any) -> _Kept:
    """One for each function and each way to partition it, until `jax.clear_caches`."""
    return _Kept()


@dataclass(frozen=True)
class Answer:
    """Results of a call, and the program that made them.

    Where `program` is None it was `jax.jit` or a trace, and `as_jax` what JAX's dispatch needs to
    repeat the call, and whether it is to come back.
    """

    outs: Any
    program: SpmdProgram | None = None
    as_jax: tuple[Any, bool] = (None, False)


class Calls:
    """The calls of a function, as `options` say."""

    def __init__(self, name: str, fn: Callable[..., Any], options: Options):
        """Nothing is traced yet."""
        self.name = name
        self.fn = fn
        self.options = options
        self._as_jax = AsJax(name, fn, options)
        self.step_by_step = self._as_jax.step_by_step

    def partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        arguments = take_apart(self.options, args, kwargs)
        if not arguments.can_be_keys:
            self._as_jax.trace((args, kwargs))  # raises: JAX says which has no hash
        key = self._key(arguments)
        known = self._kept.programs.get(key)
        if isinstance(known, SpmdProgram):
            return known
        made = self._kept.programs[key] = self._program_of_hints(arguments)
        return made

    def read(self, *args: Any) -> tuple[Arguments, Resolved, TracedCall]:
        """A call taken apart, what it says, and its function as a jaxpr."""
        arguments = take_apart(self.options, args, {})
        resolved = resolve(self.name, self.options, arguments, self._as_jax.mesh)
        return arguments, resolved, traced(self.name, self.fn, self.options, arguments, resolved)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`jax.stages.Traced` for some arguments; lowering it partitions."""
        call = args, kwargs
        arguments = take_apart(self.options, args, kwargs).abstract()
        if self._is_jaxs(arguments):
            return self._as_jax.trace(call)
        try:
            resolve(self.name, self.options, arguments, self._as_jax.mesh)
        except MeshwiseError as refusal:
            traced = self._as_jax.answer(refusal, lambda: self._as_jax.trace(call), False)
            if isinstance(refusal, NoMeshError):
                return traced
        else:
            traced = self._as_jax.trace_uneven(call)
        as_here = _jax.settings_of_here()

        def lower(platforms: Any, parameters: Any) -> Any:
            with as_here():  # the same program, whatever is set by then
                return self._lowered(arguments, traced, platforms, parameters)

        return _jax.traced_with(traced, lower)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An error where buffers that a call reads are gone, or donated and read elsewhere."""
        arguments = take_apart(self.options, args, kwargs)
        has_none = self._is_traced(arguments) or not arguments.can_be_keys
        known = None if has_none else self._kept.programs.get(self._key(arguments))
        if isinstance(known, SpmdProgram):
            return known.look(arguments.leaves)
        donated = donated_leaves(self.options, arguments)
        paths = functools.partial(argument_paths, arguments)
        refuse_gone(self.name, arguments.leaves, paths, donated)

    def held(self) -> Collection[Any]:
        """Arrays that must not be donated, as programs that donate hold them."""
        return self._kept.held.values()

    def answer(self, arguments: Arguments) -> Answer:
        """The results of a call, and what made them."""
        try:
            return self._answer(arguments)
        except (RuntimeError, ValueError):
            self.look(*arguments.call(arguments.leaves))
            raise

    def _answer(self, arguments: Arguments) -> Answer:
        def as_jax() -> Answer:
            outs, fast, comes_back = self._as_jax.run(arguments.call(arguments.leaves))
            return Answer(outs, as_jax=(fast, comes_back))

        if self.options.is_for_one_device:
            return as_jax()
        if self._is_traced(arguments):
            runners = self._kept.runners
            try:
                outs = call_in_trace(self.name, self.fn, self.options, arguments, runners)
            except MeshwiseError as refusal:
                return self._as_jax.answer(refusal, as_jax)
            return Answer(outs)
        refuse_structs(self.name, arguments)
        key, programs = self._key(arguments), self._kept.programs
        found = programs.get(key)
        if found is None and _jax.is_tracing_forbidden():
            return as_jax()
        found = found or self._found(arguments, is_compiled=True)
        if isinstance(found, MeshwiseError):
            answer = self._as_jax.answer(found, as_jax, is_first=key not in programs)
            programs[key] = forgotten(found)
            return answer
        programs[key] = found
        if found.held and found.donated:
            found.look(arguments.leaves)
            self._kept.held.update((id(x), base_of(x)) for x in found.held)
        if self._as_jax.may_run and found.user_mesh.size == 1:
            return as_jax()
        try:
            outs = found.executable(arguments.leaves)
        except _jax.InternalNanError as nan:  # JAX finds the operator that made it
            if found.executable.is_of_processes:  # not where others would have to take part
                raise FloatingPointError(
                    f"invalid value ({nan.ty}) in the results of {nan.name}"
                ) from None
            if not found.executable.is_uneven:
                return as_jax()
            _jax.raise_where_found(nan, self.step_by_step, *arguments.call(arguments.leaves))
        return Answer(jax.tree.unflatten(found.out_tree, outs), found)

    def clear(self) -> None:
        """Forget all programs, and JAX what it traced."""
        self._as_jax.clear_cache()
        _kept.evict_weakref(self.fn)

    def _lowered(self, arguments: Arguments, traced: Any, platforms: Any, parameters: Any) -> Any:
        """`jax.stages.Lowered` of a traced call."""

        def as_jax() -> Any:
            return _jax.lower_flat(traced, platforms, parameters)

        found = self._found(arguments, is_compiled=False)
        if isinstance(found, MeshwiseError):
            return self._as_jax.answer(found, as_jax)
        if self._as_jax.may_run and found.user_mesh.size == 1:
            return as_jax()
        executable = found.executable
        flat = executable.lower_for(platforms, parameters)
        runs_here = platforms is None and parameters is None and executable.is_all_that_calls_run
        compiled = executable.compile if runs_here else None
        return _jax.with_trees(flat, traced, found if executable.is_uneven else None, compiled)

    def _is_traced(self, arguments: Arguments) -> bool:
        return _jax.is_tracing() or any(isinstance(x, _jax.Tracer) for x in arguments.leaves)

    def _is_jaxs(self, arguments: Arguments) -> bool:
        """Whether a call ahead of time is JAX's: for a chosen device, or of traced arguments."""
        return self.options.is_for_one_device or self._is_traced(arguments)

    @property
    def _kept(self) -> _Kept:
        return _kept(self.fn, self.options.key)

    def _key(self, arguments: Arguments) -> Any:
        """Equal for calls that one program serves."""
        return (
            arguments.key,
            self.options.mesh or _jax.context_mesh() or _jax.block_mesh(),
            circumstances(self.options.choices),
            tuple([leaf_key(leaf) for leaf in arguments.leaves]),
        )

    def _found(self, arguments: Arguments, is_compiled: bool) -> SpmdProgram | MeshwiseError:
        """The program for some arguments, or why there is none."""
        try:
            program = self._program_of_hints(arguments)
            if is_compiled:
                with planning(self.name):
                    program.executable.compile()
            return program
        except MeshwiseError as refusal:
            return refusal

    def _scheduled(self, program: SpmdProgram) -> SpmdProgram:
        """A program after the moves that were asked for."""
        choices = self.options.choices
        said = choices.hardware if choices.hardware is not GENERIC else None
        figures = None if said is None else figures_of(said, program.user_mesh)
        with _jax.promoting():
            return scheduled(program, choices.schedule, figures)

    def _program_of_hints(self, arguments: Arguments) -> SpmdProgram:
        """The program for what a call says, shared by calls whose arguments come from elsewhere.

        The second step of a training loop gets the first one's results where that got arrays of
        the host: the hints are the same, and so is the program.
        """
        resolved = resolve(self.name, self.options, arguments, self._as_jax.mesh)
        key, shared = self._shared_key(arguments, resolved), self._kept.shared
        if key not in shared:
            program = self._of_open_states(arguments, resolved)
            shared[key] = program or self._made(arguments, resolved)
        return shared[key]

    def _shared_key(self, arguments: Arguments, resolved: Resolved) -> Any:
        return arguments.key, circumstances(self.options.choices), resolved.key

    def _made(self, arguments: Arguments, resolved: Resolved) -> SpmdProgram:
        """The program for exactly what is said, with the moves that were asked for."""
        key, shared = self._shared_key(arguments, resolved), self._kept.shared
        if key not in shared:
            program = build(self.name, self.fn, self.options, arguments, resolved)
            shared[key] = self._scheduled(program)
        return shared[key]

    def _of_open_states(self, arguments: Arguments, resolved: Resolved) -> SpmdProgram | None:
        """The program of a schedule that lays the state of a call just as it lies, unasked.

        The second step of a loop gets state in the slices that the first one's schedule made: they
        are no hint, and the schedule moves what lies open. Whether a call is such a step is asked
        of its arguments alone, so that its program does not depend on what was called before: on
        all processes of a mesh it must be the same.
        """
        opened = self._open_states(arguments, resolved)
        while not all(placement.is_fully_replicated for placement in opened.values()):
            specs = [None if i in opened else s for i, s in enumerate(resolved.in_specs)]
            try:
                program = self._made(arguments, replace(resolved, in_specs=specs))
            except MeshwiseError:  # as it lies it may have one
                return None
            wanted = program.placements[0][len(program.held) :]
            kept = {i: p for i, p in opened.items() if lies_as(arguments.leaves[i], wanted[i])}
            if len(kept) == len(opened):
                return program
            opened = kept  # where others lie is their owner's word
        return None

    def _open_states(self, arguments: Arguments, resolved: Resolved) -> dict[int, Any]:
        """Arguments that may be state that a schedule laid, and how they lie.

        That is what no hint says anything of, nor of a result of its type.
        """
        if self.options.choices.schedule is None:
            return {}
        said = in_specs_of(self.name, self.options, arguments)
        places = enumerate(
            zip(said, resolved.types, map(placement_of, arguments.leaves), strict=True)
        )
        opened = {
            i: placement
            for i, (spec, kind, placement) in places
            if spec is None and kind.sharding is None and placement is not None
        }
        if all(placement.is_fully_replicated for placement in opened.values()):
            return {}
        call = traced(self.name, self.fn, self.options, arguments, resolved)
        results = zip(call.out_avals, call.out_specs, strict=True)
        made = {type_key(aval) for aval, spec in results if spec is None}
        return {i: p for i, p in opened.items() if type_key(resolved.types[i]) in made}
