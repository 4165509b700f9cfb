"""Calling a compiled program from C++, and arrays of our own that JAX takes as arguments."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import jax
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import dispatch as _jax_dispatch
from jax._src import dtypes as _dtypes
from jax._src import sharding_impls as _sharding_impls
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.random import prng as _prng
from jaxlib import _jax as _xla  # pyright: ignore[reportAttributeAccessIssue]

from meshwise._jax.buffers import sharing
from meshwise._jax.jaxprs import extended

# The classes of `jax.Array`s that are no tracers.
ARRAY_CLASSES = (_xla.ArrayImpl, _prng.PRNGKeyArray)

# A result is not a number, under `jax.debug_nans` or `jax.debug_infs`.
InternalNanError = _api_util.InternalFloatingPointError

# Before 0.11.1 a donated argument that a later call reads ends the process where there are several
# devices; since then it is an error.
SURVIVES_DONATED_ARGUMENTS = jax.__version_info__ >= (0, 11, 1)


def call_anew(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """What JAX's dispatch is told of a call under `jax.jit` that it has not seen before.

    The results, what it needs to repeat the call, and whether to come back.
    """
    return jitted._cache_miss(*args, **kwargs)


def refuse_nans(name: str, shards: Sequence[Any]) -> None:
    """The error of a result that is not a number, where one of its parts is none."""
    _jax_dispatch.check_special(name, shards)


def raise_where_found(
    found: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> NoReturn:
    """Call a function step by step, for the FloatingPointError of the line that is to blame.

    Where the function by itself makes no NaN or infinity, a FloatingPointError says so.
    """
    _api_util.maybe_recursive_nan_check(found, function, args, kwargs)


def caller(compiled: Any) -> Callable[..., Any]:
    """A `Compiled` as a function of its arguments.

    JAX reports arrays of types of fewer than eight bits in another layout than compiled programs
    want, and would refuse them; such a program is called without that comparison.
    """
    executable = compiled._executable
    if not any(_bits(a.dtype) < 8 for a in executable.in_avals):
        return compiled
    consts = compiled._params.const_args
    return lambda *args: jax.tree.unflatten(
        compiled.out_tree, executable.unsafe_call(*consts, *jax.tree.leaves(args))
    )


def _bits(dtype: Any) -> int:
    is_of_jax = jax.numpy.issubdtype(dtype, extended) or dtype == jax.dtypes.float0
    return 8 if is_of_jax else _dtypes.itemsize_bits(dtype)


def kept_with_function(make: Callable[..., Any]) -> Any:
    """A function of a function (of which it keeps no hold) and a key, called once for each.

    `jax.clear_caches` clears it.
    """
    return _util.weakref_lru_cache(make, trace_context_in_key=False)


def guarded(
    dispatch: Callable[..., Any],
    look: Callable[..., None],
    base_of: Callable[[Any], Any],
    held: Callable[[], Collection[Any]],
) -> Callable[..., Any]:
    """`dispatch` of a function that donates, and `look(args, kwargs)` where it fails, to say why.

    It looks before, where buffers come twice (those of `base_of` the arguments), or are `held` by
    programs: a donated buffer that the same call reads ends the process, or, where only some of the
    devices have it, the others wait for these ever after. Where a later call that reads it ends the
    process, what was donated is deleted afterwards: then that call only fails. All of this is paid
    for in every call; one that donates nothing comes to `miss` where it fails.
    """
    flatten, array = _tree_util.default_registry.flatten, _xla.ArrayImpl

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = flatten((args, kwargs))[0]
        bases = [x if type(x) is array else base_of(x) for x in leaves]
        if sharing([*bases, *held()]):
            look(args, kwargs)
        try:
            outs = dispatch(*args, **kwargs)
        except (RuntimeError, ValueError):
            look(args, kwargs)
            raise
        for leaf in () if SURVIVES_DONATED_ARGUMENTS else leaves:
            if leaf.is_deleted() if type(leaf) is array else _is_gone(leaf):
                leaf.delete()
        return outs

    return call


def _is_gone(leaf: Any) -> bool:
    """Whether an argument of whatever kind is an array that is deleted."""
    if isinstance(leaf, _core.Tracer) or not hasattr(leaf, "is_deleted"):
        return False
    return leaf.is_deleted()


def register_array(
    kind: type, aval_of: Callable[[Any], Any], value_of: Callable[[Any], Any]
) -> None:
    """Let JAX's functions take objects of a class as the arrays that `value_of` makes of them."""
    _core.pytype_aval_mappings[kind] = aval_of
    _dtypes.register_canonicalize_value_handler(kind, value_of)
    _pxla.shard_arg_handlers[kind] = lambda objects, *places: _pxla.shard_args(
        *places, [value_of(o) for o in objects]
    )


