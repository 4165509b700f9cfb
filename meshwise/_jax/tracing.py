"""Tracing a function, and the context it is traced in."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import linear_util as _linear_util
from jax._src import mesh as _mesh_lib
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.named_sharding import UnspecifiedValue
from jax.sharding import Mesh

from meshwise._jax.explicit import auto_mesh, plain_types
from meshwise._jax.jaxprs import ClosedJaxpr, JaxprEqn, with_bodies, with_each
from meshwise.errors import MeshwiseError

# Where JAX keeps the mesh in context: since 0.11 beside the meshes, before in its configuration.
_CONTEXTS: Any = _mesh_lib if hasattr(_mesh_lib, "abstract_mesh_context_manager") else _config
_ABSTRACT_MESH: Any = _CONTEXTS.abstract_mesh_context_manager
_CONCRETE_MESH: Any = _CONTEXTS.device_context


def make_jaxpr_over_axes(
    function: Callable[..., Any],
    axes: Sequence[tuple[str, int]],
    args: Sequence[Any],
    name: str | None = None,
    arg_names: Sequence[str] | None = None,
) -> ClosedJaxpr:
    """Trace a function of local arrays in which the named axes may be used in collectives.

    No mesh is in context: constants made on the way are to lie on no mesh. Traced as by
    `jax.make_jaxpr`, without what that does for a function of the user's: names of arguments,
    shardings, donation, a cache. JAX's errors call it and its arguments by the names given.
    """
    types, tree = jax.tree.flatten(tuple(args))
    name = str(name or getattr(function, "__name__", "<unknown>"))
    told = _core.DebugInfo("jit", name, None if arg_names is None else tuple(arg_names), None)
    flat = _linear_util.wrap_init(
        lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))),
        debug_info=told,
    )
    with _config._check_vma(False), without_mesh(), _core.extend_axis_env_nd(list(axes)):
        avals = [_core.shaped_abstractify(x) for x in types]
        jaxpr, _, consts = _partial_eval.trace_to_jaxpr_dynamic(flat, avals)
    return ClosedJaxpr(jaxpr, consts)


def is_unspecified(sharding: Any) -> bool:
    """Whether JAX's marker for a sharding that was not given."""
    return sharding is None or isinstance(sharding, UnspecifiedValue)


def trace_function(
    function: Callable[..., Any],
    arguments_of: Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]],
    types: Sequence[Any],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    auto_mesh_of: Any = None,
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function of abstract arguments, which `arguments_of` makes of their leaves' types.

    Returns its jaxpr, the traced values of an enclosing trace that it closes over (the jaxpr's
    first inputs), and the tree of its results. It is traced in the context that it is called in;
    where a mesh is given, over its axes as Auto ones, unless the function itself names others.
    """
    jitted = jax.jit(function, static_argnums=static_argnums, static_argnames=static_argnames)
    args, kwargs = _of_types(arguments_of, types)
    if args is None:
        jitted = jax.jit(_of_leaves(function, arguments_of))
        args, kwargs = tuple(types), {}

    def trace() -> Any:
        return jitted.trace(*args, **kwargs)

    if auto_mesh_of is None:
        return _results(trace())
    return _results(traced_over(lambda: over_auto_axes(auto_mesh_of), trace))


def traced_over(mesh: Callable[[], AbstractContextManager[Any]], trace: Callable[[], Any]) -> Any:
    """What is traced over a mesh; in no mesh, where the function itself names another one.

    Nor where JAX knows a derivative or a batch in no mesh alone, as of grouped convolutions. Raises
    what is wrong over the mesh that is given, and where that is in context anyway.
    """
    over = None
    try:
        with mesh():
            over = jax.sharding.get_abstract_mesh().shape
            return trace()
    except (TypeError, ValueError, NotImplementedError) as error:
        ours = isinstance(error, MeshwiseError)
        if ours or jax.sharding.get_abstract_mesh().shape == over:
            raise
        try:
            with without_mesh():
                return trace()
        except Exception:
            raise error from None


def _of_types(arguments_of: Callable[..., Any], types: Sequence[Any]) -> Any:
    """Arguments that are types; None where a class looks at its leaves, and knows arrays alone."""
    try:
        args, kwargs = arguments_of(types)
    except Exception:
        return None, None
    given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
    return (args, kwargs) if all(id(of) in given for of in types) else (None, None)


def _of_leaves(function: Callable[..., Any], arguments_of: Callable[..., Any]) -> Any:
    """A function of its arguments' leaves."""

    def of_leaves(*leaves: Any) -> Any:
        args, kwargs = arguments_of(leaves)
        return function(*args, **kwargs)

    of_leaves.__name__ = getattr(function, "__name__", "fn")
    return of_leaves


def _results(traced: Any) -> tuple[ClosedJaxpr, list[Any], Any]:
    jaxpr = _of_low_types(traced.jaxpr)
    return jaxpr, list(traced._consts), traced.out_tree


