"""What an instruction of XLA on CPU reads and writes, as far as memory depends on it."""

from dataclasses import dataclass
from enum import IntEnum

from meshwise.cost.steps import Step


class Use(IntEnum):
    """How the elements of a value are read."""

    SAME = 0  # each for the element in its place
    ONCE = 1  # each for one element somewhere
    AGAIN = 2  # some for several elements


@dataclass
class Instruction:
    """What a step, or a part of it, reads, and how, and writes, by numbers of values.

    If it `fuses`, what makes its operands may be fused into its kernel. What `is_fusible` may be
    fused into the kernel of its reader, what `is_cheap` into those of several (it is computed again
    in each), what `branches` into several if nothing else is between. What is `of_library` the
    library of products and long reductions may make, what `begins` it does. What it `reshapes` is
    of another shape for it than for others. If it `is_view` nothing is written for it, unless its
    kernel makes what it reads.
    """

    step: Step
    reads: tuple[int, ...]
    uses: tuple[Use, ...]
    writes: tuple[int, ...]
    fuses: bool = False
    is_fusible: bool = False
    is_cheap: bool = False
    branches: bool = False
    of_library: bool = False
    begins: bool = False
    is_view: bool = False
    reshapes: frozenset[int] = frozenset()
