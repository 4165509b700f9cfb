"""Rules that users give for primitives of their own.

What they give is a text, or a function that gives one for each application, and perhaps a local
function. Both are checked: the text when it is registered and whenever it meets operands, what
the local function returns when it is emitted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from meshwise._jax import array_type, source_summary
from meshwise.errors import MeshwiseError, RuleError, message
from meshwise.ir.factors import FactorRule, bind_rule
from meshwise.rules.factoring import shapes
from meshwise.rules.registry import (
    REGISTRY,
    Application,
    LocalContext,
    LocalRule,
    OpRule,
    register,
)
from meshwise.rules.rule_text import expanded, problems_of, tensors_of

Linear = tuple[tuple[int, ...], ...]
LANGUAGE = (
    "A rule is 'operands -> results | kinds', such as 'b i, i o -> b o | sum=i': a name for the "
    "factors of each dim, and the kind of each that does not simply pass through."
)


@dataclass(frozen=True)
class GivenRule:
    """What a user says of a primitive; `rule` is a text, or makes one of an application."""

    primitive: str
    rule: str | Callable[[Application], str | OpRule]
    linear: Linear = ()
    local: LocalRule | None = None
    flops: float | Callable[[Application], float] | None = None

    def register(self) -> None:
        """Put it in the registry; an error where it cannot be right, or there is one already."""
        if self.primitive in REGISTRY.rules:
            raise RuleError(
                message(
                    "mw.register_rule was given a primitive that has a rule already",
                    [repr(self.primitive)],
                    "A primitive has one rule, which holds for the whole process.",
                    "Register it once, where the primitive is made.",
                )
            )
        if isinstance(self.rule, str):
            self._check_text(self.rule)
        elif not callable(self.rule):
            raise self._unreadable([f"{self.rule!r} is neither a text nor a function"])
        register(self.primitive)(self.describe)

    def describe(self, application: Application) -> OpRule:
        """The rule of one application."""
        found = self._asked("rule function", self.rule, application)
        if isinstance(found, OpRule):
            local = self._checked(found.local or LocalContext.bind)
            return replace(found, local=local, flops=self._priced(found.flops, application))
        if not isinstance(found, str):
            raise self._unreadable([f"the function returned {found!r}, no text and no OpRule"])
        if found is not self.rule:
            self._check_text(found)
        factors = self._bound(found, application)
        compute = self.local or LocalContext.bind
        flops = self._asked("flops", self.flops, application)
        flops = float(math.prod(factors.sizes)) if flops is None else flops
        return OpRule(
            factors,
            linear=self.linear,
            linear_in_local=self.local is not None,
            local=self._checked(compute),
            flops=self._priced(flops, application),
        )

    def _asked(self, what: str, given: Any, application: Application) -> Any:
        """What was given, or what a function says that was."""
        if not callable(given):
            return given
        try:
            return given(application)
        except MeshwiseError:
            raise
        except Exception as error:
            offender = f"it raises {type(error).__name__}: {error}"
            raise self._of_no_use(what, offender, application) from error

    def _priced(self, flops: Any, application: Application) -> float:
        if is_figure(flops):
            return float(flops)
        raise self._of_no_use("flops", f"it is {flops!r:.60}", application)

    def _of_no_use(self, what: str, offender: str, application: Application) -> RuleError:
        return RuleError(
            message(
                f"the {what} of {self.primitive!r} says nothing of what is applied at "
                f"{source_summary(application.eqn)}",
                [offender],
                "A rule's functions are called with an application: its params, and the types of "
                "its operands and results. flops is a finite number, 0 or more.",
                "Let it answer for every application of the primitive.",
            )
        )

    def _check_text(self, text: str) -> None:
        problems = problems_of(text, makes_results=self.local is not None)
        if problems:
            raise self._unreadable(problems, text)
        count = len(tensors_of(text)[0])
        outside = [s for s in self.linear if any(o not in range(count) for o in s)]
        if outside:
            raise RuleError(
                message(
                    f"mw.register_rule was given operands of {self.primitive!r} that it has not",
                    [f"linear={self.linear!r} for {count} operands, counted from 0"],
                    "linear lists sets of operands through which an unreduced sum may pass.",
                    "Write ((0,), (1,)) for a product and ((0, 1),) for a sum of two operands.",
                )
            )

    def _unreadable(self, problems: Sequence[str], text: str = "") -> RuleError:
        shown = f" {text!r}" if text else ""
        return RuleError(
            message(
                f"mw.register_rule cannot read the rule{shown} for {self.primitive!r}",
                problems,
                LANGUAGE,
                "The factors of a dim, and what kinds there are: docs/extending.md.",
            )
        )

    def _bound(self, text: str, application: Application) -> FactorRule:
        operands, results = shapes(application.operands), shapes(application.results)
        try:
            whole = expanded(text, [len(s) for s in operands], [len(s) for s in results])
            return bind_rule(whole, operands, results)
        except RuleError as error:
            raise RuleError(
                message(
                    f"the rule of {self.primitive!r} does not fit what it is applied to at "
                    f"{source_summary(application.eqn)}",
                    [str(error)],
                    f"The rule is {text!r}, the types are {types_text(application.operands)} -> "
                    f"{types_text(application.results)}.",
                    "Begin a tensor with '...' where it may have more dims, or register a "
                    "function that makes the text of an application.",
                )
            ) from error

    def _checked(self, compute: LocalRule) -> LocalRule:
        """The local function, its results compared with what the rule says."""
        own = compute is not LocalContext.bind

        def local(context: LocalContext, *operands: Any) -> Sequence[Any]:
            try:
                results = compute(context, *operands)
            except MeshwiseError:
                raise
            except Exception as error:
                raised = f"it raises {type(error).__name__}" if own else "it cannot be"
                raise self._wrong(context, operands, [f"{raised}: {error}"], own) from error
            is_one = hasattr(results, "shape") or not isinstance(results, Iterable)
            results = [results] if is_one else list(results)
            problems = result_problems(context, results)
            if problems:
                raise self._wrong(context, operands, problems, own)
            return results

        return local

    def _wrong(
        self, context: LocalContext, operands: Sequence[Any], problems: Sequence[str], own: bool
    ) -> RuleError:
        what = f"the local function of {self.primitive!r}" if own else f"{self.primitive!r} itself"
        given = types_text([jax.typeof(x) for x in operands])
        return RuleError(
            message(
                f"{what}, computed at {source_summary(context.eqn)} on each device's "
                f"{given or 'nothing'}, is not what its rule says",
                problems,
                f"The rule is {str(context.rule)!r}, of {types_text(_avals(context))} in all.",
                "Compute local results of these types, correct the rule, or give a local function "
                "where parameters of the primitive hold global sizes.",
            )
        )


def is_figure(given: Any) -> bool:
    """Whether it may be a number of operations."""
    is_number = isinstance(given, int | float | np.number) and not isinstance(given, bool)
    return is_number and bool(0 <= given < math.inf)


def types_text(types: Sequence[Any]) -> str:
    """Types as JAX writes them short: `f32[4,8], i32[4]`."""
    return ", ".join(t.str_short(short_dtypes=True) for t in types)


def _avals(context: LocalContext) -> list[Any]:
    return [a.aval for a in context.eqn.invars]


def result_problems(context: LocalContext, results: Sequence[Any]) -> list[str]:
    """How local results differ in number, shape or dtype from what the rule says."""
    expected = context.eqn.outvars
    if len(results) != len(expected):
        return [f"{len(results)} results, expected {len(expected)}"]
    problems = []
    for i, (result, var) in enumerate(zip(results, expected, strict=True)):
        aval: Any = var.aval
        found = array_type(result)
        if found is None:
            problems.append(f"result {i} is {result!r:.60}, no array")
            continue
        wanted = aval.update(shape=context.local_result_shape(i))
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            problems.append(f"result {i} is {types_text([found])}, expected {types_text([wanted])}")
    return problems