def _of_low_types(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same of primitives that XLA knows, where it has some that JAX takes apart by itself.

    Not where it takes or returns what is no array.
    """
    if not jaxpr.jaxpr.is_high or any(a.is_high for a in (*jaxpr.in_avals, *jaxpr.out_avals)):
        return jaxpr
    return _partial_eval.lower_jaxpr2(jaxpr)


@contextmanager
def over_auto_axes(mesh: Any) -> Iterator[None]:
    """Named axes mean what they mean in a context of an Auto mesh.

    Hints inside may be PartitionSpecs, and no operator is refused for an ambiguous sharding.
    """
    with plain_types(), with_mesh(auto_mesh(mesh)):
        yield


@contextmanager
def over_typed_axes(mesh: Any = None) -> Iterator[None]:
    """As `jax.jit` traces: in the mesh in context, or in that of a program that names its own."""
    context = jax.sharding.get_abstract_mesh()
    own = context if mesh is None else getattr(mesh, "abstract_mesh", mesh)
    with nullcontext() if own == context else with_mesh(own):
        yield


def leak_summary(leak: Any) -> str:
    """What a leaked tracer, or JAX's error about one, is and where it was made, in a few words."""
    text = str(leak if isinstance(leak, Exception) else _core.escaped_tracer_error(leak))
    kind = re.search(r"with type (.*?) wrapped in", text)
    line = re.search(r"created on line (\S+?:\d+)", text)
    function = re.search(r"when the value leaked was (.*) traced for", text)
    found = f"a traced {kind.group(1)}" if kind else text.splitlines()[0]
    if line:
        found += f", made at {line.group(1)}"
    return f"{found}, of {function.group(1)}" if function else found


def is_tracing() -> bool:
    """Whether a trace is going on (a jit being traced, a function being differentiated, ...)."""
    return not _core.trace_state_clean()


def is_staged() -> bool:
    """Whether what is called is written down, to be run later; not so where it runs at once.

    Functions that are differentiated or mapped run at once, outside of a jit.
    """
    trace = _core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, _partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def primal_of(value: Any) -> Any:
    """The value that is differentiated at, where one is; anything else as it is."""
    while isinstance(value, _core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    return value


def static_arguments(
    function: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Argument numbers and names, each inferred from the other where the signature allows."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        as_tuple = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        return as_tuple, names
    return _api_util.infer_argnums_and_argnames(signature, argnums, argnames)


def without_leak_checks() -> Any:
    """A context in which `jax.checking_leaks` checks nothing."""
    return _config.check_tracer_leaks(False)


def is_tracing_forbidden() -> bool:
    """Whether inside `jax.no_tracing`, where a function that is traced anew is an error."""
    return bool(_config.no_tracing.value)


def settings_key() -> Any:
    """Everything in JAX's configuration that a traced program depends on."""
    return _config.trace_context()


def context_mesh() -> Any:
    """The mesh of `jax.set_mesh`, None outside."""
    mesh = _mesh_lib.get_concrete_mesh()
    if not mesh.empty:
        return mesh
    abstract = jax.sharding.get_abstract_mesh()
    return None if abstract.empty else abstract


def manual_axes() -> tuple[Any, ...]:
    """The axes of the context's mesh that are manual, as inside `jax.shard_map`."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def block_mesh() -> Any:
    """The mesh of the older `with mesh:`, None outside."""
    mesh = _mesh_lib.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


@contextmanager
def without_mesh() -> Iterator[None]:
    """No mesh in context, as outside of `jax.set_mesh`; may be used within a trace too."""
    with with_mesh(_mesh_lib.empty_concrete_mesh):
        yield


@contextmanager
def with_mesh(mesh: Any) -> Iterator[None]:
    """A mesh in context in the place of another, as by `jax.set_mesh`; within a trace too.

    It may be of another size. One without devices leaves those in context where it is of the same,
    as `jax.sharding.use_abstract_mesh` does.
    """
    context = jax.sharding.get_abstract_mesh()
    concrete = mesh if isinstance(mesh, Mesh) else _mesh_lib.empty_concrete_mesh
    if concrete is not mesh and context.size == mesh.size:
        concrete = _mesh_lib.get_concrete_mesh()
    abstract_before = _ABSTRACT_MESH.swap_local(getattr(mesh, "abstract_mesh", mesh))
    concrete_before = _CONCRETE_MESH.swap_local(concrete)
    try:
        yield
    finally:
        _ABSTRACT_MESH.set_local(abstract_before)
        _CONCRETE_MESH.set_local(concrete_before)


def without_context_mesh(jaxpr: Any) -> Any:
    """The same jaxpr, open or closed, its equations bound to no mesh that was in context.

    JAX evaluates an equation in the context it was traced in; one traced under `jax.set_mesh`
    would clash with the mesh of the `shard_map` it is evaluated in.
    """
    return with_each(jaxpr, lambda eqn: [_without_context_mesh(eqn)])


def _without_context_mesh(eqn: JaxprEqn) -> JaxprEqn:
    eqn = with_bodies(eqn, without_context_mesh)
    if eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    with eqn.ctx.manager, without_mesh():
        return eqn.replace(ctx=_core.JaxprEqnContext())
