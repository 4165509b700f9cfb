"""Floating-point operations of a partitioned program, per device, with the trips of its loops.

Counted in the text right after XLA's SPMD pass, for every contestant alike. The compiler's own
figure (`cost_analysis`) is no measure of a program's work: it counts a loop's body once, and an
operation as often as fusions repeat it. An addition, a product, a comparison's maximum or a
transcendental counts one, for every element of a floating-point result; a product of matrices or
a convolution two for every product; moving and choosing count nothing. What is joined of several
devices (by an all-reduce or a reduce-scatter), or of several updates of a scatter, counts one for
each element that joins another, whatever its type: maxima of floats may be found among integers.
What is a call of a library (factorisations, solvers) counts nothing: it is the same for all. What
is the same in every trip of a loop counts once, as XLA's compilers take it out.
"""

from __future__ import annotations

import re
from math import log2, prod

from benchmarks.peers.hlo import trip_count
from benchmarks.peers.hlo_text import Computation, Instruction, Module, Shape, parse_module
from benchmarks.peers.invariant import Loops
from benchmarks.peers.replica_groups import parse_groups
from benchmarks.peers.scattered import Scope

ARITHMETIC = frozenset(
    "add subtract multiply divide remainder maximum minimum negate abs power sqrt rsqrt cbrt "
    "exponential exponential-minus-one log log-plus-one logistic tanh sine cosine tan atan2 erf "
    "floor ceil round-nearest-even round-nearest-afz sign complex".split()
)
JOINING = frozenset(("scatter", "all-reduce", "all-reduce-start", "reduce-scatter"))


def flops(text: str) -> float:
    """What one device computes in one call."""
    module = parse_module(text)
    return _of(Scope(module, module.computations[module.entry]), Loops())


def _of(scope: Scope, loops: Loops) -> float:
    """What one device computes in a computation, all its runs together, and in those it calls."""
    return sum(_all_runs(scope, i, loops) for i in scope.computation.instructions.values())


def _all_runs(scope: Scope, instruction: Instruction, loops: Loops) -> float:
    opcode, computations = instruction.opcode, scope.module.computations
    if opcode == "while":
        trips = trip_count(scope, instruction)
        body = computations[instruction.attribute("body") or ""]
        inner = Scope(scope.module, body, (scope, instruction))
        return _of(inner, loops.in_body(inner, 1 if trips is None else trips))
    if opcode == "conditional":
        branches = [Scope(scope.module, computations[name]) for name in instruction.called]
        return max(_of(branch, loops.in_branch()) for branch in branches)
    if opcode in ("fusion", "call", "async-start") and instruction.called:
        inner = scope.called(instruction)
        return _of(inner, loops.in_call(inner))
    return _one(scope, instruction) * loops.count_of(instruction)


def _one(scope: Scope, instruction: Instruction) -> float:
    """What one run of an instruction computes that calls nothing."""
    opcode = instruction.opcode
    shape = instruction.shapes[0] if instruction.shapes else Shape("token", ())
    known = scope.computation.instructions
    inputs = [known[name].shapes[0] for name in instruction.operands if name in known]
    each = 4.0 if shape.dtype.startswith("c") else 1.0
    if opcode in JOINING:
        return each * _joined(scope.module, instruction, inputs)
    if not shape.dtype.startswith(("f", "bf", "c")):
        return 0.0
    if opcode == "fft":
        return _transformed(instruction, [shape, *inputs[:1]])
    return each * _computed(scope.module, instruction, shape, inputs)


def _joined(module: Module, instruction: Instruction, inputs: list[Shape]) -> float:
    """Elements that join another: updates of a scatter that combines, terms of a sum over devices.

    Of such a sum each of n devices adds up one part, of the terms of the n - 1 others.
    """
    if instruction.opcode == "scatter":
        combines = _operations(module.computations[instruction.called[0]])
        return float(inputs[-1].elements) if combines and inputs else 0.0
    groups = parse_groups(instruction.attributes, module.devices)
    n = max((len(group) for group in groups), default=1)
    return sum(shape.elements for shape in inputs) * (n - 1) / n


def _computed(
    module: Module, instruction: Instruction, out: Shape, inputs: list[Shape]
) -> float:  # fmt: skip
    """Operations on numbers for one instruction; what is not named here only moves them."""
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode in ARITHMETIC:
        return out.elements
    if opcode == "dot":
        contracted = _dims(attributes, "lhs_contracting_dims")
        return 2.0 * out.elements * prod(inputs[0].dims[d] for d in contracted)
    if opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
        place = labels[1].index("o") if labels else len(inputs[1].dims) - 1
        return 2.0 * out.elements * inputs[1].elements / inputs[1].dims[place]
    if opcode == "reduce":
        inside = max(1, _operations(module.computations[instruction.called[0]]))
        return inside * max(inputs[0].elements - out.elements, 0)
    if opcode in ("reduce-window", "select-and-scatter"):
        window = re.search(r"window={size=([\dx]+)", attributes)
        return out.elements * prod(int(n) for n in window[1].split("x")) if window else 0.0
    if opcode == "sort":
        return sum(s.elements for s in inputs[:1]) * max(log2(max(out.dims, default=1)), 1)
    return 0.0


def _transformed(instruction: Instruction, sides: list[Shape]) -> float:
    """5 n log n operations, as the field counts them; half as many where one side is real."""
    length = prod(_dims(instruction.attributes, "fft_length"))
    each = 5.0 if all(side.dtype.startswith("c") for side in sides) else 2.5
    return each * max(side.elements for side in sides) * log2(max(length, 2))


def _operations(computation: Computation) -> int:
    """Arithmetic instructions of what combines two numbers."""
    return sum(i.opcode in ARITHMETIC for i in computation.instructions.values())


def _dims(attributes: str, name: str) -> list[int]:
    found = re.search(rf"{name}={{([\d,]*)}}", attributes)
    return [int(d) for d in found[1].split(",") if d] if found else []
