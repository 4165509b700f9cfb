"""Residuals: of what one loop stacks for another, no more than the other cannot make of the rest.

The forward loop of a gradient stacks what the backward loop reads, a row in every step: `tanh(x)`,
and `1 - tanh(x)` as well, which nothing else reads. Rows that are made of others are not held: the
loop that reads them makes them, of one row at a time.

What nothing else reads is made as often as before. What its own loop reads too is made twice, where
that is little beside the work of both. What a barrier holds back (`jax.checkpoint`) stays as it is,
and so does what is hinted.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from meshwise import _jax
from meshwise._jax import Control, JaxprEqn, Literal, Var
from meshwise.ir.bodies import is_visible, scopes
from meshwise.ir.operators import (
    ADDITIONS,
    ELEMENTWISE,
    PRODUCTS,
    RESHAPES,
    SPREADS,
    TURNS,
    is_among,
)
from meshwise.ir.program import bytes_of, shape_of, type_of

# Operators that the loop that reads a row makes it by, in place of the one that stacked it.
_MOVED = ELEMENTWISE | SPREADS | RESHAPES | TURNS
# Those of them that take about as long as to read a row.
_CHEAP = ADDITIONS | frozenset(
    """
    abs and broadcast_in_dim clamp convert_element_type copy copy_p div eq expand_dims ge gt
    integer_pow le lt max min mul ne neg not one_minus_square or reshape select_n sign square
    squeeze xor
    """.split()
)
_MOST_POWER = 3  # of an integer power that is cheap
# So much of the work of both loops may be done twice.
_TWICE = 0.01


def remake_residuals(eqns: list[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations, in which no loop stacks what the loops that read it can make of other rows."""
    if not any(eqn.primitive is _jax.step_p for eqn in eqns):
        return eqns
    program = _Stacks(_with_next_stacked(eqns), outputs)
    for mark in program.last_first():
        program.consider(mark)
    for index, eqn in enumerate(program.eqns):
        if eqn.primitive is _jax.next_p:
            program.carry_back(index)
    return program.equations()