def is_weak(array: Any) -> bool:
    """Whether an array's type gives way to others in arithmetic; that of keys does not."""
    return bool(getattr(array.aval, "weak_type", False))


def with_weak_type(array: Any, weak: bool) -> Any:
    """An array of the same numbers whose type gives way to others in arithmetic, or does not."""
    if getattr(jax.typeof(array), "weak_type", False) == weak:
        return array
    return _lax._convert_element_type(array, weak_type=weak)


def aval_of_shape(array: Any, shape: Sequence[int]) -> Any:
    """The abstract value of an array had it another shape, without a sharding."""
    return _core.ShapedArray(tuple(shape), array.dtype, weak_type=is_weak(array))


def asks_for_devices(closed: Any) -> bool:
    """Whether a jaxpr has primitives that are lowered for given devices, as calls of the host."""
    return _jax_dispatch.jaxpr_has_prim_requiring_devices(closed.jaxpr)


def is_called_by_jax() -> bool:
    """Whether the property that asks is read by the dispatch of `jax.jit`, or by `zeros_like`."""
    return sys._getframe(2).f_globals.get("__name__") in ("jax._src.pjit", "jax._src.lax.lax")


def dispatcher(
    name: str,
    function: Callable[..., Any],
    miss: Callable[..., tuple[Any, Any, bool]],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Any:
    """A function called through the same C++ dispatch as `jax.jit`'s.

    `miss(*args, **kwargs)` gives the results, what `fast_path` made of them, or None, and whether
    the next call is to come back. Where it is not None, later calls with arguments of the same
    types, placement and static values, in the same context, run the program without entering
    Python. Under `jax.disable_jit` the function itself is called. What JAX does where a result is
    not a number and `jax.debug_nans` is on, it does with `_fun`.
    """
    dispatch = _xla.pjit(
        name,
        function,
        miss,
        list(static_argnums),
        list(static_argnames),
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )
    dispatch._fun = function
    return dispatch


def fast_path(compiled: Any, results: Any, held: Sequence[Any] = ()) -> Any:
    """What `dispatcher` needs to run a `Compiled` by itself; None where it has to stay in Python.

    `results` are those of one call, as a tree: later ones are given in its structure. `held` are
    values, in their place, of the first arguments, which calls leave out.
    """
    executable = compiled._executable
    if not isinstance(executable, _pxla.MeshExecutable):
        return None
    call = executable.unsafe_call
    if not isinstance(call, _pxla.ExecuteReplicated):
        return None
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    flat, tree = _tree_util.dispatch_registry.flatten(results, None)
    if not all(type(out) is _xla.ArrayImpl for out in flat):
        return None
    in_shardings = [
        _sharding_impls.physical_sharding(a, s) if jax.numpy.issubdtype(a.dtype, extended) else s
        for s, a in zip(executable._in_shardings, executable.in_avals, strict=True)
    ]
    const_args = executable.shard_const_args(compiled._params.const_args)
    arg_count = len(const_args) + compiled.in_tree.num_leaves
    fixed = [getattr(x, "_base_array", x) for x in held]
    return _pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        tree,
        in_shardings,
        executable._out_shardings,
        [out.aval for out in flat],
        [out._committed for out in flat],
        [i in executable._kept_var_idx for i in range(arg_count)],
        executable._dispatch_in_layouts,
        [*const_args, *fixed],
    )
