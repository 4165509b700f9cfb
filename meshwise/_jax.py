"""The only file that touches JAX's private or semi-private parts.

What is used, and since when: `jax.extend.core` (jaxpr classes; semi-public), `jax._src.core`
(`eval_context` pieces; private), `jax._src.source_info_util` (user lines; private),
`jax._src.interpreters` (rules of our call primitive, in `_call.py`'s stead; private).
For `run`: `jax._src.dtypes`, `jax._src.interpreters.pxla`, `jax._src.sharding_impls` and
`jaxlib._jax` (arrays of our own class as arguments, the dispatch of `jax.jit`; private).
Supported: jax 0.10.2 and 0.11.x. In 0.11 `Jaxpr` and `ClosedJaxpr` are one class, which has
`.jaxpr` and `.consts` still.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh_lib
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util
from jax._src import tree_util as _tree_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.sharding_impls import UNSPECIFIED, UnspecifiedValue
from jax.extend import core as _xcore
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core import primitives as _xprimitives
from jaxlib import _jax as _xla

DropVar = _core.DropVar
Tracer = jax.core.Tracer
extended = jax.dtypes.extended


def new_var(aval: Any) -> Var:
    """A fresh variable of a type."""
    return Var(aval)


def close_jaxpr(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    consts: Sequence[Any],
) -> ClosedJaxpr:
    """A closed jaxpr of some equations."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    debug_info = _core.DebugInfo(
        "meshwise", "meshwise", ("",) * len(invars), ("",) * len(outvars)
    )
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info)
    return ClosedJaxpr(jaxpr, list(consts))


def make_jaxpr_over_axes(
    function: Callable[..., Any], axes: Sequence[tuple[str, int]], args: Sequence[Any]
) -> ClosedJaxpr:
    """Trace a function of local arrays in which the named axes may be used in collectives.

    No mesh is in context: constants made on the way are to lie on no mesh.
    """
    with _config._check_vma(False), without_mesh():
        return jax.make_jaxpr(function, axis_env=list(axes))(*args)


