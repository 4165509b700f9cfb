"""The primitives of communication verbs, in programs whose values have layouts.

A verb keeps the shape and type of its last operand. It is an equation for whoever reads the jaxpr;
it cannot be run: evaluated or compiled, it raises what it was made to raise.
"""

from collections.abc import Callable
from typing import Any

from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from meshwise._jax.jaxprs import Primitive


def new_verb(name: str, refusal: Callable[..., Exception]) -> Primitive:
    """A primitive that stands in a jaxpr; `refusal` makes the error for where it would be run.

    Of its name; and of what would be done with it, where that is a transformation of JAX's.
    """
    primitive = Primitive(f"mw_{name}")

    def refuse(*_: Any, **params: Any) -> Any:
        del params
        raise refusal(name)

    primitive.def_impl(refuse)
    primitive.def_abstract_eval(lambda *avals, **params: avals[-1])
    _mlir.register_lowering(primitive, refuse)

    def refuse_to(what: str) -> Callable[..., Any]:
        def refuse_transformed(*_: Any, **__: Any) -> Any:
            raise refusal(name, what)

        return refuse_transformed

    _ad.primitive_jvps[primitive] = refuse_to("differentiated")
    _batching.primitive_batchers[primitive] = refuse_to("mapped")
    return primitive
