"""The primitive of a region that a kernel computes: the kernel, and the jaxpr that it stands for.

Whoever reads a program reads the jaxpr (what is computed and sent); what runs is the kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir as _mlir
from jax.extend.core import ClosedJaxpr, Primitive

mw_kernel_p = Primitive("mw_kernel")
mw_kernel_p.multiple_results = True


def call_kernel(
    kernel: Callable[..., Sequence[Any]], jaxpr: ClosedJaxpr, name: str, args: Sequence[Any]
) -> list[Any]:
    """Bind a kernel, a function of arrays, that computes what a jaxpr says."""
    return mw_kernel_p.bind(*args, kernel=kernel, jaxpr=jaxpr, name=name)


@mw_kernel_p.def_impl
def _impl(*args: Any, kernel: Callable[..., Any], jaxpr: Any, name: str) -> list[Any]:
    del jaxpr, name
    return list(kernel(*args))


@mw_kernel_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, kernel: Callable[..., Any], jaxpr: Any, name: str) -> Any:
    """The jaxpr's types, and the kernel's effects: those of an interpreter, where there is one."""
    del name
    return list(jaxpr.out_avals), set(jax.make_jaxpr(kernel)(*avals).effects)


_mlir.register_lowering(mw_kernel_p, _mlir.lower_fun(_impl, multiple_results=True))