@contextmanager
def at_source(eqn: JaxprEqn) -> Iterator[None]:
    """Equations bound inside carry the source line and names of a given equation."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack):
        yield


def bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Apply an equation's primitive to other arguments, perhaps with other parameters.

    The equation's own context and output shardings are left behind: they speak of the mesh of the
    user's trace.
    """
    params = dict(eqn.params if params is None else params)
    params.update({name: None for name in ("sharding", "out_sharding") if name in params})
    bind_params = eqn.primitive.get_bind_params(params)
    out = eqn.primitive.bind(*args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def source_summary(eqn: JaxprEqn) -> str:
    """The user's line of an equation as `file:line (function)`, or `unknown`."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "unknown"
    return f"{frame.file_name}:{frame.start_line}"


def rename(eqn: JaxprEqn, invars: Sequence[Any], outvars: Sequence[Var], call: JaxprEqn | None = None) -> JaxprEqn:
    """The same equation on other variables; inside a call its names are prefixed by the call's."""
    if call is None:
        return eqn.replace(invars=list(invars), outvars=list(outvars))
    info = eqn.source_info
    stack = call.source_info.name_stack + info.name_stack
    traceback = info.traceback or call.source_info.traceback
    info = info.replace(name_stack=stack, traceback=traceback)
    return eqn.replace(invars=list(invars), outvars=list(outvars), source_info=info)


def is_unspecified(sharding: Any) -> bool:
    """Whether JAX's marker for a sharding that was not given."""
    return sharding is None or isinstance(sharding, UnspecifiedValue)


def type_of(value: Any) -> Any:
    """The abstract value of an array, tracer or literal."""
    return jax.typeof(value)


def prefix_errors(prefix: Any, tree: Any) -> list[str]:
    """Where `prefix` fails to be a prefix of `tree`, in words."""
    errors = _tree_util.prefix_errors(prefix, tree, is_leaf=lambda x: x is None)
    return [str(make("shardings")) for make in errors]


threefry_partitionable: Callable[[], bool] = lambda: bool(_config.threefry_partitionable.value)


def key_impl_name(aval: Any) -> str | None:
    """The name of the generator of a typed key array, None for other arrays."""
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return None
    return aval.dtype._impl.name


# --- calls: what may be inlined, and how -----------------------------------------------------


class CallBody:
    """The body of a call-like equation and the shardings the call gives its inputs and outputs."""

    __slots__ = ("consts", "in_specs", "jaxpr", "out_specs", "recomputed")

    def __init__(
        self,
        body: Any,
        in_specs: Sequence[Any] | None = None,
        out_specs: Sequence[Any] | None = None,
        recomputed: bool = False,
    ):
        """`body` is a Jaxpr or ClosedJaxpr; specs are None where nothing was said."""
        self.jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        self.consts = body.consts if isinstance(body, ClosedJaxpr) else ()
        self.in_specs = in_specs or (None,) * len(self.jaxpr.invars)
        self.out_specs = out_specs or (None,) * len(self.jaxpr.outvars)
        self.recomputed = recomputed


def _known(shardings: Sequence[Any]) -> list[Any]:
    return [None if is_unspecified(s) else s for s in shardings]


def _jit_body(params: dict[str, Any]) -> CallBody:
    in_specs, out_specs = _known(params["in_shardings"]), _known(params["out_shardings"])
    return CallBody(params["jaxpr"], in_specs, out_specs)


def _remat_body(params: dict[str, Any]) -> CallBody:
    prevents = params["prevent_cse"]
    barrier = any(prevents) if isinstance(prevents, tuple) else prevents
    return CallBody(params["jaxpr"], recomputed=params["differentiated"] and barrier)


_CALLS: dict[str, Callable[[dict[str, Any]], CallBody]] = {
    "jit": _jit_body,
    "pjit": _jit_body,
    "remat2": _remat_body,
    "checkpoint": _remat_body,
    "closed_call": lambda params: CallBody(params["call_jaxpr"]),
    "core_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_jvp_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_vjp_call": lambda params: CallBody(params["call_jaxpr"]),
    "custom_vmap_call": lambda params: CallBody(params["call"]),
    "mw_call": lambda params: CallBody(params["jaxpr"], params["in_specs"], params["out_specs"]),
}


def call_body(eqn: JaxprEqn) -> CallBody | None:
    """The body of a call-like equation, None for any other."""
    read = _CALLS.get(eqn.primitive.name)
    return read(eqn.params) if read else None


def new_eqn(
    primitive: Primitive,
    invars: Sequence[Any],
    outvars: Sequence[Var],
    params: dict[str, Any],
    like: JaxprEqn,
) -> JaxprEqn:
    """An equation without effects that carries another one's source line and context."""
    return _core.new_jaxpr_eqn(
        list(invars), list(outvars), primitive, params, _core.no_effects, like.source_info, like.ctx
    )


def constraint_of(eqn: JaxprEqn) -> Any:
    """The sharding that a constraint in JAX's own words asks for, None for other equations.

    JAX inserts `reshard` equations of its own; over the Auto axes of our traces an entry None of
    theirs says nothing, so one that names no axis is no hint.
    """
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return eqn.params["sharding"]
    if name == "reshard" and any(eqn.params["dst_sharding"].spec):
        return eqn.params["dst_sharding"]
    return None


# --- the hint primitive: mw.shard --------------------------------------------------------------

hint_p = Primitive("hint")
hint_p.def_impl(lambda x, **params: x)
hint_p.def_abstract_eval(lambda x, **params: x)
_ad.deflinear2(hint_p, lambda ct, _, **params: (hint_p.bind(ct, **params),))


def _hint_batcher(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int], *, sharding: Any, **rest: Any
) -> tuple[Any, int]:
    """A mapped dim is sharded over vmap's `spmd_axis_name`, or left open where it has none."""
    entry = axis_data.spmd_name or jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    entries = list(spec) + [None] * (dims[0] - len(spec))
    entries.insert(dims[0], entry)
    batched = jax.sharding.PartitionSpec(*entries)
    if isinstance(sharding, jax.sharding.NamedSharding):
        batched = jax.sharding.NamedSharding(sharding.mesh, batched)
    return hint_p.bind(values[0], sharding=batched, **rest), dims[0]


_batching.fancy_primitive_batchers[hint_p] = _hint_batcher


