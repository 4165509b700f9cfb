"""Initial values of a reduction by a user's function: whether they may count any number of times.

Each device that reduces a part begins with them, and padding is overwritten with them. Where the
function is associative, as JAX asks, that changes nothing if they change nothing of themselves, and
it does not matter on which side they stand. Where that is not so, nobody may begin with them but
once, and the dim is whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise._jax import (
    ClosedJaxpr,
    Literal,
    is_extreme_and_place,
    jaxpr_as_fun,
    without_context_mesh,
    without_mesh,
)
from meshwise.flatten import inline_calls
from meshwise.ir.program import type_of
from meshwise.rules.registry import Application, LocalContext, LocalRule

# What an initial value is tried with, on either side.
_SAMPLES = (0.0, 0.75, -1.25, 3.0, -2.0)


def may_count_again(application: Application) -> bool:
    """Whether the initial values, the second half of the operands, are known and count for nothing.

    The function is tried with a few numbers; those of `lax.argmax` and `lax.argmin`, which every
    device's program may have, are known.
    """
    if is_extreme_and_place(application.eqn):
        return True
    atoms = application.eqn.invars[len(application.operands) // 2 :]
    initial = [np.asarray(a.val, type_of(a).dtype) for a in atoms if isinstance(a, Literal)]
    if len(initial) < len(atoms):
        return False
    samples = [[_as(s, x.dtype) for x in initial] for s in _SAMPLES]
    joins = _function_of(application)
    with (
        jax.ensure_compile_time_eval(),
        without_mesh(),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        joined = [joins(*x, *initial) for x in samples]
        return _same(joins(*initial, *initial), initial) and all(
            _same(joins(*initial, *x), y) for x, y in zip(samples, joined, strict=True)
        )


def counting_once(local: LocalRule) -> LocalRule:
    """A reduction's local rule, its operands apart from what makes them.

    XLA divides a reduction of joined arrays into one of each, which all begin with the initial
    values, and so it makes one of those of what was padded or reduced before.
    """

    def counting(context: LocalContext, *operands: Any) -> Sequence[Any]:
        count = len(operands) // 2
        apart = lax.optimization_barrier(operands[:count])
        return local(context, *apart, *operands[count:])

    return counting


def _as(sample: float, dtype: np.dtype) -> np.ndarray:
    return np.asarray(abs(sample) if dtype.kind in "bu" else sample).astype(dtype)


def _function_of(application: Application) -> Callable[..., Sequence[Any]]:
    """What joins two, in no mesh and without calls, which would run over theirs."""
    body, consts = application.params["jaxpr"], application.params.get("consts", ())
    closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, consts)
    return jaxpr_as_fun(without_context_mesh(inline_calls(closed)))


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    pairs = zip(these, those, strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
