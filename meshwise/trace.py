"""One function -> Program: a flat jaxpr with hints and source lines.

Calls (jit, custom_jvp, custom_vjp, closed calls, nested `mw.jit`) are inlined. A call that is to
be recomputed in the backward pass (`jax.checkpoint`, once differentiated) is inlined behind an
`optimization_barrier` on its inputs, which is what JAX itself lowers it to: the recomputation
stays a computation of its own. Every hint, whichever way it was written
(`mw.shard`, `lax.with_sharding_constraint`, `jax.sharding.reshard`, shardings of a nested call),
becomes one `hint` equation. Positions that count along a batch are said to be one (`pairing.py`),
and moves of rows in several steps are written as one (`borders/`).
Dead equations are dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.borders.merge import merge_moves
from meshwise.errors import HintError, message
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.program import Hint, OpenDims, Program, application_key
from meshwise.pairing import pair_batches

OPEN = PartitionSpec.UNCONSTRAINED


@dataclass
class _Flat:
    """The equations of a program while it is being flattened."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    constvars: list[Var] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)

    def emit(self, eqn: JaxprEqn) -> None:
        """Append one equation."""
        self.eqns.append(eqn)


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline every call of a jaxpr, turn constraints into hint equations, drop dead ones."""
    flat = _Flat()
    inputs = [_jax.new_var(v.aval) for v in closed.jaxpr.invars]
    outputs = _inline(closed.jaxpr, closed.consts, inputs, flat, None)
    eqns, outputs = _share_equal(flat.eqns, outputs)
    constants = dict(zip(flat.constvars, flat.consts, strict=True))
    eqns = merge_moves(pair_batches(eqns, constants), constants)
    eqns = _live(eqns, outputs)
    return _jax.close_jaxpr(flat.constvars, inputs, outputs, eqns, flat.consts)


def _inline(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], flat: _Flat, call: JaxprEqn | None
) -> list[Any]:
    """Append the equations of a body applied to `args`; return the atoms it results in."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _jax.new_var(var.aval)
        flat.constvars.append(env[var])
        flat.consts.append(const)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        body = _jax.call_body(eqn)
        if body is None:
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            renamed = _jax.rename(eqn, operands, outvars, call)
            flat.emit(_as_hint(renamed) or renamed)
            results: list[Any] = list(outvars)
        else:
            results = _inline_call(eqn, body, operands, flat, call)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _inline_call(
    eqn: JaxprEqn, body: "_jax.CallBody", operands: list[Any], flat: _Flat, call: JaxprEqn | None
) -> list[Any]:
    named = _jax.rename(eqn, eqn.invars, eqn.outvars, call)
    if body.recomputed:
        operands = _barrier(operands, flat, named)
    operands = [_hinted(x, s, flat, named) for x, s in zip(operands, body.in_specs, strict=True)]
    results = _inline(body.jaxpr, body.consts, operands, flat, named)
    return [_hinted(x, s, flat, named) for x, s in zip(results, body.out_specs, strict=True)]


def _barrier(operands: list[Any], flat: _Flat, call: JaxprEqn) -> list[Any]:
    held = [x for x in operands if not isinstance(x, Literal)]
    fresh = {x: _jax.new_var(x.aval) for x in held}
    held = list(fresh)
    flat.emit(_jax.new_eqn(lax.optimization_barrier_p, held, [fresh[x] for x in held], {}, call))
    return [x if isinstance(x, Literal) else fresh[x] for x in operands]


def _hinted(atom: Any, sharding: Any, flat: _Flat, call: JaxprEqn) -> Any:
    """The atom behind a hint equation, where a nested call gives it a sharding."""
    if sharding is None or isinstance(atom, Literal):
        return atom
    out = _jax.new_var(atom.aval)
    params = {"sharding": sharding, "reshards": True}
    flat.emit(_jax.new_eqn(_jax.hint_p, [atom], [out], params, call))
    return out


def _as_hint(eqn: JaxprEqn) -> JaxprEqn | None:
    """A constraint in JAX's own words as a hint equation; None for anything else."""
    sharding = _jax.constraint_of(eqn)
    if sharding is None:
        return None
    params = {"sharding": sharding, "reshards": True}
    return _jax.new_eqn(_jax.hint_p, eqn.invars, eqn.outvars, params, eqn)