def _with_next_stacked(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """The equations, with stacks of what is carried on, where what was carried is stacked.

    Rows may be made of those as well, which are not held: see `carry_back`. What is read of none
    is dead.
    """
    stacked = {eqn.invars[0] for eqn in _marks(eqns, _jax.stack_p)}
    added: dict[Control, list[JaxprEqn]] = defaultdict(list)
    for eqn in _marks(eqns, _jax.next_p):
        old, new = eqn.invars
        if old in stacked and not isinstance(new, Literal) and new not in stacked:
            control = eqn.params["control"]
            rows = _jax.ShapedArray((control.trips, *shape_of(new)), type_of(new).dtype)
            stack = _jax.new_var(rows)
            added[control].append(_jax.new_mark(_jax.stack_p, [new], [stack], control))
            stacked.add(new)
    found: list[JaxprEqn] = []
    for eqn in eqns:
        if eqn.primitive is _jax.close_p:
            found += added[eqn.params["control"]]
        found.append(eqn)
    return found


def _marks(eqns: Sequence[JaxprEqn], primitive: Any) -> list[Any]:
    """Marks of one kind whose first operand is no number."""
    marks = (eqn for eqn in eqns if eqn.primitive is primitive)
    return [eqn for eqn in marks if not isinstance(eqn.invars[0], Literal)]


@dataclass
class _Loop:
    """A loop, the rows that it reads, and what is added to it: marks, and equations of its body."""

    control: Control
    open: int
    body: int
    work: int = 0
    twice: int = 0  # of its work what other loops do again, and of theirs what it does
    rows: dict[Var, Var] = field(default_factory=dict)  # of each stack that it reads its row
    steps: dict[Var, int] = field(default_factory=dict)  # where it read them
    made: dict[Var, Var] = field(default_factory=dict)  # of values of other loops its own
    equations: list[tuple[int, JaxprEqn]] = field(default_factory=list)  # with where they stood
    carried: dict[Var, tuple[Var, Var]] = field(default_factory=dict)  # see `carry_back`


@dataclass(frozen=True)
class _Recipe:
    """How rows of a stack are made: the equations, by where they stand, and stacks that they read.

    `rows` tells of each value that is a row of a stack which.
    """

    equations: list[int]
    rows: dict[Var, Var]


class _Stacks:
    """A program, and what becomes of its stacks."""

    def __init__(self, eqns: list[JaxprEqn], outputs: Sequence[Any]) -> None:
        self.eqns: list[Any] = eqns  # JAX types what they read too loosely for a checker
        self.scopes = scopes(eqns)
        self.makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.results = {a for a in outputs if not isinstance(a, Literal)}
        self.removed: set[int] = set()
        self.read_at: dict[Var, set[int]] = defaultdict(set)  # but for rows
        self.loops: dict[Control, _Loop] = {}
        self.readers: dict[Var, list[_Loop]] = defaultdict(list)  # of each stack
        self.stack_of: dict[Var, int] = {}  # the mark that stacks a value of its loop's body
        self._read_program()

    def _read_program(self) -> None:
        opened: dict[Control, int] = {}
        for index, eqn in enumerate(self.eqns):
            control = eqn.params.get("control")
            if eqn.primitive is _jax.open_p:
                opened[control] = index
            elif eqn.primitive is _jax.body_p:
                self.loops.setdefault(control, _Loop(control, opened[control], index))
            work = _work(eqn)
            for position in self.scopes[index]:
                if self.eqns[position].primitive is _jax.body_p:
                    self.loops[self.eqns[position].params["control"]].work += work
            held = [a for a in eqn.invars if not isinstance(a, Literal)]
            if eqn.primitive is not _jax.step_p:
                for atom in held:
                    self.read_at[atom].add(index)
            if eqn.primitive is _jax.stack_p and held and self._loop_of(held[0]) is control:
                self.stack_of[held[0]] = index
        for index, eqn in enumerate(self.eqns):
            if eqn.primitive is _jax.step_p and not isinstance(eqn.invars[0], Literal):
                stack, loop = eqn.invars[0], self.loops[eqn.params["control"]]
                loop.rows[stack], loop.steps[stack] = eqn.outvars[0], index
                self.readers[stack].append(loop)

    def _loop_of(self, value: Var) -> Control | None:
        """The loop in whose body a value is made, or which carries it."""
        made = self.makers.get(value)
        if made is None or not self.scopes[made]:
            return None
        return self.eqns[self.scopes[made][-1]].params["control"]

    def last_first(self) -> list[int]:
        """The marks of all stacks, from that of the value that is made last on."""
        return [
            self.stack_of[value]
            for value in sorted(self.stack_of, key=lambda value: -self.makers[value])
        ]

    def consider(self, mark: int) -> None:
        """Let the loops that read a stack make its rows, where no more is held for it."""
        (stack,) = self.eqns[mark].outvars
        readers = self.readers[stack]
        around = self.scopes[mark]
        if not readers or self.read_at[stack] or stack in self.results:
            return
        if any(self.scopes[loop.open][:-1] != around for loop in readers):
            return  # they run more often
        recipe = self._recipe(mark)
        if recipe is None or any(
            self._held_for(loop, recipe) > bytes_of(stack) for loop in readers
        ):
            return
        again = self._again(mark, recipe, len(readers))
        if again is None or not self._is_little(again, mark):
            return
        self.readers[stack] = []
        for loop in readers:
            self._make(stack, recipe, loop)
        self.removed.add(mark)
        self._forget(self.eqns[mark].invars[0], mark)

    def _recipe(self, mark: int) -> _Recipe | None:
        """Equations that make a row of a stack of rows of others; None where there are none."""
        (value,) = self.eqns[mark].invars
        home, around = self.scopes[self.makers[value]], self.scopes[mark]
        found: set[int] = set()
        rows: dict[Var, Var] = {}
        waiting = [value]
        while waiting:
            atom = waiting.pop()
            made = self.makers.get(atom)
            if made is None or is_visible(self.scopes[made], around) or made in found:
                continue
            eqn, stacked = self.eqns[made], self.stack_of.get(atom)
            if eqn.primitive is _jax.step_p and not isinstance(eqn.invars[0], Literal):
                rows[atom] = eqn.invars[0]
            elif stacked not in (None, mark) and stacked not in self.removed:
                rows[atom] = self.eqns[stacked].outvars[0]
            elif self.scopes[made] == home and is_among(eqn, _MOVED) and not eqn.effects:
                found.add(made)
                waiting += [a for a in eqn.invars if not isinstance(a, Literal)]
            else:
                return None
        return _Recipe(sorted(found), rows)

    def _again(self, mark: int, recipe: _Recipe, times: int) -> int | None:
        """Work that is done oftener where so many loops make a row; None where it is not cheap."""
        gone, again = {mark}, 0
        for index in reversed(recipe.equations):
            (out,) = self.eqns[index].outvars
            if self.read_at[out] <= gone:
                gone.add(index)
            more = times - (index in gone)
            if more and not _is_cheap(self.eqns[index]):
                return None
            again += more * _work(self.eqns[index])
        return again

    def _is_little(self, again: int, mark: int) -> bool:
        """Whether so much work may be done twice, beside what is so already."""
        loop = self.loops[self.eqns[mark].params["control"]]
        loops = [loop, *self.readers[self.eqns[mark].outvars[0]]]
        twice = max(one.twice for one in loops) + again
        if twice > _TWICE * sum(one.work for one in loops):
            return False
        for one in loops:
            one.twice += again
        return True

    def _held_for(self, loop: _Loop, recipe: _Recipe) -> int:
        """Bytes of the stacks that are held longer, so that a loop can read their rows."""
        return bytes_of(*(s for s in set(recipe.rows.values()) if not self._is_held(s, loop)))

    def _is_held(self, stack: Var, loop: _Loop) -> bool:
        return stack in loop.rows or self._is_read_after(stack, loop)

    def _is_read_after(self, stack: Var, loop: _Loop) -> bool:
        """Whether a stack is held for what is read behind a loop, or in another one."""
        if stack not in self.makers or stack in self.results:
            return True
        later = [reader.open for reader in self.readers[stack] if reader is not loop]
        return any(index >= loop.open for index in (*later, *self.read_at[stack]))

    def _make(self, stack: Var, recipe: _Recipe, loop: _Loop) -> None:
        """Add to a loop the equations that make the row that it has read."""
        for value, other in recipe.rows.items():
            if other not in loop.rows:
                loop.rows[other] = _jax.new_var(value.aval)
                self.readers[other].append(loop)
            loop.made[value] = loop.rows[other]
        *before, last = recipe.equations
        for index in before:
            (out,) = self.eqns[index].outvars
            if out not in loop.made:
                loop.made[out] = _jax.new_var(out.aval)
                self._add(index, loop.made[out], loop)
        self._add(last, loop.rows.pop(stack), loop)
        if stack in loop.steps:
            self.removed.add(loop.steps.pop(stack))

    def _add(self, index: int, result: Var, loop: _Loop) -> None:
        eqn = self.eqns[index]
        held = [a for a in eqn.invars if not isinstance(a, Literal)]
        for atom in held:
            if atom not in loop.made:
                self.read_at[atom].add(loop.body)
        operands = [a if isinstance(a, Literal) else loop.made.get(a, a) for a in eqn.invars]
        loop.equations.append((index, eqn.replace(invars=operands, outvars=[result])))

    def _forget(self, value: Var, reader: int) -> None:
        """A value is read no more by an equation; what makes it is dead where nothing else does."""
        waiting = [(value, reader)]
        while waiting:
            value, reader = waiting.pop()
            if reader not in self.read_at[value]:
                continue
            self.read_at[value].remove(reader)
            made = self.makers.get(value)
            if self.read_at[value] or self.readers[value] or value in self.results:
                continue
            if made is not None and is_among(self.eqns[made], _MOVED):
                read = (a for a in self.eqns[made].invars if not isinstance(a, Literal))
                waiting += [(atom, made) for atom in read]

    def carry_back(self, index: int) -> None:
        """Let loops that go the other way carry what a loop has carried, of which they read both.

        A step of the forward loop makes the next `h` of the last. Where a backward loop reads a
        row of each, the one that was made is the one that its step before has read.
        """
        old, new = self.eqns[index].invars
        if isinstance(new, Literal) or not {old, new} <= self.stack_of.keys():
            return
        before, after = (self.eqns[self.stack_of[v]].outvars[0] for v in (old, new))
        control = self.eqns[index].params["control"]
        for loop in list(self.readers[after]):
            goes_back = _is_reversed(loop.control) != _is_reversed(control)
            is_beside = self.scopes[loop.open][:-1] == self.scopes[index]
            if goes_back and is_beside and before in loop.rows:
                if not self._is_read_after(after, loop):
                    (last,) = self.eqns[index].outvars
                    loop.carried[after] = last, loop.rows[before]
                    self.readers[after].remove(loop)
                    if after in loop.steps:
                        self.removed.add(loop.steps.pop(after))

    def equations(self) -> list[JaxprEqn]:
        """The program with what was added and without what was removed."""
        loops = {loop.body: loop for loop in self.loops.values()}
        found: list[JaxprEqn] = []
        for index, eqn in enumerate(self.eqns):
            loop = loops.get(index)
            if loop is not None:
                known = loop.steps.keys() | loop.carried.keys()
                found += [_step(stack, loop) for stack in loop.rows if stack not in known]
                found += [_begin(stack, loop) for stack in loop.carried]
            if eqn.primitive is _jax.close_p and eqn.params["control"] in self.loops:
                ended = self.loops[eqn.params["control"]]
                found += [_end(stack, ended) for stack in ended.carried]
            if index not in self.removed:
                found.append(eqn)
            if loop is not None:
                found += [made for _, made in sorted(loop.equations, key=lambda pair: pair[0])]
        return found


def _is_reversed(control: Control) -> bool:
    return bool(control.eqn.params["reverse"])


def _step(stack: Var, loop: _Loop) -> JaxprEqn:
    """The mark of a row that a loop reads."""
    return _jax.new_mark(_jax.step_p, [stack], [loop.rows[stack]], loop.control)


def _begin(stack: Var, loop: _Loop) -> JaxprEqn:
    """The mark of what a loop carries in the place of a row; those of the ends are in one order."""
    last, _ = loop.carried[stack]
    return _jax.new_mark(_jax.carry_p, [last], [loop.rows[stack]], loop.control)


def _end(stack: Var, loop: _Loop) -> JaxprEqn:
    """The mark of what a loop carries on, which is read no more behind it."""
    row, (_, following) = loop.rows[stack], loop.carried[stack]
    return _jax.new_mark(_jax.next_p, [row, following], [_jax.new_var(row.aval)], loop.control)


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation may be run twice, as long as that is little."""
    if eqn.primitive.name == "integer_pow" and abs(eqn.params["y"]) > _MOST_POWER:
        return False
    return is_among(eqn, _CHEAP)


def _work(eqn: JaxprEqn) -> int:
    """About how many numbers an equation computes."""
    if _jax.is_mark(eqn) or not eqn.outvars:
        return 0
    size = max(prod(shape_of(v)) for v in eqn.outvars)
    if not is_among(eqn, PRODUCTS):
        return size
    left, right = (prod(shape_of(a)) for a in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * prod(shape_of(eqn.invars[0])[d] for d in contracted)
    return 2 * max(size, left, right)
