"""One function -> Program: a flat jaxpr with hints and source lines.

`flatten.py` makes the flat jaxpr; here the hints on it are read and checked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.errors import HintError, MeshError, message
from meshwise.flatten import as_written, flatten
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.program import Hint, OpenDims, Program, type_of

OPEN = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True)
class Problems:
    """What is wrong with hints, a line each: those for other meshes, and those that do not fit.

    `of_shard` are those among the latter that `mw.shard` says, in no words of JAX.
    """

    meshes: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    of_shard: list[str] = field(default_factory=list)

    def add(self, others: "Problems") -> None:
        """Add what else does not fit."""
        self.misfits.extend(others.misfits)
        self.of_shard.extend(others.of_shard)


def make_program(
    closed: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    in_paths: Sequence[str],
    out_paths: Sequence[str],
    name: str = "fn",
    enters: Callable[[JaxprEqn], bool] = _jax.has_bodies,
    inside: Problems | None = None,
) -> Program:
    """Flatten a jaxpr and read every hint on it.

    `in_specs` and `out_specs` hold, for each input and output, a `PartitionSpec`, a
    `NamedSharding` or None; `enters` tells the loops and conditionals whose bodies are to be
    partitioned; `inside` says what is wrong with hints where nothing is read any more. Raises
    `HintError` listing every hint that does not fit, `MeshError` those that are for other meshes.
    """
    flat = flatten(closed, enters)
    jaxpr, wrong = flat.jaxpr, Problems()

    def read(
        specs: Sequence[Any], atoms: Sequence[Any], paths: Sequence[str], source: str
    ) -> tuple[Hint | None, ...]:
        return tuple(
            None if spec is None else read_hint(spec, atom.aval.shape, mesh, path, source, wrong)
            for spec, atom, path in zip(specs, atoms, paths, strict=True)
        )

    in_hints = read(in_specs, jaxpr.invars, in_paths, "in_shardings")
    out_hints = read(out_specs, jaxpr.outvars, out_paths, "out_shardings")
    if inside is not None:
        wrong.add(inside)
    hints = _hints_inside(jaxpr.eqns, mesh, wrong)
    _refuse_other_meshes(wrong.meshes, name)
    _refuse_misfits(wrong, name, mesh)
    if _contradictions(jaxpr.eqns, hints):
        # Of what is written twice one value may have been made; who said what of which is asked.
        written = as_written(closed, enters).jaxpr.eqns
        said = _hints_inside(written, mesh, Problems())
        _refuse_contradictions(_contradictions(written, said), name)
    return Program(flat, mesh, in_hints, out_hints, hints, tuple(in_paths), tuple(out_paths), name)


def misfits_inside(jaxpr: Any, mesh: Mesh) -> Problems:
    """What is wrong with the hints written in a jaxpr, those on values that nothing reads too."""
    wrong = Problems()
    for eqn in _jax.opened(jaxpr).eqns:
        spec = eqn.params["sharding"] if eqn.primitive is _jax.hint_p else _jax.constraint_of(eqn)
        if spec is not None:
            _read_inside(eqn, spec, mesh, wrong)
        call = _jax.call_body(eqn)
        bodies = [call.jaxpr] if call else _jax.bodies_of(eqn) if _jax.has_bodies(eqn) else ()
        for body in bodies:
            wrong.add(misfits_inside(body, mesh))
    return Problems([], wrong.misfits, wrong.of_shard)


def _hints_inside(eqns: Sequence[JaxprEqn], mesh: Mesh, wrong: Problems) -> dict[int, Hint]:
    """The hints on values inside, by equation."""
    hints: dict[int, Hint] = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive is _jax.hint_p:
            hint = _read_inside(eqn, eqn.params["sharding"], mesh, wrong)
            if hint is not None:
                hints[index] = replace(hint, derived=_is_derived(eqn))
    return hints


def _read_inside(eqn: JaxprEqn, spec: Any, mesh: Mesh, wrong: Problems) -> Hint | None:
    """The hint that an equation says, and whose words it is in if it does not fit."""
    found = Problems(wrong.meshes)
    hint = _read_written(eqn, spec, mesh, found)
    if eqn.primitive is _jax.hint_p and not eqn.params.get("reshards"):
        found.of_shard.extend(found.misfits)
    wrong.add(found)
    return hint


def _read_written(eqn: JaxprEqn, spec: Any, mesh: Mesh, wrong: Problems) -> Hint | None:
    """The hint that an equation says; what the user wrote, where it is another, is read first."""
    aval, source = type_of(eqn.outvars[0]), _jax.source_summary(eqn)
    path = f"value {aval.str_short()} at {source}"
    if (written := eqn.params.get("written")) is not None:
        place, said, shape = written
        place = place or f"{path}, under vmap"
        if read_hint(said, shape, mesh, place, source, wrong) is None:
            return None
    return read_hint(spec, aval.shape, mesh, path, source, wrong)


def _is_derived(eqn: JaxprEqn) -> bool:
    """Whether a hint is a tangent's or cotangent's, and bounds no memory."""
    return bool(eqn.params.get("derived")) and eqn.params.get("max_bytes") is None


def read_hint(
    spec: Any, shape: Sequence[int], mesh: Mesh, path: str, source: str, wrong: Problems
) -> Hint | None:
    """A hint on a value of a shape; None, and a line more of what is wrong, where it does not fit.

    A `NamedSharding` is for a mesh over the axes of `mesh`.
    """
    if isinstance(spec, NamedSharding):
        named = mesh.under(spec.mesh.axis_names, spec.mesh.axis_sizes)
        if named is None:
            theirs, ours = dict(spec.mesh.shape), {n: mesh.size(s) for n, s in mesh.user_axes}
            wrong.meshes.append(
                f"{path}: {spec.spec} is for a mesh {theirs}, the program's is {ours}"
            )
            return None
        mesh, spec = named, spec.spec
    if not isinstance(spec, PartitionSpec):
        wrong.misfits.append(f"{path}: {spec!r} is neither a PartitionSpec nor a NamedSharding")
        return None
    problems = _spec_problems(spec, shape, mesh, path)
    if problems:
        wrong.misfits.extend(problems)
        return None
    dims: list[Axes | None] = [_entry_axes(e, mesh) for e in spec.partitions]
    dims += [()] * (len(shape) - len(dims))
    return Hint(_check_open(tuple(dims)), str(spec), source)


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
            f"{path}: {spec} has {len(spec)} entr{'y' if len(spec) == 1 else 'ies'}, the shape "
            f"{tuple(shape)} has {len(shape)} dim{'s' * (len(shape) != 1)}"
        )
    names = [n for entry in spec.partitions for n in _entry_names(entry)]
    used: list[str] = []
    for name in dict.fromkeys(names):
        if name not in mesh.sub_axes and name not in mesh.names:
            problems.append(
                f"{path}: {spec} names axis {name!r}, the mesh has "
                f"{', '.join(map(repr, mesh.sub_axes))}"
            )
        elif names.count(name) > 1:
            problems.append(f"{path}: {spec} uses axis {name!r} {names.count(name)} times")
        else:
            used += mesh.refine((name,))
    twice = [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]
    return [*problems, *(f"{path}: {spec} uses axis {axis!r} twice" for axis in twice)]


def _contradictions(eqns: Sequence[JaxprEqn], hints: Mapping[int, Hint]) -> list[str]:
    """Values of which two `mw.shard` say different things.

    `mw.shard` states what a value is, so stating two things of one value (of the same value
    twice, or of the result of another `mw.shard`) cannot hold. JAX's own constraint on a
    constrained value is an explicit reshard instead, as in JAX. What a tangent or cotangent has of
    its value's hint nobody stated of it.
    """
    stated: dict[Var, Hint] = {}
    problems = []
    for index, hint in hints.items():
        eqn = eqns[index]
        if eqn.params.get("reshards") or hint.derived:
            continue
        for value in (*eqn.invars, *eqn.outvars):
            if isinstance(value, Literal):
                continue
            other = stated.setdefault(value, hint)
            if any(
                a != b
                for a, b in zip(hint.dims, other.dims, strict=True)
                if a is not None and b is not None
            ):
                problems.append(
                    f"value {value.aval.str_short()} is {other.given_as} at {other.source} and "
                    f"{hint.given_as} at {hint.source}"
                )
                break
    return problems


def _refuse_contradictions(problems: Sequence[str], name: str) -> None:
    if problems:
        raise _of_own_words(
            message(
                f"{name} says of values that they lie in two ways",
                problems,
                "mw.shard says how a value lies, and gives the same value on, as a loop does with "
                "what it leaves unchanged.",
                "Say one of them, or move it from one to the other with mw.reshard or "
                "lax.with_sharding_constraint.",
            )
        )


def _refuse_other_meshes(offenders: Sequence[str], name: str) -> None:
    if offenders:
        raise MeshError(
            message(
                f"{name} has hints for other meshes than its own",
                offenders,
                "All hints of one program are for the same devices in the same order, over axes "
                "that are made of the prime factors of its own.",
                "Write hints as PartitionSpecs, or make the NamedShardings with the program's "
                "mesh.",
            )
        )


def _of_own_words(text: str) -> HintError:
    """The error for hints of `mw.shard`: not left to `jax.jit`, which would drop them."""
    error = HintError(text)
    error.is_of_own_words = True
    return error


def _refuse_misfits(wrong: Problems, name: str, mesh: Mesh) -> None:
    if not wrong.misfits:
        return
    raised = _of_own_words if wrong.of_shard else HintError
    axes = ", ".join(f"{n}={mesh.size(subs)}" for n, subs in mesh.user_axes)
    raise raised(
        message(
            f"{name} has hints that do not fit its values on the mesh ({axes})",
            wrong.misfits,
            "A hint is a PartitionSpec or NamedSharding: at most one entry per dim,"
            " of axes of the mesh, each once, none of them unreduced.",
            "Correct the PartitionSpec; None or a missing entry leaves a dim unsharded, "
            "PartitionSpec.UNCONSTRAINED leaves it to completion.",
        )
    )
