"""Interpret a per-device jaxpr on the stacked values of all devices.

Equations without collectives are batched over the devices by `jax.vmap`, bodies included;
collectives are computed by `stacked`; a call or a loop whose body holds a collective is entered.

There are two ways to run a loop or branch with collectives. *Traced*: as the same loop over
stacked values, which suits `jax.jit`; its predicate must then be the same on all devices by
construction. *Stepped*: as a Python loop over concrete values, which can look at every device's
predicate.

Where devices may take different branches, or trips of a loop, the collectives there must be over
other axes than those along which the predicate varies: then the devices of a group take it
together. Every branch is run for all devices, and each gets the results of its own; a loop runs for
as long as a device goes on that takes part, and the others keep what they carry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise import _jax
from meshwise.ir.mesh import Axes, Mesh
from meshwise.run.stacked import (
    Stacked,
    apply_collective,
    expand,
    is_collective,
    join_axes,
    sends_over,
)
from meshwise.run.taking_part import agreed, own_branch, taking_part, varies


class PredicateVariesError(Exception):
    """Traced: a predicate may differ between devices; the program has to be stepped."""


@dataclass(frozen=True)
class Interpreter:
    """What an interpretation needs to know beside the jaxpr."""

    mesh: Mesh
    is_stepped: bool
    # Stepped: which devices run this, where not all do; of the others no value is read.
    part: Stacked | None = None

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
        bodies = list(_jax.bodies_of(eqn))
        sends = any(_needs_entering(body, self.mesh) for body in bodies)
        # Batched, a loop would go on with the devices that do not take part.
        may_not_end = self.part is not None and _jax.may_not_end(eqn)
        if not sends and not may_not_end:
            return self._batch(eqn, values)
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, values)
            case "while":
                return self._while(eqn, values)
            case "cond":
                return self._cond(eqn, values)
        if len(bodies) != 1 or len(_jax.opened(bodies[0]).invars) != len(values):
            if not sends:
                return self._batch(eqn, values)
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
            return self._step_while(eqn, values)
        axes = self._settled(body, carry)
        carry = [expand(v, a, self.mesh) for v, a in zip(carry, axes, strict=True)]
        if jax.eval_shape(test, carry).axes:
            raise PredicateVariesError

        def step(carry: list[Stacked]) -> list[Stacked]:
            return [expand(v, c.axes, self.mesh) for v, c in zip(body(carry), carry, strict=True)]

        return jax.lax.while_loop(lambda c: test(c).array, step, carry)

    def _step_while(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        """A loop that each device leaves when its own test says so."""
        params, going = eqn.params, self
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        carry = values[last:]
        bodies = params["cond_jaxpr"], params["body_jaxpr"]
        sent_over = set().union(*(_sends_over(body, self.mesh) for body in bodies))
        while True:
            (says,) = going.run(bodies[0], [*values[:first], *carry])
            if sent_over & set(varies(says, going.part, self.mesh) or ()):
                agreed(says, going.part, eqn, self.mesh)
            going = replace(going, part=taking_part(says, going.part, self.mesh))
            if going.part is None:
                carry = going.run(bodies[1], [*values[first:last], *carry])
            elif not np.any(going.part.array):
                return carry
            else:
                new = going.run(bodies[1], [*values[first:last], *carry])
                pairs = zip(carry, new, strict=True)
                carry = [own_branch(going.part, pair, self.mesh) for pair in pairs]

    def _cond(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        index, *operands = values
        branches = eqn.params["branches"]
        if self.is_stepped:
            return self._step_cond(eqn, index, operands)
        if index.axes:
            is_own = not any(_sends_over(b, self.mesh) & set(index.axes) for b in branches)
            if not is_own or any(_holds_a_loop(b) or _acts(b) for b in branches):
                raise PredicateVariesError
            outs = [self.run(branch, operands) for branch in branches]
            return [own_branch(index, own, self.mesh) for own in zip(*outs, strict=True)]
        runs = [lambda ops, branch=branch: self.run(branch, ops) for branch in branches]
        results = [jax.eval_shape(run, operands) for run in runs]
        axes = [join_axes(outs, self.mesh) for outs in zip(*results, strict=True)]

        def widened(run: Callable[..., list[Stacked]]) -> Callable[..., list[Stacked]]:
            def branch(operands: list[Stacked]) -> list[Stacked]:
                outs = run(operands)
                return [expand(v, a, self.mesh) for v, a in zip(outs, axes, strict=True)]

            return branch

        return jax.lax.switch(index.array, [widened(run) for run in runs], operands)

    def _step_cond(
        self, eqn: _jax.JaxprEqn, index: Stacked, operands: list[Stacked]
    ) -> list[Stacked]:
        """For each device the branch that its own index says."""
        branches = eqn.params["branches"]
        index = Stacked(jnp.clip(index.array, 0, len(branches) - 1), index.axes)
        axes = varies(index, self.part, self.mesh)
        if axes is None or any(_sends_over(b, self.mesh) & set(axes) for b in branches):
            return self.run(branches[agreed(index, self.part, eqn, self.mesh)], operands)
        outs = []
        for number, branch in enumerate(branches):
            part = taking_part(index, self.part, self.mesh, number)
            outs.append(replace(self, part=part).run(branch, operands))
        return [own_branch(index, own, self.mesh) for own in zip(*outs, strict=True)]

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

    def _batch(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        """An equation without collectives, on every device by itself."""
        if self.mesh.names and _jax.has_effects(eqn):
            return self._one_by_one(eqn, values)
        axes = join_axes(values, self.mesh)
        if not axes:
            return [Stacked(out) for out in _jax.bind(eqn, [v.array for v in values])]
        # JAX's rule for threefry2x32 takes no batch where only one of its two counters has one.
        all_own = eqn.primitive is _jax.threefry2x32_p
        values = [expand(v, axes, self.mesh) if v.axes or all_own else v for v in values]
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

    def _one_by_one(self, eqn: _jax.JaxprEqn, values: list[Stacked]) -> list[Stacked]:
        """What does something beside making values: by each device that takes part, in a row.

        Of a batch `vmap` takes every branch, and the host would be called for all devices.
        """
        part = self.part or Stacked(np.True_)
        own = [expand(v, self.mesh.names, self.mesh) for v in (part, *values)]

        def one_device(takes_part: Any, *args: Any) -> list[Any]:
            def idle(*_: Any) -> list[Any]:
                types: list[Any] = [v.aval for v in eqn.outvars]
                return [jax.lax.full(t.shape, 0, t.dtype) for t in types]

            return jax.lax.cond(takes_part, lambda *xs: _jax.bind(eqn, xs), idle, *args)

        outs = _device_by_device(one_device, [v.array for v in own], [True] * len(own))
        return [Stacked(out, self.mesh.names) for out in outs]


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


def _sends_over(jaxpr: Any, mesh: Mesh) -> set[str]:
    """The axes of all collectives in a jaxpr, its bodies included."""
    eqns = _jax.opened(jaxpr).eqns
    inner = [_sends_over(body, mesh) for eqn in eqns for body in _jax.bodies_of(eqn)]
    return set().union(*(sends_over(eqn, mesh) for eqn in eqns), *inner)


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


def _acts(jaxpr: Any) -> bool:
    """Whether a body does something beside making values."""
    return any(map(_jax.has_effects, _jax.opened(jaxpr).eqns))


def _holds_a_loop(jaxpr: Any) -> bool:
    """Whether a body holds a loop that ends when its data says so."""
    return any(map(_jax.may_not_end, _jax.opened(jaxpr).eqns))


def _skips_a_loop(eqn: _jax.JaxprEqn) -> bool:
    """Whether a branch holds a loop that ends when its data says so: `vmap` takes every branch."""
    bodies = list(_jax.bodies_of(eqn))
    if eqn.primitive.name == "cond":
        return any(map(_holds_a_loop, bodies))
    return any(_skips_a_loop(e) for body in bodies for e in _jax.opened(body).eqns)


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
