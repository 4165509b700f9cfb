"""The moves of a schedule as code that makes them again, on the next trace of the program."""

import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from traceback import walk_tb
from typing import Any

from meshwise.errors import ArgumentError, message
from meshwise.schedule.handles import Handle


@dataclass
class Script:
    """Lines of code, each the name it gives to what it finds or makes, and the call."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)  # how many values which call found

    def copy(self) -> "Script":
        """The same lines, to be gone on with in another way."""
        return Script(list(self.lines), set(self.names), dict(self.counts))

    def name(self, what: str) -> str:
        """A name that was not given before: that of what it is, else with the next free number."""
        base = re.sub(r"\W|^(?=\d)", "_", what)
        if keyword.iskeyword(base) or base == "s":  # the schedule is called that
            base += "_"
        numbered = (f"{base}_{number}" for number in count(2))
        name = next(n for n in chain([base], numbered) if n not in self.names)
        self.names.add(name)
        return name

    def add(self, name: str, call: str) -> None:
        """One more line."""
        self.lines.append((name, call))

    def found(self) -> list[str]:
        """What was looked for, and how much of it was there, in words."""
        return [f"{call} finds {count or 'none'}" for call, count in self.counts.items()]

    def __str__(self) -> str:
        """A function of the schedule; what was found and not used is left out."""
        needed: list[str] = []
        for k, (name, call) in enumerate(self.lines):
            later = " ".join(text for _, text in self.lines[k + 1 :])
            is_read = (
                bool(name) and re.search(rf"(?<![\w.'\"]){re.escape(name)}\b", later) is not None
            )
            if call.startswith("s.find(") and not is_read:
                continue
            needed.append(f"    {name} = {call}" if is_read else f"    {call}")
        return "\n".join(["def schedule(s):", *(needed or ["    pass"])]) + "\n"


def written(value: Any) -> str:
    """An argument of a move as code: handles by their names, anything else as Python writes it."""
    if isinstance(value, Handle):
        return value.expression
    if isinstance(value, list | tuple) and any(isinstance(v, Handle) for v in value):
        whole = _all_of_one(value)
        return whole or f"[{', '.join(map(written, value))}]"
    return repr(value)


def _all_of_one(handles: Sequence[Any]) -> str | None:
    """The name of a result all of whose values are given, in their order."""
    parts = [h.expression.rpartition("[") for h in handles if isinstance(h, Handle)]
    names = {name for name, _, _ in parts}
    numbers = [f"{n}]" for n in range(len(handles))]
    complete = len(parts) == len(handles) and [end for _, _, end in parts] == numbers
    name = names.pop() if len(names) == 1 else ""
    count = getattr(handles[0], "siblings", None)
    return name if complete and name and count == len(handles) else None


def call_text(move: str, args: Iterable[Any], options: dict[str, Any]) -> str:
    """A move as code, options that were not given left out."""
    said = [written(a) for a in args]
    said += [f"{k}={written(v)}" for k, v in options.items() if v is not None and v is not False]
    return f"s.{move}({', '.join(said)})"


def schedule_function(script: Any) -> Callable[[Any], Any]:
    """The function that a script is: itself, or what its text defines as `schedule`."""
    if callable(script):
        return script
    names: dict[str, Any] = {}
    problem = ""
    if isinstance(script, str):
        try:
            exec(compile(script, "<schedule>", "exec"), names)
        except Exception as error:
            problem = f": {type(error).__name__}: {error}"
    if not callable(names.get("schedule")):
        raise ArgumentError(
            message(
                "A schedule is no script",
                [f"{script!r:.80}{problem}"],
                "A script is a function of a schedule that makes moves, or the text of one that is "
                "called `schedule`, as Schedule.script() prints it.",
                'Give one of the two; of mw.jit schedule="auto" finds one.',
            )
        )
    return names["schedule"]


def line_of_script(error: BaseException, script: Any) -> str:
    """The line of a script that an error was raised at: its text where the script is text."""
    frame, line = [*walk_tb(error.__traceback__)][-1]
    if isinstance(script, str):
        return script.splitlines()[line - 1].strip()
    return f"{frame.f_code.co_filename}:{line}"


def is_of_script(error: BaseException) -> bool:
    """Whether an error that `Schedule.run` meets was raised by the script, and not by a move."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    package = __name__.partition(".")[0]
    return all(name.partition(".")[0] != package for name in frames[1:])  # the first is run's own
