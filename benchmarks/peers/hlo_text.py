"""HLO text into data: a module of computations of instructions. Nothing is interpreted here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

ELEMENT = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[([\d,<=]*)\]")
COMPUTATION = re.compile(r"^\s*(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .*)?\{\s*$")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([^\s=(]+) = (.*)$")
REFERENCE = re.compile(r"%([^\s,(){}]+)")
ELEMENT_OF = re.compile(r"%([^\s,(){}]+)#(\d+)")  # a tuple's element, unnamed: XLA of jax 0.11
CALLED = re.compile(
    r"\b(?:condition|body|calls|to_apply|true_computation|false_computation)=%?([^\s,]+)"
)
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Shape:
    """One array: a dtype in HLO's letters ("f32") and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def size(self) -> int:
        """Bytes; what has no elements to speak of (tokens) has none."""
        if self.dtype in ("token", "opaque"):
            return 0
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return (self.elements * bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = shapes opcode(arguments), attributes`.

    `shapes` are the arrays of the result, a tuple's in order. `arguments` is the text between the
    parentheses: operands, a parameter's number, a constant's value.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(REFERENCE.findall(self.arguments))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls."""
        several = BRANCHES.search(self.attributes)
        branches = re.findall(r"%?([^\s,]+)", several[1]) if several else []
        return (*CALLED.findall(self.attributes), *(name.lstrip("%") for name in branches))

    def attribute(self, name: str) -> str | None:
        """The value of a simple attribute (`index=1`, `condition=%region`), or None."""
        found = re.search(rf"\b{name}=%?([^\s,]+)", self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """The path of JAX operations it comes from, "" where none is recorded."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that read each one."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by number."""
        every = self.instructions.values()
        return {int(i.arguments): i for i in every if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """Computations by name, the entry's name, and for how many devices the program is."""

    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    replicas: int

    @property
    def devices(self) -> int:
        return self.partitions * self.replicas


def parse_module(text: str) -> Module:
    """The module that `text` (of `as_text()`, or of a dump) describes."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", {}
    for line in text.splitlines():
        if name and line.strip().startswith("}"):
            computations[name] = Computation(name, lines)
            name = ""
        elif name and (found := INSTRUCTION.match(line)):
            instruction = parse_instruction(found[2], found[3], is_root=bool(found[1]))
            lines.update(_elements(instruction.arguments, lines))
            lines[instruction.name] = instruction
        elif not name and (found := COMPUTATION.match(line)):
            name, lines = found[2], {}
            entry = name if found[1] else entry
    return Module(
        computations,
        entry or next(reversed(computations), ""),
        _header(text, "num_partitions"),
        _header(text, "replica_count"),
    )


def _elements(arguments: str, known: Mapping[str, Instruction]) -> dict[str, Instruction]:
    """What reads the elements of tuples that arguments name as `%tuple#1`."""
    return {
        f"{made}#{place}": Instruction(
            f"{made}#{place}",
            "get-tuple-element",
            known[made].shapes[int(place) : int(place) + 1],
            f"%{made}",
            f", index={place}",
            is_root=False,
        )
        for made, place in ELEMENT_OF.findall(arguments)
    }


def parse_instruction(name: str, rest: str, *, is_root: bool = False) -> Instruction:
    """The instruction `name = rest`."""
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = parse_shapes(rest[:end])
    rest = rest[end:].strip()
    start = rest.index("(")
    stop = closing(rest, start)
    return Instruction(
        name, rest[:start], shapes, rest[start + 1 : stop], rest[stop + 1 :], is_root
    )


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Every array in a type, a tuple's in order; layouts are dropped, bounds are sizes."""
    return tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in ELEMENT.findall(text)
    )


def closing(text: str, start: int) -> int:
    """Where the parenthesis opened at `start` is closed, quoted text aside."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        letter = text[place]
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return place
    raise ValueError(f"no closing parenthesis in: {text[start : start + 80]}")


def _header(text: str, name: str) -> int:
    """A number in the module's first line, 1 where it is not said."""
    found = re.search(rf"^HloModule .*\b{name}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 1
