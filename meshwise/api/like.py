"""`mw.like`: an opaque kernel, partitioned as the plain function that it computes is."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import Twin
from meshwise.api.arguments import describe, name_of
from meshwise.errors import ArgumentError, RuleError, message


@_jax.hides_frames
def like(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that is partitioned as a plain function of the same arguments would be.

    `kernel` may be anything that JAX calls and cannot look into: a `pallas_call`, foreign code, a
    callback. `reference` computes the same in plain JAX, at whatever shapes; it is not run, but
    the rules of its operators say which dims may be split and which results are then summed.
    Under `mw.jit` each device calls the kernel on its part; elsewhere this is the kernel.

    Gradients are those of the reference. Those of a kernel that is a `jax.custom_vjp` are its
    own: its backward pass is partitioned as the reference's. `jax.vmap` maps both.

    Arguments and results are arrays or trees of them; bind anything else with
    `functools.partial`. Neither function may close over traced values.

    >>> double = like(lambda x: x + x, lambda x: 2 * x)
    >>> double(jax.numpy.ones(3)).sum()
    Array(6., dtype=float32)
    """
    _refuse_no_functions(kernel, reference)

    @functools.wraps(kernel)
    @_jax.hides_frames
    def liked(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        name = name_of(kernel)
        _refuse_no_arrays(name, leaves)
        out_tree, types = _results(name, kernel, reference, args, kwargs)
        twin = Twin(_Flattened(kernel, tree), _Flattened(reference, tree), name)
        if _has_own_gradient(kernel):
            outs = _with_own_gradient(twin, leaves, types)
        else:
            outs = _jax.call_twin(twin, leaves)
        return jax.tree.unflatten(out_tree, outs)

    return liked


@dataclass(frozen=True)
class _Flattened:
    """A function of trees as one of their leaves, with x64 as it is where it is called."""

    function: Callable[..., Any]
    tree: Any
    is_wide: bool = field(default_factory=_jax.x64_is_on)

    def __call__(self, *leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        with _jax.x64(self.is_wide):
            return jax.tree.leaves(self.function(*args, **kwargs))


@dataclass(frozen=True)
class _Pullback:
    """The backward pass of a flat function: of its arguments and cotangents of its results.

    Only floats have cotangents: the arguments `moving` and the results `answered`.
    """

    function: Callable[..., Sequence[Any]]
    moving: tuple[int, ...]
    answered: tuple[int, ...]

    def __call__(self, *given: Any) -> Sequence[Any]:
        count = len(given) - len(self.answered)
        leaves, cotangents = list(given[:count]), given[count:]

        def along(*moved: Any) -> list[Any]:
            for i, x in zip(self.moving, moved, strict=True):
                leaves[i] = x
            outs = self.function(*leaves)
            return [outs[i] for i in self.answered]

        return jax.vjp(along, *(leaves[i] for i in self.moving))[1](list(cotangents))


def _has_own_gradient(kernel: Any) -> bool:
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    return isinstance(kernel, jax.custom_vjp)


def _with_own_gradient(twin: Twin, leaves: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    """The call of a twin whose backward pass is the kernel's, and like the reference's."""
    moving, answered = _floats(leaves), _floats(types)
    backward = Twin(
        _Pullback(twin.kernel, moving, answered),
        _Pullback(twin.reference, moving, answered),
        f"the backward pass of {twin.name}",
    )

    @jax.custom_vjp
    def call(*leaves: Any) -> Any:
        return _jax.call_twin(twin, leaves)

    def forward(*leaves: Any) -> tuple[Any, Any]:
        return _jax.call_twin(twin, leaves), leaves

    def pull_back(leaves: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        given = [cotangents[i] for i in answered]
        found = dict(zip(moving, _jax.call_twin(backward, [*leaves, *given]), strict=True))
        return tuple(found.get(i) for i in range(len(leaves)))

    call.defvjp(forward, pull_back)
    return call(*leaves)


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(values) if jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _refuse_no_functions(kernel: Any, reference: Any) -> None:
    both = {"kernel": kernel, "reference": reference}
    offenders = [f"{which}: {describe(f)}" for which, f in both.items() if not callable(f)]
    if offenders:
        raise ArgumentError(
            message(
                "mw.like was given what is no function",
                offenders,
                "A kernel and its reference are functions of the same arrays.",
                "Pass both, as in mw.like(kernel, reference); the call comes after.",
            )
        )


def _refuse_no_arrays(name: str, leaves: Sequence[Any]) -> None:
    offenders = [describe(leaf) for leaf in leaves if _jax.array_type(leaf) is None]
    if offenders:
        raise ArgumentError(
            message(
                f"{name}, a kernel of mw.like, was called with arguments that are no arrays",
                offenders,
                "Arguments are arrays, numbers, or trees of them.",
                "Bind others to the kernel and to its reference with functools.partial.",
            )
        )


def _results(
    name: str, kernel: Any, reference: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Tree and types of the results; an error where the two functions differ in them."""
    found = []
    # Kernels are traced for local arrays: axes of an Explicit mesh are not part of their types.
    plain = _jax.over_auto_axes(jax.sharding.get_abstract_mesh())
    for which, function, context in (
        ("kernel", kernel, plain),
        ("reference", reference, nullcontext()),
    ):
        with context:
            closed, out = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaks = [c for c in closed.consts if isinstance(c, _jax.Tracer)]
        if leaks:
            raise ArgumentError(
                message(
                    f"the {which} of mw.like for {name} closes over traced values",
                    [_jax.leak_summary(leak) for leak in leaks],
                    "A kernel is called with each device's part of its arguments, and of nothing "
                    "else.",
                    "Pass them as arguments.",
                )
            )
        found.append((jax.tree.structure(out), jax.tree.leaves(out)))
    (tree, types), (other_tree, others) = found
    if tree != other_tree:
        raise _differ(name, [f"the kernel returns {tree}, the reference {other_tree}"])
    pairs = zip(types, others, strict=True)
    offenders = [
        f"result {i}: the kernel's is {_text(a)}, the reference's {_text(b)}"
        for i, (a, b) in enumerate(pairs)
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if offenders:
        raise _differ(name, offenders)
    return tree, types


def _differ(name: str, offenders: Sequence[str]) -> RuleError:
    return RuleError(
        message(
            f"{name} and its reference in mw.like do not return the same",
            offenders,
            "A reference computes what the kernel does.",
            "Correct one of the two; a cast in the reference costs nothing, as it is not run.",
        )
    )


def _text(struct: Any) -> str:
    return f"{struct.dtype}[{','.join(map(str, struct.shape))}]"
