"""What every operator means: one registry, keyed by primitive.

A family file registers, for each of its primitives, a function that describes one application
of the primitive as an `OpRule`. Propagation, choosing, partitioning, cost and explanation read
nothing else. A primitive without a rule gets the opaque one: every dim must be whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, bind
from meshwise.errors import RuleError, UnplannedError, message
from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.factors import FactorRule, Strategy, dims_sharding
from meshwise.ir.mesh import Mesh
from meshwise.ir.program import application_key, itemsize_of
from meshwise.ir.sharding import Sharding, local_shape


@dataclass(frozen=True)
class Application:
    """One application of a primitive, as a rule sees it: parameters and global types."""

    eqn: JaxprEqn

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.eqn.params

    @property
    def operands(self) -> list[Any]:
        """Abstract values of the operands (global shapes)."""
        return [a.aval for a in self.eqn.invars]

    @property
    def results(self) -> list[Any]:
        """Abstract values of the results (global shapes)."""
        return [v.aval for v in self.eqn.outvars]

    def is_zero(self, operand: int) -> bool:
        """Whether an operand is the literal zero."""
        atom = self.eqn.invars[operand]
        aval: Any = atom.aval
        return isinstance(atom, Literal) and not aval.shape and not atom.val


@dataclass(frozen=True)
class LocalContext:
    """What a local rule may ask while it computes on one device's part.

    `leaves_turned` says that results may stay turned along the axes that the rule names; `borders`
    are rows of the first operand that lie around it, which its windows are padded with.
    """

    eqn: JaxprEqn
    rule: FactorRule
    strategy: Strategy
    mesh: Mesh
    leaves_turned: bool = field(default=False, kw_only=True)
    borders: tuple[_jax.Border, ...] = field(default=(), kw_only=True)

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters (with global shapes in them)."""
        return self.eqn.params

    def axes(self, factor: int) -> tuple[str, ...]:
        """Axes that a factor is sharded over."""
        return self.strategy.axes[factor]

    def is_split(self, dim: tuple[int, ...]) -> bool:
        """Whether a dim, given by its factors, is sharded: its major one is."""
        return bool(dim and self.axes(dim[0]))

    def shards(self, factor: int) -> int:
        """In how many parts a factor is split."""
        return self.mesh.size(self.strategy.axes[factor])

    def local_size(self, factor: int) -> int:
        """Size of a factor on each device, padding included."""
        return -(-self.rule.sizes[factor] // self.shards(factor))

    def offset(self, factor: int, dtype: Any = np.int32) -> Any:
        """Global index of this device's first element along a factor (a scalar).

        Raises UnplannedError where the factor has more elements than the type has numbers.
        """
        size = self.rule.sizes[factor]
        if size - 1 > np.iinfo(dtype).max:
            raise UnplannedError(
                message(
                    f"{self.eqn.primitive.name} counts along a sharded dim",
                    [f"of {size:,} elements, at {_jax.source_summary(self.eqn)}"],
                    f"Places along a dim are counted in {np.dtype(dtype)}.",
                    "Make it two dims, of which one is sharded.",
                )
            )
        index = lax.convert_element_type(shard_index(self.axes(factor), self.mesh), dtype)
        return lax.mul(index, np.dtype(dtype).type(self.local_size(factor)))

    def real_rows(self, factor: int) -> Any:
        """How many of this device's elements along a factor are no padding (an int32 scalar).

        That may be negative, or more than there are, where no dim is longer than int32 counts.
        """
        size, local = self.rule.sizes[factor], self.local_size(factor)
        if size <= np.iinfo(np.int32).max:
            return lax.sub(np.int32(size), self.offset(factor))
        full, rest = divmod(size, local)  # shards that are full, and what the next one has
        behind = lax.sub(np.int32(full), shard_index(self.axes(factor), self.mesh))
        which = lax.clamp(np.int32(0), lax.add(behind, np.int32(1)), np.int32(2))
        return lax.select_n(which, np.int32(0), np.int32(rest), np.int32(local))

    def global_shape(self, operand: int) -> tuple[int, ...]:
        """Global shape of an operand."""
        aval: Any = self.eqn.invars[operand].aval
        return aval.shape

    def result_shape(self, result: int) -> tuple[int, ...]:
        """Global shape of a result."""
        aval: Any = self.eqn.outvars[result].aval
        return aval.shape

    def itemsize(self, operand: int) -> int:
        """Bytes of an element of an operand."""
        return itemsize_of(self.eqn.invars[operand])

    def local_shape(self, operand: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        dims = dims_sharding(self.rule.operands[operand], self.strategy.axes)
        return local_shape(self.global_shape(operand), Sharding(dims), self.mesh)

    def operand_axes(self, operand: int, dim: int) -> tuple[str, ...]:
        """Axes that a dim of an operand is sharded over."""
        return dims_sharding(self.rule.operands[operand], self.strategy.axes)[dim]

    def border(self, dim: int) -> _jax.Border | None:
        """The rows that lie around the first operand along a dim, if there are any."""
        return next((border for border in self.borders if border.dim == dim), None)

    def local_result_shape(self, result: int) -> tuple[int, ...]:
        """Local shape of a result."""
        dims = dims_sharding(self.rule.results[result], self.strategy.axes)
        aval: Any = self.eqn.outvars[result].aval
        return local_shape(aval.shape, Sharding(dims), self.mesh)

    def bind(self, *operands: Any, **changed: Any) -> list[Any]:
        """The same primitive on local operands, with some parameters changed.

        Shardings among the parameters name global arrays, so they are left out.
        """
        params = {**self.params, **changed}
        for name in ("sharding", "out_sharding"):
            if name in params:
                params[name] = None
        return bind(self.eqn, operands, params)


def shard_index(axes: Sequence[str], mesh: Mesh) -> Any:
    """Which shard this device holds along some axes, major to minor (int32 scalar)."""
    if not axes:
        return np.int32(0)
    index = lax.axis_index(axes[0])
    for axis in axes[1:]:
        index = lax.add(lax.mul(index, np.int32(mesh.axis_size[axis])), lax.axis_index(axis))
    return index


LocalRule = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind that a local rule runs: the bytes a device sends, and how many.

    With `of_rows` rows of operands go as they lie: where every device has all of these, each cuts
    them itself, and nothing is sent.
    """

    kind: CollectiveKind
    wire_bytes: float
    launches: int = 1
    of_rows: bool = False


def all_reduce_of(size: float, devices: int) -> Exchange:
    """One all_reduce of so many bytes."""
    kind = CollectiveKind.ALL_REDUCE
    return Exchange(kind, wire_bytes(kind, size, size, devices))


Exchanges = Callable[["LocalContext"], Sequence[Exchange] | None]


@dataclass(frozen=True)
class OpRule:
    """One application of an operator, described once.

    factors: dims of operands and results as factors, with kinds.
    linear: sets of operands through which an unreduced sum may pass untouched, if *all* of a set
        are unreduced over the same axes, no other operand is, and `local` computes.
    linear_in_local: the primitive itself, on each device's term, gives no terms: what is in the
        result and no operand's (a gather's fill) comes once in the sum by `local` alone.
    local: `(context, *local operands) -> local results`; by default the same primitive.
    exchanges: what `local` sends under a strategy, to be priced; None where it cannot follow it.
    masked: operands whose padding along a sharded reduction factor is replaced by the
        reduction's identity before `local` runs; by default every one that has such a factor. A
        factor that is a permutation too is left to `local`.
    flops: of the whole operator, for the cost of splitting it.
    serial: these are done one after the other (comparisons of a sort), which takes far longer where
        vector units do the rest.
    calls: how many sines all that it calls for one number after another take as long as, where
        vector units have no such functions.
    turned: axes along which the results lie turned where `local` and `exchanges` may leave them so.
    moves: each element of a result is, bit for bit, an element of an operand; of the terms of an
        unreduced result one alone counts, if that is so of the operands it carries, and the others
        are nothing (`nothing_like`).
    opaque: computed whole because there is no rule; shown to the user.
    """

    factors: FactorRule
    linear: tuple[tuple[int, ...], ...] = ()
    linear_in_local: bool = False
    local: LocalRule | None = None
    exchanges: Exchanges | None = None
    masked: tuple[int, ...] | None = None
    flops: float = 0.0
    serial: bool = False
    calls: float = 0.0
    turned: Callable[[LocalContext], tuple[str, ...]] | None = None
    moves: bool = False
    opaque: bool = False

    @property
    def linear_as_is(self) -> tuple[tuple[int, ...], ...]:
        """The sets through which a sum passes where the primitive itself computes, not `local`."""
        return () if self.linear_in_local else self.linear


Describe = Callable[[Application], OpRule]


@dataclass
class Registry:
    """Rules by primitive name."""

    rules: dict[str, Describe] = field(default_factory=dict)

    @property
    def key(self) -> Any:
        """Another where a rule was added since."""
        return id(self.rules), len(self.rules)

    def register(self, *names: str) -> Callable[[Describe], Describe]:
        """Register a description for primitives by name; twice is an error."""

        def decorate(describe: Describe) -> Describe:
            for name in names:
                if name in self.rules:
                    raise RuleError(f"primitive {name!r} has a rule already")
                self.rules[name] = describe
            return describe

        return decorate

    def describe(self, eqn: JaxprEqn) -> OpRule:
        """The rule of one equation; the opaque one where none is registered."""
        application = Application(eqn)
        describe = self.rules.get(eqn.primitive.name)
        if describe is None:
            return opaque_rule(application)
        with _jax.as_wide_as_equation(eqn):
            return describe(application)


def opaque_rule(application: Application) -> OpRule:
    """Every dim whole: the operator is computed on every device from whole operands."""
    factor = 0
    tensors = []
    sizes: list[int] = []
    for aval in (*application.operands, *application.results):
        shape = getattr(aval, "shape", ())
        tensors.append(tuple((factor + d,) for d in range(len(shape))))
        factor += len(shape)
        sizes.extend(shape)
    operands = len(application.operands)
    rule = FactorRule(
        operands=tuple(tensors[:operands]),
        results=tuple(tensors[operands:]),
        sizes=tuple(sizes),
        whole=frozenset(range(factor)),
    )
    flops = float(sum(math.prod(t.shape) for t in application.results if hasattr(t, "shape")))
    return OpRule(rule, flops=flops, opaque=True)


REGISTRY = Registry()
register = REGISTRY.register


def settings_key() -> Any:
    """What a program depends on that no call says: JAX's configuration, and the rules there are."""
    return _jax.settings_key(), REGISTRY.key


def describe_all(eqns: Sequence[JaxprEqn]) -> tuple[OpRule, ...]:
    """The rule of every equation; equations of one signature share theirs."""
    known: dict[Any, OpRule] = {}
    found = []
    for eqn in eqns:
        key = _signature(eqn)
        rule = known.get(key) if key is not None else None
        if rule is None:
            rule = REGISTRY.describe(eqn)
            if key is not None:
                known[key] = rule
        found.append(rule)
    return tuple(found)


def _signature(eqn: JaxprEqn) -> Any:
    """What a rule depends on: primitive, types, literals, parameters; None if unhashable."""
    types = tuple([(a.aval, str(a.val) if isinstance(a, Literal) else None) for a in eqn.invars])
    return application_key(eqn, types)