def _hint_lowering(x: Any, *, sharding: Any, **_: Any) -> Any:
    """Outside meshwise a hint is a constraint where a mesh is known, and nothing elsewhere."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    automatic = all(t == jax.sharding.AxisType.Auto for t in mesh.axis_types)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.lax.with_sharding_constraint(x, sharding)
    if mesh.empty or not automatic:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


_mlir.register_lowering(hint_p, _mlir.lower_fun(_hint_lowering, multiple_results=False))


def without_hints(eqn: JaxprEqn) -> JaxprEqn:
    """The same equation with no hints in the bodies among its parameters.

    What is computed whole on every device has nothing to shard, and constraints cannot stand in
    a region where every mesh axis is manual.
    """
    if not any(_has_body(value) for value in eqn.params.values()):
        return eqn
    return eqn.replace(params={k: _strip(v) for k, v in eqn.params.items()})


def _has_body(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_has_body(v) for v in value)
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _strip(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_strip(v) for v in value)
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_strip(value.jaxpr))
    if not isinstance(value, Jaxpr):
        return value
    same: dict[Var, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    eqns = []
    for eqn in value.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive is hint_p or constraint_of(eqn) is not None:
            same[eqn.outvars[0]] = operands[0]
            continue
        eqn = without_hints(eqn.replace(invars=operands))
        if "in_shardings" in eqn.params and "out_shardings" in eqn.params:
            unspecified = {
                "in_shardings": (UNSPECIFIED,) * len(eqn.invars),
                "out_shardings": (UNSPECIFIED,) * len(eqn.outvars),
            }
            eqn = eqn.replace(params={**eqn.params, **unspecified})
        eqns.append(eqn)
    return value.replace(eqns=eqns, outvars=[read(a) for a in value.outvars])


def names_of(eqn: JaxprEqn) -> str:
    """The name scopes an equation was traced in, as text."""
    return str(eqn.source_info.name_stack)


# --- calling a user's function -----------------------------------------------------------------


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    axes: Sequence[tuple[str, int]],
) -> tuple[ClosedJaxpr, Any]:
    """Trace a function of abstract arguments; its jaxpr and the tree of its results.

    Named axes mean what they mean in a context of an Auto mesh of these sizes: hints inside may
    be PartitionSpecs, and no operator is refused for an ambiguous sharding.
    """
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=auto)
    jitted = jax.jit(function, static_argnums=static_argnums, static_argnames=static_argnames)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jitted.trace(*args, **kwargs)
    return traced.jaxpr, jax.tree.structure(traced.out_info)


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


def settings_key() -> Any:
    """Everything in JAX's configuration that a traced program depends on."""
    return _config.trace_context()


def abstract_array(value: Any) -> Any:
    """The abstract value of anything that JAX takes as an array; TypeError for anything else."""
    return _core.shaped_abstractify(value)


def context_mesh() -> Any:
    """The mesh of `jax.set_mesh` (or the older `with mesh:`), None outside."""
    mesh = _mesh_lib.get_concrete_mesh()
    if not mesh.empty:
        return mesh
    physical = _mesh_lib.thread_resources.env.physical_mesh
    if not physical.empty:
        return physical
    abstract = jax.sharding.get_abstract_mesh()
    return None if abstract.empty else abstract


threefry2x32_p: Primitive = _xprimitives.threefry2x32_p


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """The entry of a prefix tree for every leaf of a tree; ValueError where it is none.

    None in the prefix is an entry, PartitionSpecs are leaves.
    """
    return _tree_util.broadcast_prefix(prefix, tree, is_leaf=lambda x: x is None)


@contextmanager
def without_mesh() -> Iterator[None]:
    """No mesh in context, as outside of `jax.set_mesh`; may be used within a trace too."""
    abstract = _config.abstract_mesh_context_manager.swap_local(_mesh_lib.empty_abstract_mesh)
    concrete = _config.device_context.swap_local(_mesh_lib.empty_concrete_mesh)
    try:
        yield
    finally:
        _config.abstract_mesh_context_manager.set_local(abstract)
        _config.device_context.set_local(concrete)


