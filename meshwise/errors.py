"""Every public error: what was asked, each offender, the rule, the way out.

Each class's docstring is its manual page. All inherit from `MeshwiseError`; most are also the
class JAX raises for the same mistake, so code that catches JAX's errors keeps working.
"""

import functools
from collections.abc import Iterable

import jax


class MeshwiseError(Exception):
    """Base class of every error that meshwise raises on purpose."""


class HintError(MeshwiseError, ValueError):
    """A hint does not fit the value, the mesh, or another hint on the same value.

    A hint (a `PartitionSpec` or `NamedSharding`) names, for each dim of an array, the mesh axes
    it is sharded over. It may not have more entries than the array has dims, may name only axes
    of the mesh, and may use each axis once.
    """

    # Whether it is about a hint of meshwise's own (`mw.shard`): `jax.jit` cannot take it as meant.
    is_of_own_words = False


class TreeError(MeshwiseError, ValueError):
    """A tree of shardings is no prefix of the tree of arguments or results it describes."""


class MeshError(MeshwiseError, ValueError):
    """No mesh was given, or an argument or hint lives on other devices than the mesh."""


class NoMeshError(MeshError):
    """Nothing names a mesh: no argument of `mw.jit`, no sharding, no context, no array.

    A call runs as under `jax.jit` then; only `partition` has nothing to partition for.
    """


class ArgumentError(MeshwiseError, TypeError):
    """An argument of the function cannot be an array, or a call does not fit the program."""


class DeletedArrayError(MeshwiseError, jax.errors.JaxRuntimeError, ValueError):
    """An argument's buffers are gone: an earlier call donated them, or this one does twice.

    What is donated to a call (`donate_argnums`, `donate_argnames`) cannot be read afterwards. JAX
    raises one of three classes, as it finds out early or late.
    """


class TracerLeakError(MeshwiseError, jax.errors.UnexpectedTracerError):
    """A traced value of an earlier call is used in this one.

    The function stored an intermediate value outside itself (in a global, an attribute, a
    list) and a later call reads it. Return the value instead.
    """

    def __init__(self, message: str):
        """Keep the message as it is (JAX's class appends to it)."""
        Exception.__init__(self, message)


class UnplannedError(MeshwiseError, RuntimeError):
    """A program could not be planned.

    It has what meshwise does not take (references, memory of the host, symbolic sizes: the message
    says so), or something went wrong that nobody foresaw. Where the message asks for a report,
    please send one: the error it was raised from says where it happened.
    """


class FallbackWarning(UserWarning):
    """A program that was written for `jax.jit` is partitioned by XLA, and why."""


class MissingRuleError(MeshwiseError, NotImplementedError):
    """In strict mode: an operator has no rule and would be computed whole on every device."""


class ReplicationError(MeshwiseError, AssertionError):
    """The simulator found a replicated result that differs between devices."""


class RuleError(MeshwiseError, ValueError):
    """An operator's rule does not fit its operands, or is registered twice."""


class MemoryLimitError(MeshwiseError, ValueError):
    """No way to reshard an array, or no plan of a program, fits in `max_bytes` on each device.

    Of a reshard the largest array that a device holds on the way counts, its shards before and
    after included; of a plan all that it holds at once, arguments included.
    """


class PipelineError(MeshwiseError, ValueError):
    """A model cannot be cut into stages, or its microbatches not be scheduled, as asked.

    A model is cut where `mw.stage_boundary` marks it, and has as many stages as the axis has
    devices, or a multiple of that; the batch is cut into microbatches of equal size.
    """


class IllegalMove(MeshwiseError):
    """A move of a schedule would not keep the program's values, or would not do what was asked."""


class LayoutError(MeshwiseError):
    """Layouts of a program's values do not go together (CoCoNeT, section 3.1)."""


def message(asked: str, offenders: Iterable[str], rule: str, way_out: str) -> str:
    """Compose the text of an error: what was asked, each offender once, the rule, the way out."""
    offenders = list(dict.fromkeys(offenders))
    listed = f" {offenders[0]}" if len(offenders) == 1 else "".join(f"\n  - {o}" for o in offenders)
    return f"{asked}:{listed}\n{rule}\n{way_out}"


def also(error: MeshwiseError, kind: type[Exception]) -> MeshwiseError:
    """The same error, of another class as well: of what JAX raises for the same mistake."""
    if isinstance(error, kind):
        return error
    try:
        both = _of_both(type(error), kind)
        made = both.__new__(both)
    except TypeError:  # classes that nothing can be of together, as OSError is of none but itself
        return error
    made.args = error.args
    return made


def forgotten(error: MeshwiseError) -> MeshwiseError:
    """The same error without the frames it came through, to be kept."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


@functools.cache
def _of_both(ours: type[MeshwiseError], theirs: type[Exception]) -> type[MeshwiseError]:
    return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": __name__})
