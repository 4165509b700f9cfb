"""`mw.Schedule`: a per-device program, and the moves that change how it runs, one at a time."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwise._jax import Var, hides_frames_of_methods
from meshwise.api.meshes import platform_of
from meshwise.api.schedule_inputs import (
    names_of,
    number_of_bytes,
    refuse_no_text,
    refuse_others,
    refuse_taken_name,
    refuse_unknown_kind,
    whole_numbers,
)
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.states import own_state_names, state_of
from meshwise.cost.compute import program_work
from meshwise.cost.memory import peak_memory
from meshwise.errors import ArgumentError, IllegalMove, message
from meshwise.flatten import inline_calls
from meshwise.ir.mesh import Axes
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.report.schedules import compared, listing
from meshwise.schedule.handles import Handle, found, handle_of
from meshwise.schedule.moves.bucket import bucket
from meshwise.schedule.moves.fuse import fuse
from meshwise.schedule.moves.hoist import hoist
from meshwise.schedule.moves.merge import merge
from meshwise.schedule.moves.overlap import overlap
from meshwise.schedule.moves.reorder import reorder
from meshwise.schedule.moves.slice_state import slice_state
from meshwise.schedule.moves.split import Split, split, split_to_root
from meshwise.schedule.script import (
    Script,
    call_text,
    is_of_script,
    line_of_script,
    schedule_function,
)
from meshwise.schedule.view import View


def _partitioned(program: Any, args: Sequence[Any]) -> SpmdProgram:
    if not hasattr(program, "partition"):
        raise ArgumentError(
            message(
                "a schedule was asked for of what is no program",
                [f"{program!r:.60} is {type(program).__name__}"],
                "A schedule is one of an mw.SpmdProgram, or of what has `partition`, as mw.jit(f) "
                "and mw.program(f) have.",
                "Pass step.partition(*args), or step and its arguments.",
            )
        )
    try:
        inspect.signature(program).bind(*args)
    except ValueError:
        pass  # a builtin tells nobody what it takes; where it is called it says what it lacks
    except TypeError as lacking:
        raise ArgumentError(
            message(
                "a schedule was asked for of a function without its arguments",
                [f"{program!r:.60}: {lacking}"],
                "A program is of a function and of the types of its arguments.",
                "Pass step.partition(*args), or step and its arguments.",
            )
        ) from None
    return program.partition(*args)


@hides_frames_of_methods
class Schedule:
    """A program and the moves made on it (CoCoNeT, section 3). Each move keeps the values.

    `program` is any `SpmdProgram`: of `mw.jit(...).partition(...)`, of a `mw.program`, or
    `SpmdProgram.from_shard_map` of a function written by hand. A move takes handles, which `find`
    gives, and returns handles to what it made, or raises `IllegalMove` and changes nothing.

    >>> import jax
    >>> from jax.sharding import AbstractMesh, PartitionSpec as P
    >>> def step(g, w):
    ...     return w - 0.1 * jax.lax.psum(g[0], "data")
    >>> x = jax.ShapeDtypeStruct((64,), jax.numpy.float32)
    >>> gs = jax.ShapeDtypeStruct((8, 64), jax.numpy.float32)
    >>> mesh = AbstractMesh((8,), ("data",))
    >>> program = SpmdProgram.from_shard_map(step, mesh, (P("data"), P()), P(), gs, x)
    >>> s = Schedule(program)
    >>> scattered, gathered = s.split(s.find("all_reduce")[0])
    >>> s.reorder(gathered)
    [<all_gather f32[64] over data at unknown>]
    >>> print(s.script(), end="")
    def schedule(s):
        all_reduce = s.find('all_reduce')
        split = s.split(all_reduce[0])
        s.reorder(split[1])
    """

    def __init__(self, program: Any, *args: Any):
        """A schedule without moves; `args` are for what is still to be partitioned."""
        original = program if isinstance(program, SpmdProgram) else _partitioned(program, args)
        self.original: SpmdProgram = original
        per_device = original.per_device
        inlined = replace(per_device, jaxpr=inline_calls(per_device.jaxpr))
        self.view = self._unmoved = View(inlined)
        self.may_slice = own_state_names(original, self.view)
        self._script = Script()

    @property
    def program(self) -> SpmdProgram:
        """The program as it is now: run it, simulate it, look at it."""
        if self.view is self._unmoved:
            return self.original
        return self.original.with_per_device(self.view.program)

    @property
    def platform(self) -> str | None:
        """What the devices of the mesh are; None of a mesh without devices."""
        return platform_of(self.original.user_mesh)

    def find(
        self,
        kind: str | None = None,
        source: str | None = None,
        axes: str | Axes | None = None,
    ) -> list[Handle]:
        """Values by the equation that makes them, in order.

        `kind` is that of a collective (`all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`,
        `ppermute`), a primitive's name (`dot_general`), or the name of a fused equation; another
        one is an `ArgumentError`. `source` is a part of the user's line as `file.py:12`; `axes` are
        those that a collective goes over.
        """
        refuse_unknown_kind(kind, self.view)
        refuse_no_text("find", source=source)
        values = found(self.view, kind, source, self._axes(axes))
        name = self._script.name(kind or "found")
        options = {"source": source, "axes": axes}
        call = call_text("find", [kind] if kind else [], options)
        self._script.add(name, call)
        self._script.counts[call] = len(values)
        return self._handles(name, values)

    def mark(self) -> Any:
        """What `back_to` needs to undo the moves made from here on."""
        return self.view, self._script.copy()

    def back_to(self, mark: Any) -> None:
        """Undo all moves since a mark."""
        self.view, script = mark
        self._script = script.copy()

    def copy(self) -> "Schedule":
        """Another schedule with the same moves, to go on from in another way."""
        made = Schedule.__new__(Schedule)
        made.original, made.may_slice = self.original, self.may_slice
        made._unmoved = self._unmoved
        made.back_to(self.mark())
        return made

    def split(self, all_reduces: Any, dim: int | None = None, pad: bool = True) -> Any:
        """All_reduces, one or a list, as reduce_scatters along `dim` and all_gathers: a pair.

        By default along the first dim that divides. One that does not is padded, or refused with
        `pad=False`. Of one all_reduce the pair is of handles, of a list of lists.
        """
        (dim,) = whole_numbers("split", dim=dim)
        done = split(self.view, self._values(all_reduces), dim, pad)
        options = {"dim": dim, "pad": None if pad else 0}
        name = self._moved("split", [all_reduces], options, done.view)
        return self._pair(name, done, isinstance(all_reduces, Handle))

    def split_to_root(self, all_reduce: Handle, root: int = 0) -> tuple[Handle, Handle]:
        """An all_reduce as a reduce to one device and a broadcast from it, trees of ppermutes."""
        (number,) = whole_numbers("split_to_root", root=root)
        root = 0 if number is None else number
        done = split_to_root(self.view, self._value(all_reduce), root)
        name = self._moved("split_to_root", [all_reduce], {"root": root}, done.view)
        return self._pair(name, done, True)

    def reorder(
        self,
        all_gathers: Handle | Sequence[Handle],
        computations: Sequence[Handle] | None = None,
        more_bytes: bool = False,
    ) -> list[Handle]:
        """All_gathers after computations that read them; the gathers after them are returned.

        `computations` are by default all that can be done on tiles. Refused where more bytes would
        be gathered than before, unless `more_bytes`.
        """
        chosen = None if computations is None else self._values(computations)
        done = reorder(self.view, self._values(all_gathers), chosen, more_bytes)
        options = {"computations": computations, "more_bytes": more_bytes}
        name = self._moved("reorder", [all_gathers], options, done.view)
        return self._handles(name, done.gathers)

    def slice_state(
        self,
        names: str | Sequence[str],
        result: int | str | None = None,
        dim: int | None = None,
        axes: str | Axes | None = None,
        gathers: bool = False,
    ) -> None:
        """Keep arguments that a step makes anew in slices, and their next values too.

        `names` are paths of arguments (`m`, `args[1]['w']`, or their ends), `result` the position
        or path of the result that is the next value, where the program does not say. By default
        each is kept as the slice that is read of it. The caller's arrays are then sharded.
        """
        (dim,) = whole_numbers("slice_state", dim=dim)
        (number,) = whole_numbers("slice_state", result=None if isinstance(result, str) else result)
        place = result if isinstance(result, str) else number
        states = [state_of(self.original, name, place) for name in names_of("slice_state", names)]
        view = slice_state(self.view, states, dim, self._axes(axes), gathers)
        options = {"result": place, "dim": dim, "axes": axes, "gathers": gathers}
        self._moved("slice_state", [names], options, view)

    def fuse(
        self, values: Sequence[Handle], name: str | None = None, kernel: str | None = None
    ) -> list[Handle]:
        """Equations, and at most one collective among them, as one; what lies between comes along.

        A reduce_scatter, computations and an all_gather are one FusedAllReduce. By default XLA
        fuses; `kernel="pallas"` makes of such a one a kernel for TPUs (interpreted elsewhere).
        """
        refuse_taken_name(name, self.view)
        interpret = False if self.platform == "tpu" else None
        done = fuse(self.view, self._values(values), name, kernel, interpret)
        said = self._moved("fuse", [values], {"name": name, "kernel": kernel}, done.view)
        return self._handles(said, done.values)

    def overlap(
        self,
        values: Handle | Sequence[Handle],
        chunks: int | None = None,
        dim: int | None = None,
        operand: int | None = None,
        bidirectional: bool = False,
        keeps: bool = False,
    ) -> list[Handle]:
        """Communication and the computation next to it at the same time.

        A product (or the all_gather itself) becomes a ring with the all_gather of its operand, a
        reduce_scatter or all_reduce one with the product before it: n - 1 sends, in each of which
        a device computes with what it holds. With `chunks`, a chain of equations, collectives over
        several axes among them, is cut along `dim` in so many parts that follow each other.
        Returned are the new results; of an all_reduce the part of the sum, and the whole.
        """
        chunks, dim, operand = whole_numbers("overlap", chunks=chunks, dim=dim, operand=operand)
        given = self._values(values)
        one = given[0] if isinstance(values, Handle) else given
        done = overlap(self.view, one, chunks, dim, operand, bidirectional, keeps)
        options = {
            "chunks": chunks,
            "dim": dim,
            "operand": operand,
            "bidirectional": bidirectional,
            "keeps": keeps,
        }
        name = self._moved("overlap", [values], options, done.view)
        whole = () if done.whole is None else (done.whole,)
        return self._handles(name, [*done.values, *whole])

    def bucket(self, values: Sequence[Handle], max_bytes: int | None = None) -> list[Handle]:
        """Collectives of one kind as few, of at most `max_bytes` of operands each."""
        max_bytes = number_of_bytes("bucket", max_bytes)
        done = bucket(self.view, self._values(values), max_bytes)
        name = self._moved("bucket", [values], {"max_bytes": max_bytes}, done.view)
        return self._handles(name, done.values)

    def merge(self, value: Handle) -> list[Handle]:
        """Two collectives as one, by the result of the later one.

        Sums (gathers, scatters) in a row over several axes; a sum of which a device keeps its part
        as a reduce_scatter; a reduce_scatter and the all_gather of it as an all_reduce; the sum of
        two sums, by its own handle, as one.
        """
        done = merge(self.view, self._value(value))
        name = self._moved("merge", [value], {}, done.view)
        return self._handles(name, [done.value] if done.value in self.view.maker else [])

    def hoist(
        self, loop: Handle, max_bytes: int | None = None, more_bytes: bool = False
    ) -> list[Handle]:
        """The collectives of a `scan` that can leave it, out of it.

        Before the loop goes what is the same in all steps; after it go sums that steps only add to:
        each device carries its own. `max_bytes` bounds what is held through the loop in addition.
        What would send more bytes there than in all steps stays, unless `more_bytes`.
        """
        max_bytes = number_of_bytes("hoist", max_bytes)
        done = hoist(self.view, self._value(loop), max_bytes, more_bytes)
        options = {"max_bytes": max_bytes, "more_bytes": more_bytes}
        name = self._moved("hoist", [loop], options, done.view)
        return self._handles(name, [v for v in done.values if v in self.view.maker])

    def run(self, script: str | Callable[["Schedule"], Any]) -> "Schedule":
        """Make the moves of a script: a function of a schedule, or its text.

        One that does not fit, or fails, makes none of its moves.
        """
        moves, before = schedule_function(script), self.mark()
        try:
            moves(self)
        except BaseException as error:
            found = self._script.found()
            self.back_to(before)
            if not isinstance(error, IndexError) or not is_of_script(error):
                raise
            raise IllegalMove(
                message(
                    f"A script does not fit {self.original.name}",
                    [f"{line_of_script(error, script)}: {error}", *found],
                    "A script names values by what s.find finds, in order: another program has "
                    "others.",
                    "Print the schedule to see what there is.",
                )
            ) from error
        return self

    def script(self) -> str:
        """The moves made so far, as code that makes them again on the next trace."""
        return str(self._script)

    def diff(self) -> str:
        """Before and after: bytes sent, launches, flops, memory, and the collectives of both."""
        before = replace(self.original.per_device, jaxpr=inline_calls(self.original.jaxpr))
        return compared(self.original.name, self._figures(before), self._figures(self.view.program))

    def __str__(self) -> str:
        """The program's values, each with its layout."""
        return listing(self.view)

    def _figures(self, program: PerDeviceProgram) -> Any:
        sizes = program.mesh.axis_size
        donated = self.original.donated
        work = program_work(program.jaxpr, sizes)
        return program, work, peak_memory(program.jaxpr, sizes, donated=donated)

    def _axes(self, axes: str | Axes | None) -> Axes | None:
        """The program's axes for those the user names."""
        if axes is None:
            return None
        named = names_of("a schedule", axes)
        mesh = self.view.mesh
        unknown = [a for a in named if a not in mesh.names and a not in mesh.sub_axes]
        if unknown:
            raise ArgumentError(
                message(
                    "A schedule was asked for axes that its mesh has not",
                    unknown,
                    f"The program's mesh has the axes {', '.join(mesh.names)}.",
                    "Name axes of the mesh.",
                )
            )
        return tuple(x for a in named for x in (mesh.sub_axes.get(a) or (a,)))

    def _value(self, handle: Handle) -> Var:
        refuse_others([handle])
        if handle.value not in self.view.maker:
            raise IllegalMove(
                message(
                    "A move was asked for a value that is not in this schedule's program",
                    [repr(handle)],
                    "A move replaces equations; handles to them do not go on, nor do those of one "
                    "schedule to another.",
                    "Take the handles that the move returned, or find the value again.",
                )
            )
        return handle.value

    def _values(self, handles: Handle | Sequence[Handle]) -> list[Var]:
        given: list[Any] = list(handles) if isinstance(handles, list | tuple) else [handles]
        refuse_others(given)
        return [self._value(h) for h in given]

    def _moved(self, move: str, args: Sequence[Any], options: dict[str, Any], view: View) -> str:
        """Note a move; the name that the script gives what it made."""
        name = self._script.name(move)
        self._script.add(name, call_text(move, args, options))
        self.view = view
        return name

    def _handles(self, name: str, values: Sequence[Var]) -> list[Handle]:
        count = len(values)
        return [handle_of(self.view, v, f"{name}[{i}]", count) for i, v in enumerate(values)]

    def _pair(self, name: str, done: Split, is_one: bool) -> Any:
        """The two halves of what was split."""
        if not is_one:
            return self._handles(f"{name}[0]", done.firsts), self._handles(
                f"{name}[1]", done.seconds
            )
        first, second = self._handles(name, [*done.firsts, *done.seconds])
        return first, second
