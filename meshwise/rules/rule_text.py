"""A rule's text as users write it: what is wrong with it, and leading dims that are left open.

The language is that of `meshwise.ir.factors`, and `...` at the front of an operand or result
stands for any leading dims: `"... i, i o -> ... o | sum=i"`. What a user writes is held to more
than what the package's own files write.
"""

import re
from collections import Counter
from collections.abc import Sequence

from meshwise.ir.sharding import Reduction

KINDS = (*(r.value for r in Reduction), "whole", "permute")
_NAME = r"[A-Za-z]\w*"
_TENSOR = re.compile(rf"(\.\.\.\s*)?(1\b\s*|{_NAME}\s*|\(\s*{_NAME}(\s+{_NAME})+\s*\)\s*)*")
_KIND = re.compile(rf"({_NAME})=({_NAME}(?:\s+{_NAME}(?!\w*=))*)\s*")


def tensors_of(text: str) -> tuple[list[str], list[str]]:
    """The texts of the operands and of the results."""
    left, _, right = text.partition("|")[0].partition("->")
    return [t.strip() for t in left.split(",")], [t.strip() for t in right.split(",")]


def problems_of(text: str, makes_results: bool) -> list[str]:
    """Everything that is wrong with a text, whatever it is applied to.

    `makes_results` says that a local function computes the results, so that they may have dims
    that no operand has.
    """
    head, _, tail = text.partition("|")
    if head.count("->") != 1:
        return ["it has to have one '->', between operands and results"]
    operands, results = tensors_of(text)
    malformed = [t for t in (*operands, *results) if not _TENSOR.fullmatch(t)]
    if malformed:
        return [f"{t!r} is no list of dims" for t in malformed]
    kinds, problems = _kinds_of(tail)
    named = {f for t in (*operands, *results) for f in re.findall(_NAME, t)}
    problems += [f"{f} is a factor of no dim" for f in kinds if f not in named]
    problems += [
        f"{f} stands twice in {t!r}"
        for t in (*operands, *results)
        for f, count in Counter(re.findall(_NAME, t)).items()
        if count > 1
    ]
    read = {f for t in operands for f in re.findall(_NAME, t)}
    made = {f for t in results for f in re.findall(_NAME, t)}
    reductions = {r.value for r in Reduction}
    for f in sorted(read - made):
        if f not in kinds:
            problems.append(f"{f} is in no result: is it sum={f}, max={f}, ... or whole={f}?")
    for f in sorted(f for f in named if kinds.get(f) == "permute" and not makes_results):
        problems.append(f"{f} is permuted, which takes a local function that does the exchange")
    for f in sorted(made):
        if kinds.get(f) in reductions:
            problems.append(f"{f} is reduced ({kinds[f]}={f}), and is in a result")
        if f not in read and not makes_results and kinds.get(f) != "whole":
            problems.append(f"{f} is in no operand: whole={f}, or a local function, is wanted")
    return problems


def _kinds_of(tail: str) -> tuple[dict[str, str], list[str]]:
    """The kind of each factor that has one, and what is wrong with what stands after the bar."""
    kinds: dict[str, str] = {}
    problems: list[str] = []
    if re.sub(_KIND, "", tail).strip():
        return kinds, [f"{tail.strip()!r} is no list of kinds, such as 'sum=i j whole=k'"]
    for kind, factors in _KIND.findall(tail):
        if kind not in KINDS:
            problems.append(f"{kind!r} is no kind of factor: it is one of {', '.join(KINDS)}")
        for f in factors.split():
            if kinds.setdefault(f, kind) != kind:
                problems.append(f"{f} is of two kinds, {kinds[f]} and {kind}")
    return kinds, problems


def expanded(text: str, operands: Sequence[int], results: Sequence[int]) -> str:
    """The text with `...` written out for operands and results of some ranks.

    The leading dims of all tensors that have `...` are the same ones, aligned at the last.
    """
    if "..." not in text:
        return text
    head, bar, tail = text.partition("|")
    lefts, rights = tensors_of(head)
    left = ", ".join(_lead(t, n) for t, n in _paired(lefts, operands))
    right = ", ".join(_lead(t, n) for t, n in _paired(rights, results))
    return f"{left} -> {right} {bar}{tail}".strip()


def _paired(tensors: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Each tensor with its rank; without one it keeps no leading dims, and does not fit later."""
    missing = [0] * (len(tensors) - len(ranks))
    return list(zip(tensors, [*ranks, *missing], strict=False))


def _lead(tensor: str, rank: int) -> str:
    if not tensor.startswith("..."):
        return tensor
    rest = tensor.removeprefix("...").strip()
    count = rank - len(re.findall(r"\([^)]*\)|\S+", rest))
    return " ".join([*(f"_{n}" for n in range(count, 0, -1)), rest]).strip()