def register_array(
    kind: type, aval_of: Callable[[Any], Any], value_of: Callable[[Any], Any]
) -> None:
    """Let JAX's functions take objects of a class as the arrays that `value_of` makes of them."""
    _core.pytype_aval_mappings[kind] = aval_of
    _dtypes.register_canonicalize_value_handler(kind, value_of)
    _pxla.shard_arg_handlers[kind] = lambda objects, *places: _pxla.shard_args(
        *places, [value_of(o) for o in objects]
    )


def aval_of_shape(array: Any, shape: Sequence[int]) -> Any:
    """The abstract value of an array had it another shape, without a sharding."""
    weak = bool(getattr(array.aval, "weak_type", False))
    return _core.ShapedArray(tuple(shape), array.dtype, weak_type=weak)


def is_called_by_jit() -> bool:
    """Whether the property that asks is being read by the dispatch of `jax.jit`."""
    return sys._getframe(2).f_globals.get("__name__") == "jax._src.pjit"


def without_context_mesh(jaxpr: Any) -> Any:
    """The same jaxpr, open or closed, its equations bound to no mesh that was in context.

    JAX evaluates an equation in the context it was traced in; one traced under `jax.set_mesh`
    would clash with the mesh of the `shard_map` it is evaluated in.
    """
    if isinstance(jaxpr, ClosedJaxpr) and jaxpr.jaxpr is not jaxpr:
        return jaxpr.replace(jaxpr=without_context_mesh(jaxpr.jaxpr))
    return jaxpr.replace(eqns=[_without_context_mesh(eqn) for eqn in jaxpr.eqns])


def _without_context_mesh(eqn: JaxprEqn) -> JaxprEqn:
    def clean(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(clean, value)) if any(map(_is_jaxpr, value)) else value
        return without_context_mesh(value) if _is_jaxpr(value) else value

    with eqn.ctx.manager, without_mesh():
        context = _core.JaxprEqnContext()
    return eqn.replace(ctx=context, params={k: clean(v) for k, v in eqn.params.items()})


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def literal_value(atom: Literal) -> Any:
    """A literal's value without the mesh of the trace it comes from; weak types stay weak."""
    if getattr(atom.aval, "weak_type", False):
        return np.asarray(atom.val).item()
    return np.asarray(atom.val, atom.aval.dtype)


def dispatcher(
    name: str,
    miss: Callable[..., tuple[Any, Any]],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Callable[..., Any]:
    """A function called through the same C++ dispatch as `jax.jit`'s.

    `miss(*args, **kwargs)` gives the results and what `fast_path` made of them, or None. Where it
    is not None, later calls with arguments of the same types, placement and static values, in the
    same context, run the program without entering Python.
    """

    def cache_miss(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        return *miss(*args, **kwargs), False

    def plain(*args: Any, **kwargs: Any) -> Any:
        return miss(*args, **kwargs)[0]

    return _xla.pjit(
        name,
        plain,
        cache_miss,
        list(static_argnums),
        list(static_argnames),
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )


def fast_path(compiled: Any, out_tree: Any, outs: Sequence[Any]) -> Any:
    """What `dispatcher` needs to run a `Compiled` by itself; None where it has to stay in Python.

    `outs` are the leaves of one call's results, in the order of `out_tree`.
    """
    executable = compiled._executable
    if not isinstance(executable, _pxla.MeshExecutable):
        return None
    call = executable.unsafe_call
    if not isinstance(call, _pxla.ExecuteReplicated):
        return None
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    flat, tree = _pxla.reflatten_outputs_for_dispatch(out_tree, list(outs))
    if not all(type(out) is _xla.ArrayImpl for out in flat):
        return None
    in_shardings = [
        _sharding_impls.physical_sharding(a, s) if jax.numpy.issubdtype(a.dtype, extended) else s
        for s, a in zip(executable._in_shardings, executable.in_avals, strict=True)
    ]
    const_args = executable.shard_const_args(compiled._params.const_args)
    arg_count = len(const_args) + compiled.in_tree.num_leaves
    return _pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        tree,
        in_shardings,
        executable._out_shardings,
        [out.aval for out in flat],
        [out._committed for out in flat],
        [i in executable._kept_var_idx for i in range(arg_count)],
        executable._dispatch_in_layouts,
        const_args,
    )
