"""One rule broken on purpose: where, how, and which tests must notice."""

import pathlib
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` stands exactly once in `file` and becomes `new`; then `tests` must fail.

    tests: arguments of pytest, paths relative to the root.
    """

    family: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text(self, root: pathlib.Path = ROOT) -> str:
        """The file with the rule broken; ValueError where the old text is not there once."""
        text = (root / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: the old text stands {found} times in {self.file}")
        return text.replace(self.old, self.new)


def truth(words: str) -> tuple[str, ...]:
    """Rows of the table of operators whose name, and whose test's, has some words."""
    return ("tests/rules/test_truth.py", "-k", f"({words}) and not refused")


def alone(*operators: str) -> tuple[str, ...]:
    """Random programs of one of these operators each, split by dice."""
    test = "tests/fuzz/test_operators.py::test_an_operator_split_by_dice"
    return tuple(f"{test}[{name}]" for name in operators)
