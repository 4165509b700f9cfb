"""Interpret a per-device jaxpr on the stacked values of all devices.

Equations without collectives are batched over the devices by `jax.vmap`, bodies included;
collectives are computed by `stacked`; a call or a loop whose body holds a collective is entered.

There are two ways to run a loop or branch with collectives. *Traced*: as the same loop over
stacked values, which suits `jax.jit`; its predicate must then be the same on all devices by
construction. *Stepped*: as a Python loop over concrete values, which can look at every device's
predicate.

Where devices may take different branches, the collectives of a branch must be over other axes than
those along which the predicate varies: then the devices of a group take it together. Every branch
is run for all devices, and each gets the results of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise import _jax
from meshwise.errors import ReplicationError, message
from meshwise.ir.mesh import Axes, Mesh
from meshwise.run.stacked import (
    Stacked,
    apply_collective,
    expand,
    is_collective,
    join_axes,
    sends_over,
)


class PredicateVariesError(Exception):
    """Traced: a predicate may differ between devices; the program has to be stepped."""


@dataclass(frozen=True)
class Interpreter:
    """What an interpretation needs to know beside the jaxpr."""

    mesh: Mesh
    is_stepped: bool

    def run(self, jaxpr: Any, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of a jaxpr, open (without constants) or closed."""
        inner, consts = _opened(jaxpr)
        environment: dict[Any, Stacked] = {}

        def read(atom: Any) -> Stacked:
            if isinstance(atom, _jax.Literal):
                aval: Any = atom.aval
                return Stacked(np.asarray(atom.val, aval.dtype))
            return environment[atom]

        environment.update(zip(inner.constvars, map(Stacked, consts), strict=True))
        environment.update(zip(inner.invars, values, strict=True))
        last_use = _last_uses(inner)
        for position, eqn in enumerate(inner.eqns):
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            environment.update(zip(eqn.outvars, outs, strict=True))
            for variable in last_use.get(position, ()):
                environment.pop(variable, None)
        return [read(v) for v in inner.outvars]

    def _equation(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        if is_collective(eqn, self.mesh):
            return apply_collective(eqn, values, self.mesh)
        if not any(_needs_entering(body, self.mesh) for body in _jax.bodies_of(eqn)):
            return _batch(eqn, values, self.mesh)
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, values)
            case "while":
                return self._while(eqn, values)
            case "cond":
                return self._cond(eqn, values)
        bodies = list(_jax.bodies_of(eqn))
        if len(bodies) != 1 or len(_jax.opened(bodies[0]).invars) != len(values):
            text = f"the simulator cannot enter {eqn.primitive.name}, which holds a collective"
            raise NotImplementedError(text)
        return self.run(bodies[0], values)

    def _scan(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        """Carries keep their shapes; xs and ys have the trips as first local dim."""
        params = eqn.params
        first, carried = _jax.scan_counts(eqn)
        last = first + carried
        consts, carry, xs = values[:first], values[first:last], values[last:]

        def body(carry: list[Stacked], x: list[Stacked]) -> tuple[list[Stacked], list[Stacked]]:
            outs = self.run(params["jaxpr"], [*consts, *carry, *x])
            return outs[: len(carry)], outs[len(carry) :]

        trips, reverse = params["length"], params["reverse"]
        if self.is_stepped:
            return _step_scan(eqn, body, carry, xs, self.mesh)
        slices = [jax.eval_shape(lambda v: _trip(v, 0), x) for x in xs] if trips else []
        if not trips:
            return carry + _no_trips(eqn, len(carry))
        axes = self._settled(lambda c, x: body(c, x)[0], carry, slices)
        carry = [expand(v, a, self.mesh) for v, a in zip(carry, axes, strict=True)]
        ys_axes = [y.axes for y in jax.eval_shape(lambda c, x: body(c, x)[1], carry, slices)]

        def step(carry: list[Stacked], arrays: list[Any]) -> tuple[list[Stacked], list[Any]]:
            new, ys = body(carry, [Stacked(a, x.axes) for a, x in zip(arrays, xs, strict=True)])
            new = [expand(v, c.axes, self.mesh) for v, c in zip(new, carry, strict=True)]
            return new, [y.array for y in ys]

        arrays = [jnp.moveaxis(x.array, 1, 0) if x.axes else x.array for x in xs]
        carry, ys = jax.lax.scan(step, carry, arrays, trips, reverse)
        stacked = zip(ys, ys_axes, strict=True)
        return carry + [Stacked(jnp.moveaxis(y, 0, 1) if a else y, a) for y, a in stacked]

    def _while(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        params = eqn.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        test_consts, body_consts, carry = values[:first], values[first:last], values[last:]

        def test(carry: list[Stacked]) -> Stacked:
            return self.run(params["cond_jaxpr"], [*test_consts, *carry])[0]

        def body(carry: list[Stacked]) -> list[Stacked]:
            return self.run(params["body_jaxpr"], [*body_consts, *carry])

        if self.is_stepped:
            while _agreed(test(carry), eqn, self.mesh):
                carry = body(carry)
            return carry
        axes = self._settled(body, carry)
        carry = [expand(v, a, self.mesh) for v, a in zip(carry, axes, strict=True)]
        if jax.eval_shape(test, carry).axes:
            raise PredicateVariesError

        def step(carry: list[Stacked]) -> list[Stacked]:
            return [expand(v, c.axes, self.mesh) for v, c in zip(body(carry), carry, strict=True)]

        return jax.lax.while_loop(lambda c: test(c).array, step, carry)

    def _cond(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        index, *operands = values
        branches = eqn.params["branches"]
        varies = index.axes if not self.is_stepped else _axes_of_difference(index, self.mesh)
        if varies and not any(_sends_over(b, self.mesh) & set(varies) for b in branches):
            results = zip(*(self.run(branch, operands) for branch in branches), strict=True)
            return [_own_branch(index, outs, self.mesh) for outs in results]
        if self.is_stepped:
            chosen = int(_agreed(index, eqn, self.mesh))
            return self.run(branches[min(max(chosen, 0), len(branches) - 1)], operands)
        if varies:
            raise PredicateVariesError
        runs = [lambda ops, branch=branch: self.run(branch, ops) for branch in branches]
        results = [jax.eval_shape(run, operands) for run in runs]
        axes = [join_axes(outs, self.mesh) for outs in zip(*results, strict=True)]

        def widened(run: Callable[..., list[Stacked]]) -> Callable[..., list[Stacked]]:
            def branch(operands: list[Stacked]) -> list[Stacked]:
                outs = run(operands)
                return [expand(v, a, self.mesh) for v, a in zip(outs, axes, strict=True)]

            return branch

        return jax.lax.switch(index.array, [widened(run) for run in runs], operands)

    def _settled(
        self, body: Callable[..., list[Stacked]], carry: list[Stacked], *rows: list[Stacked]
    ) -> list[Axes]:
        """Axes of each carried value, such that one more trip adds none."""
        axes = [v.axes for v in carry]
        while True:
            wide = [expand(v, a, self.mesh) for v, a in zip(carry, axes, strict=True)]
            outs = jax.eval_shape(body, wide, *rows)
            joined = [join_axes(pair, self.mesh) for pair in zip(wide, outs, strict=True)]
            if joined == axes:
                return axes
            axes = joined


def _step_scan(
    eqn: _jax.JaxprEqn,
    body: Callable[..., tuple[list[Stacked], list[Stacked]]],
    carry: list[Stacked],
    xs: list[Stacked],
    mesh: Mesh,
) -> list[Stacked]:
    trips, count = eqn.params["length"], len(carry)
    order = range(trips - 1, -1, -1) if eqn.params["reverse"] else range(trips)
    rows: dict[int, list[Stacked]] = {}
    for trip in order:
        carry, rows[trip] = body(carry, [_trip(x, trip) for x in xs])
    if not rows:
        return carry + _no_trips(eqn, count)
    columns = zip(*(rows[trip] for trip in range(trips)), strict=True)
    return carry + [_stack_trips(column, mesh) for column in columns]


def _trip(value: Stacked, trip: int) -> Stacked:
    """`[devices, trips, *local]` to `[devices, *local]`."""
    return Stacked(value.array[:, trip] if value.axes else value.array[trip], value.axes)


def _stack_trips(rows: Sequence[Stacked], mesh: Mesh) -> Stacked:
    """Each `[devices, *local]`, to `[devices, trips, *local]`."""
    axes = join_axes(rows, mesh)
    arrays = [expand(row, axes, mesh).array for row in rows]
    return Stacked(jnp.stack(arrays, axis=1 if axes else 0), axes)


def _no_trips(eqn: _jax.JaxprEqn, carries: int) -> list[Stacked]:
    avals: list[Any] = [v.aval for v in eqn.outvars[carries:]]
    return [Stacked(jnp.empty(a.shape, a.dtype)) for a in avals]


def _axes_of_difference(value: Stacked, mesh: Mesh) -> Axes:
    """The axes along which a concrete scalar differs between neighbours."""
    grid = np.asarray(value.array).reshape([mesh.axis_size[a] for a in value.axes])
    return tuple(a for i, a in enumerate(value.axes) if (grid != grid.take([0], axis=i)).any())


def _sends_over(jaxpr: Any, mesh: Mesh) -> set[str]:
    """The axes of all collectives in a jaxpr, its bodies included."""
    eqns = _jax.opened(jaxpr).eqns
    inner = [_sends_over(body, mesh) for eqn in eqns for body in _jax.bodies_of(eqn)]
    return set().union(*(sends_over(eqn, mesh) for eqn in eqns), *inner)


def _own_branch(index: Stacked, results: Sequence[Stacked], mesh: Mesh) -> Stacked:
    """For each device the result of the branch that its index says; as `lax.switch` clamps it."""
    axes = join_axes([index, *results], mesh)
    chosen = jnp.clip(expand(index, axes, mesh).array, 0, len(results) - 1)
    first, *others = [expand(result, axes, mesh).array for result in results]
    chosen = jnp.reshape(chosen, (-1,) + (1,) * (first.ndim - 1))
    for number, other in enumerate(others, 1):
        first = jnp.where(chosen == number, other, first)
    return Stacked(first, axes)


def _agreed(value: Stacked, eqn: _jax.JaxprEqn, mesh: Mesh) -> Any:
    """The one value of a concrete scalar that all devices must agree on."""
    values = np.asarray(value.array).reshape(-1)
    if (values == values[0]).all():
        return values[0]
    sizes = [mesh.axis_size[a] for a in value.axes]
    places = [np.unravel_index(i, sizes) for i in range(len(values))]
    raise ReplicationError(
        message(
            f"Devices disagree on the predicate of {eqn.primitive.name}"
            f" at {_jax.source_summary(eqn)}",
            [
                f"({', '.join(f'{a}={i}' for a, i in zip(value.axes, place, strict=True))}): {v}"
                for place, v in zip(places, values, strict=True)
            ],
            "Its body holds collectives, which every device must run in the same order;"
            " on real devices this program would hang or give wrong numbers.",
            "Compute the predicate from values that are replicated, or reduce it with"
            " psum or pmax first.",
        )
    )


def _batch(eqn: _jax.JaxprEqn, values: list[Stacked], mesh: Mesh) -> list[Stacked]:
    """An equation without collectives, on every device by itself."""
    axes = join_axes(values, mesh)
    if not axes:
        return [Stacked(out) for out in _jax.bind(eqn, [v.array for v in values])]
    # JAX's rule for threefry2x32 takes no batch where only one of its two counters has one.
    all_own = eqn.primitive is _jax.threefry2x32_p
    values = [expand(v, axes, mesh) if v.axes or all_own else v for v in values]
    arrays = [v.array for v in values]
    stacked = [bool(v.axes) for v in values]

    def one_device(*args: Any) -> list[Any]:
        return _jax.bind(eqn, args)

    # JAX's rule for ragged products takes a batch of all operands only, and not in every mode.
    takes_no_batch = eqn.primitive.name == "ragged_dot_general"
    if takes_no_batch or _draws_bits_by_batch(eqn) or _skips_a_loop(eqn):
        outs = _device_by_device(one_device, arrays, stacked)
    else:
        in_axes = [0 if s else None for s in stacked]
        outs = jax.vmap(one_device, in_axes=in_axes)(*arrays)
    return [Stacked(out, axes) for out in outs]


def _device_by_device(
    function: Callable[..., list[Any]], arrays: list[Any], stacked: list[bool]
) -> list[Any]:
    def row(own: list[Any]) -> list[Any]:
        own_values = iter(own)
        pairs = zip(arrays, stacked, strict=True)
        return function(*(next(own_values) if s else a for a, s in pairs))

    return jax.lax.map(row, [a for a, s in zip(arrays, stacked, strict=True) if s])


def _draws_bits_by_batch(eqn: _jax.JaxprEqn) -> bool:
    """Whether `vmap` would draw other random bits than each device by itself.

    The generators built on XLA's own ("rbg", "unsafe_rbg") do not keep to their key there.
    """
    if eqn.primitive.name == "rng_bit_generator":
        return True
    kinds = {_jax.key_impl_name(v.aval) for v in (*eqn.invars, *eqn.outvars)}
    if kinds & {"rbg", "unsafe_rbg"}:
        return True
    return any(_draws_bits_by_batch(e) for b in _jax.bodies_of(eqn) for e in _jax.opened(b).eqns)


def _skips_a_loop(eqn: _jax.JaxprEqn) -> bool:
    """Whether a branch holds a loop that ends when its data says so: `vmap` takes every branch."""
    inner = [e for body in _jax.bodies_of(eqn) for e in _jax.opened(body).eqns]
    if eqn.primitive.name == "cond":
        return any(map(_jax.may_not_end, inner))
    return any(_skips_a_loop(e) for e in inner)


def _needs_entering(jaxpr: Any, mesh: Mesh) -> bool:
    return any(
        is_collective(eqn, mesh) or any(_needs_entering(body, mesh) for body in _jax.bodies_of(eqn))
        for eqn in _jax.opened(jaxpr).eqns
    )


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr without its constants, and those."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, _jax.ClosedJaxpr) else (jaxpr, ())


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Which variables are read for the last time by the equation at each position."""
    last: dict[Any, int] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        last.update((v, position) for v in eqn.invars if not isinstance(v, _jax.Literal))
        last.update((v, position) for v in eqn.outvars)
    for variable in jaxpr.outvars:
        if not isinstance(variable, _jax.Literal):
            last.pop(variable, None)
    uses: dict[int, list[Any]] = {}
    for variable, position in last.items():
        uses.setdefault(position, []).append(variable)
    return uses
