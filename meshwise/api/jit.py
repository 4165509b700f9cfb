"""`mw.jit` and `mw.shard`: what a user types.

`mw.jit(fn, mesh=..., in_shardings=..., ...)` is used as `jax.jit` with shardings is. A call looks
its arguments up by structure, types and placements, as jit does; the first call of a kind traces
the function, completes the hints, chooses, partitions and compiles.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise.api.arguments import Arguments, leaf_key, take_apart
from meshwise.api.build import DRIVER_OF, Choices, Options, broadcast_specs, build
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.transform import Runner, call_in_trace
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import ArgumentError


def shard(x: Any, spec: Any) -> Any:
    """Say how a value is sharded: a hint, from inside a function under `mw.jit`.

    `spec` is a `PartitionSpec` or `NamedSharding` for one array, or a tree of them (a prefix of
    the tree `x`). A dim of `PartitionSpec.UNCONSTRAINED` is left to completion. Outside `mw.jit`
    the hint is a sharding constraint where a mesh is set, and nothing on one device.

    >>> shard(jax.numpy.ones(3), jax.sharding.PartitionSpec("data")).shape
    (3,)
    """
    leaves, tree = jax.tree.flatten(x)
    specs = broadcast_specs("mw.shard", "the hints", x, spec)
    hinted = [
        leaf if s is None else _jax.hint_p.bind(jax.numpy.asarray(leaf), sharding=s)
        for leaf, s in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(tree, hinted)


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    completion: str = "improved",
    strict: bool = False,
    hardware: Hardware = GENERIC,
) -> Any:
    """Make one SPMD program of a function for every device of a mesh; also a decorator.

    Args:
        fn: a function of arrays and trees of arrays, written for one device.
        mesh: `jax.sharding.Mesh` or `AbstractMesh`; by default that of the shardings, or of
            `jax.set_mesh`.
        in_shardings: a `PartitionSpec`, `NamedSharding` or None for each argument, or trees of
            them (prefixes of the arguments' trees). None is completed from the other hints; an
            argument that comes committed to the mesh keeps its sharding.
        out_shardings: the same for the results.
        static_argnums: arguments that are no arrays and select another program, as in `jax.jit`.
        static_argnames: the same by name.
        donate_argnums: arguments whose buffers the results may reuse.
        donate_argnames: the same by name.
        completion: "gspmd" keeps the shardings that completion finds, "improved" goes on from
            there to lower the cost at fixed hints.
        strict: make an operator without a rule an error instead of computing it whole.
        hardware: figures of the devices by which plans are priced.

    Raises:
        HintError, TreeError, MeshError, ArgumentError, MissingRuleError: when called, for what
            does not fit.
    """
    if fn is None:
        return functools.partial(
            jit, mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings,
            static_argnums=static_argnums, static_argnames=static_argnames,
            donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            completion=completion, strict=strict, hardware=hardware,
        )
    if completion not in DRIVER_OF:
        raise ArgumentError(f"completion={completion!r} is none of {', '.join(DRIVER_OF)}")
    statics = _jax.static_arguments(fn, static_argnums, static_argnames)
    donated = _jax.static_arguments(fn, donate_argnums, donate_argnames)
    choices = Choices(completion, strict, hardware)
    options = Options(mesh, in_shardings, out_shardings, *statics, *donated, choices)
    return JitFunction(fn, options)


class JitFunction:
    """A function under `mw.jit`; call it, or look at what it becomes with `partition`."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        """Nothing is traced yet."""
        self.fn = fn
        self.options = options
        self._programs: dict[Any, SpmdProgram] = {}
        self._runners: dict[Any, Runner] = {}
        name = getattr(fn, "__name__", "fn")
        self._dispatch = _jax.dispatcher(
            name, self._first_call, options.static_argnums, options.static_argnames
        )
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices of the mesh.

        Calls with arguments like an earlier call's go through JAX's own dispatch, as `jax.jit`'s
        do; only others come back here.
        """
        return self._dispatch(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object when the function is a method."""
        return self if instance is None else functools.partial(self, instance)

    def partition(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """The SPMD program for some arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._program(take_apart(self.options, args, kwargs))

    def _first_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Results of a call, and what JAX's dispatch needs to repeat it (None: come back)."""
        arguments = take_apart(self.options, args, kwargs)
        if _jax.is_tracing() or any(isinstance(x, _jax.Tracer) for x in arguments.leaves):
            return call_in_trace(self.fn, self.options, arguments, self._runners), None
        program = self._program(arguments)
        outs = program.executable(arguments.leaves)
        fast = program.executable.fast_path(arguments.leaves, program.out_tree, outs)
        return jax.tree.unflatten(program.out_tree, outs), fast

    def _program(self, arguments: Arguments) -> SpmdProgram:
        key = (
            arguments.tree,
            arguments.static,
            arguments.static_named,
            self.options.mesh or _jax.context_mesh(),
            _jax.settings_key(),
            tuple([leaf_key(leaf) for leaf in arguments.leaves]),
        )
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = build(self.fn, self.options, arguments)
        return program
