"""The primitive of `mw.like`: a kernel, and the plain function that says what it computes.

An equation of it holds a `Twin`. Outside meshwise it is what the kernel is. It is differentiated
as the reference is, and batched by batching both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.extend.core import Primitive

from meshwise._jax.explicit import is_typed

Flat = Callable[..., Sequence[Any]]  # of arrays to a list of arrays

mw_like_p = Primitive("mw_like")
mw_like_p.multiple_results = True


@dataclass(frozen=True)
class Batched:
    """A flat function over one more dim of some of its arguments, which leads every result."""

    function: Flat
    dims: tuple[int | None, ...]

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Apply it."""
        return jax.vmap(self.function, self.dims)(*args)


@dataclass(frozen=True)
class Twin:
    """A kernel and its reference, both functions of flat lists of arrays."""

    kernel: Flat
    reference: Flat
    name: str

    def batched(self, dims: tuple[int | None, ...]) -> "Twin":
        """Both over one more dim."""
        return Twin(Batched(self.kernel, dims), Batched(self.reference, dims), self.name)


def call_twin(twin: Twin, args: Sequence[Any]) -> list[Any]:
    """Bind a twin to arguments."""
    return mw_like_p.bind(*args, twin=twin)


@mw_like_p.def_impl
def _impl(*args: Any, twin: Twin) -> list[Any]:
    return list(twin.kernel(*args))


@mw_like_p.def_abstract_eval
def _abstract_eval(*avals: Any, twin: Twin) -> list[Any]:
    # A kernel has no types over Explicit axes; the reference has, and returns the same arrays.
    function = twin.reference if is_typed(avals) else twin.kernel
    return list(jax.make_jaxpr(function)(*avals).out_avals)


def _kernel(*args: Any, twin: Twin) -> list[Any]:
    return list(twin.kernel(*args))


_mlir.register_lowering(mw_like_p, _mlir.lower_fun(_kernel, multiple_results=True))


def _batch(args: Sequence[Any], dims: Sequence[Any], *, twin: Twin) -> tuple[list[Any], list[int]]:
    mapped = tuple([d if isinstance(d, int) else None for d in dims])
    outs = mw_like_p.bind(*args, twin=twin.batched(mapped))
    return outs, [0] * len(outs)


_batching.primitive_batchers[mw_like_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, twin: Twin) -> tuple[Any, list[Any]]:
    """The kernel's results, and the tangents of the reference at the same arguments."""
    moving = [i for i, t in enumerate(tangents) if type(t) is not _ad_util.Zero]

    def along(*moved: Any) -> list[Any]:
        args = list(primals)
        for i, x in zip(moving, moved, strict=True):
            args[i] = x
        return list(twin.reference(*args))

    outs = mw_like_p.bind(*primals, twin=twin)
    directions = [tangents[i] for i in moving]
    found = jax.jvp(along, [primals[i] for i in moving], directions)[1]
    return outs, [
        _ad_util.Zero(jax.typeof(t)) if t.dtype == jax.dtypes.float0 else t for t in found
    ]


_ad.primitive_jvps[mw_like_p] = _jvp