def _share_equal(eqns: list[JaxprEqn], outputs: list[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """Compute equal things once: equations with the same primitive, parameters and operands.

    What is recomputed on purpose stands behind a barrier, so its operands differ.
    """
    same: dict[Var, Any] = {}
    first: dict[Any, JaxprEqn] = {}
    kept = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for original in eqns:
        eqn = original.replace(invars=[read(a) for a in original.invars])
        key = _equation_key(eqn)
        earlier = first.setdefault(key, eqn) if key is not None else eqn
        if earlier is eqn:
            kept.append(eqn)
        else:
            same.update(zip(eqn.outvars, earlier.outvars, strict=True))
    return kept, [read(a) for a in outputs]


def _equation_key(eqn: JaxprEqn) -> Any:
    """Equal for equations that compute the same; None for those that must stay."""
    if eqn.effects or eqn.primitive is lax.optimization_barrier_p:
        return None
    return application_key(eqn, tuple(_atom_key(a) for a in eqn.invars))


def _atom_key(atom: Any) -> Any:
    """A variable itself; a literal by its type and its bits."""
    if not isinstance(atom, Literal):
        return atom
    bits = atom.val.tobytes() if hasattr(atom.val, "tobytes") else (type(atom.val), atom.val)
    return atom.aval, bits


def _live(eqns: list[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations whose results are used or that have effects."""
    needed = {x for x in outputs if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return kept[::-1]


def make_program(
    closed: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    in_paths: Sequence[str],
    out_paths: Sequence[str],
    name: str = "fn",
) -> Program:
    """Flatten a jaxpr and read every hint on it.

    `in_specs` and `out_specs` hold, for each input and output, a `PartitionSpec`, a
    `NamedSharding` or None. Raises `HintError` listing every hint that does not fit.
    """
    flat = flatten(closed)
    problems: list[str] = []

    def read(spec: Any, aval: Any, path: str, source: str) -> Hint | None:
        if spec is None:
            return None
        hint, found = read_hint(spec, aval.shape, mesh, path, source)
        problems.extend(found)
        return hint

    jaxpr = flat.jaxpr
    in_hints = tuple(
        read(s, v.aval, p, "in_shardings")
        for s, v, p in zip(in_specs, jaxpr.invars, in_paths, strict=True)
    )
    out_hints = tuple(
        read(s, v.aval, p, "out_shardings")
        for s, v, p in zip(out_specs, jaxpr.outvars, out_paths, strict=True)
    )
    hints: dict[int, Hint] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is _jax.hint_p:
            source = _jax.source_summary(eqn)
            path = f"value {eqn.outvars[0].aval.str_short()} at {source}"
            hint = read(eqn.params["sharding"], eqn.outvars[0].aval, path, source)
            if hint is not None:
                hints[index] = hint
    problems += _contradictions(flat, hints)
    _raise_hint_error(problems, name, mesh)
    return Program(flat, mesh, in_hints, out_hints, hints, tuple(in_paths), tuple(out_paths), name)


def read_hint(
    spec: Any, shape: Sequence[int], mesh: Mesh, path: str, source: str
) -> tuple[Hint | None, list[str]]:
    """A hint on a value of a shape, and what is wrong with it (then the hint is None)."""
    if isinstance(spec, NamedSharding):
        theirs = dict(zip(spec.mesh.axis_names, spec.mesh.axis_sizes, strict=True))
        ours = {name: mesh.size(subs) for name, subs in mesh.user_axes}
        if theirs != ours:
            return None, [f"{path}: {spec.spec} is for a mesh {theirs}, the program's is {ours}"]
        spec = spec.spec
    if not isinstance(spec, PartitionSpec):
        return None, [f"{path}: {spec!r} is neither a PartitionSpec nor a NamedSharding"]
    problems = _spec_problems(spec, shape, mesh, path)
    if problems:
        return None, problems
    dims: list[Axes | None] = [_entry_axes(e, mesh) for e in spec]
    dims += [()] * (len(shape) - len(dims))
    return Hint(_check_open(tuple(dims)), str(spec), source), []


def _check_open(dims: OpenDims) -> OpenDims:
    used = [a for d in dims if d for a in d]
    assert len(used) == len(set(used)), dims
    return dims


def _entry_names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is OPEN:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _entry_axes(entry: Any, mesh: Mesh) -> Axes | None:
    return None if entry is OPEN else mesh.refine(_entry_names(entry))


def _spec_problems(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, path: str) -> list[str]:
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return [f"{path}: {spec} is unreduced at the boundary of a program"]
    problems = []
    if len(spec) > len(shape):
        problems.append(
            f"{path}: {spec} has {len(spec)} entries, the shape {tuple(shape)} has "
            f"{len(shape)} dims"
        )
    names = [n for entry in spec for n in _entry_names(entry)]
    for name in dict.fromkeys(names):
        if name not in mesh.sub_axes:
            problems.append(
                f"{path}: {spec} names axis {name!r}, the mesh has "
                f"{', '.join(map(repr, mesh.sub_axes))}"
            )
        elif names.count(name) > 1:
            problems.append(f"{path}: {spec} uses axis {name!r} {names.count(name)} times")
    return problems


def _contradictions(flat: ClosedJaxpr, hints: dict[int, Hint]) -> list[str]:
    """Values of which two `mw.shard` say different things.

    `mw.shard` states what a value is, so stating two things of one value (of the same value
    twice, or of the result of another `mw.shard`) cannot hold. JAX's own constraint on a
    constrained value is an explicit reshard instead, as in JAX.
    """
    stated: dict[Var, Hint] = {}
    problems = []
    for index, hint in hints.items():
        eqn = flat.jaxpr.eqns[index]
        if eqn.params.get("reshards"):
            continue
        for value in (eqn.invars[0], eqn.outvars[0]):
            other = stated.setdefault(value, hint)
            if any(
                a != b
                for a, b in zip(hint.dims, other.dims, strict=True)
                if a is not None and b is not None
            ):
                problems.append(
                    f"value {value.aval.str_short()} is {other.given_as} at {other.source} and "
                    f"{hint.given_as} at {hint.source}; use lax.with_sharding_constraint where "
                    "it is to be moved from one to the other"
                )
                break
    return problems


def _raise_hint_error(problems: Iterable[str], name: str, mesh: Mesh) -> None:
    problems = list(problems)
    if not problems:
        return
    axes = ", ".join(f"{n}={mesh.size(subs)}" for n, subs in mesh.user_axes)
    raise HintError(
        message(
            f"{name} has hints that do not fit its values on the mesh ({axes})",
            problems,
            "A hint has at most one entry per dim, names only axes of the mesh, each once.",
            "Correct the PartitionSpec; None or a missing entry leaves a dim unsharded, "
            "PartitionSpec.UNCONSTRAINED leaves it to completion.",
        )
    )
