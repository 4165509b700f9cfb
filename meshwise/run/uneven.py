"""What a program returns where a dim does not divide over its devices.

JAX has no arrays whose shards differ in size. An `UnevenArray` wraps the padded, sharded
`jax.Array` that the program made and shows the logical one. It is a leaf of a tree, so state
keeps its structure, and goes back into the next step as it is, with nothing moved or copied.
Everywhere else it stands for its logical value: NumPy, `jax.numpy` and `jax.jit` take it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.errors import ArgumentError, DeletedArrayError, MeshwiseError, also, message
from meshwise.ir.numbers import whole_number
from meshwise.run.padding import cut_array, even_sharding


@dataclass(frozen=True)
class UnevenShard:
    """The logical part of one device's shard; `index` are the rows of the logical array."""

    device: Any
    index: tuple[slice, ...]
    replica_id: int
    data: jax.Array


def misfit_of(padded: Any, shape: Any) -> str | None:
    """Why something is not an array of a shape with its padding, in words; None where it is."""
    sizes = [whole_number(size) for size in shape] if isinstance(shape, Iterable) else [None]
    if None in sizes:
        return f"{shape!r:.60} is no shape: its sizes are whole numbers"
    shape = tuple([size for size in sizes if size is not None])
    sharding = getattr(padded, "sharding", None)  # an array of NumPy lies nowhere
    if not isinstance(sharding, NamedSharding):
        return f"it is sharded by a NamedSharding, not by {sharding}"
    if len(shape) != padded.ndim or shape == padded.shape:
        return f"an array of shape {padded.shape} is not {shape} with padding"
    local = sharding.shard_shape(padded.shape)
    for dim, (size, held, part) in enumerate(zip(shape, padded.shape, local, strict=True)):
        shards = held // part if part else 1
        if held != -(-size // shards) * shards:
            return (
                f"dim {dim} of size {size} over {shards} devices is padded to"
                f" {-(-size // shards) * shards}, but the padded array {padded.shape} has"
                f" {held} there"
            )
    return None


def no_padding(offenders: Sequence[str]) -> MeshwiseError:
    """The error for what is no padded array; of a value, as NumPy's for a shape is."""
    error = ArgumentError(
        message(
            "mw.UnevenArray was given no padded array of that shape",
            offenders,
            "It wraps what devices hold where a dim does not divide: the dim rounded up to a "
            "multiple of its shards.",
            "Have one made of an ordinary array: mw.reshard(x, sharding), or a step's argument. "
            "What was written on another mesh is read as mw.padded says of the types on this one.",
        )
    )
    return also(error, ValueError)


def deleted_error(asked: str, gone: Iterable[tuple[str, Any]]) -> DeletedArrayError:
    """The error for arrays whose buffers are gone, each with what it is called."""
    return DeletedArrayError(
        message(
            asked,
            [
                f"{name}Array has been deleted with shape={jax.typeof(array).str_short()}."
                for name, array in gone
            ],
            "A call that donates an argument (donate_argnums, donate_argnames) gives its "
            "buffers to the results.",
            "Go on with the results of that call, or do not donate what is needed again.",
        )
    )


class UnevenArray:
    """A sharded array one of whose dims does not divide over its devices.

    `padded` is what the devices hold: each uneven dim is rounded up to a multiple of its shards,
    and what stands in the padding is undefined. Every public attribute and operator of `jax.Array`
    is here too and means the logical value.
    """

    __slots__ = ("__weakref__", "padded", "shape")
    __hash__ = None  # type: ignore[assignment]
    # NumPy leaves `numpy_array + uneven_array` to us, as it does to jax.Array.
    __array_priority__ = 100

    padded: jax.Array
    shape: tuple[int, ...]

    @_jax.hides_frames
    def __init__(self, padded: jax.Array, shape: Sequence[int]):
        """Wrap a padded array; its sharding must be a `NamedSharding` that explains the padding."""
        shape = tuple(shape) if isinstance(shape, Iterable) else shape  # which is read twice
        if (misfit := misfit_of(padded, shape)) is not None:
            raise no_padding([misfit])
        self.padded = padded
        self.shape = tuple([int(size) for size in shape])

    @property
    def _held(self) -> jax.Array:
        """What the devices hold; an error where its buffers are gone."""
        if self.padded.is_deleted():
            raise deleted_error("An mw.UnevenArray whose buffers are gone was read", [("", self)])
        return self.padded

    @property
    def value(self) -> jax.Array:
        """An ordinary array of the logical shape; whole along the uneven dims. Moves data."""
        return cut_array(self._held, self.shape)

    @property
    def sharding(self) -> NamedSharding:
        """How the array lies on the user's mesh."""
        sharding: Any = self.padded.sharding
        if _jax.is_called_by_jax():
            # JAX refuses a sharding that does not divide; jax.jit will be handed `value`.
            return even_sharding(sharding, self.shape, self.padded.shape)
        return sharding

    @property
    def dtype(self) -> Any:
        """Type of the elements."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements, padding not counted."""
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, padding not counted."""
        return self.size * self.itemsize

    @property
    def weak_type(self) -> bool:
        """Whether the type gives way to others in arithmetic."""
        return _jax.is_weak(self)

    @property
    def aval(self) -> Any:
        """The abstract value: logical shape and type."""
        return _jax.aval_of_shape(self.padded, self.shape)

    @property
    def committed(self) -> bool:
        """Always on purpose where it is."""
        return True

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process holds all shards."""
        return self.padded.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """Never: an uneven dim is sharded."""
        return False

    @property
    def addressable_shards(self) -> list[UnevenShard]:
        """The shards of this process, each without its padding."""
        return [_logical_shard(s, self.shape) for s in self._held.addressable_shards]

    def block_until_ready(self) -> "UnevenArray":
        """Wait until the devices have computed it."""
        self._held.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Begin to copy it to the host."""
        self._held.copy_to_host_async()

    def copy(self) -> "UnevenArray":
        """The same in buffers of its own."""
        with _jax.moving():
            return UnevenArray(self._held.copy(), self.shape)

    def delete(self) -> None:
        """Free the devices' buffers."""
        self.padded.delete()

    def is_deleted(self) -> bool:
        """Whether the buffers are freed, by `delete` or by donation."""
        return self.padded.is_deleted()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.size == 0:
            host = np.empty(self.shape, self.padded.dtype)  # JAX cannot put empty shards together
        else:
            host = np.asarray(self._held)[tuple(slice(n) for n in self.shape)]
        if copy is False and dtype is not None and host.dtype != dtype:
            raise ValueError(f"to change {host.dtype} to {dtype}, NumPy must copy")
        return np.array(host, dtype) if copy else np.asarray(host, dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """An error of JAX's own: it lies on several devices, as every uneven array does."""
        return self._held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """The same error."""
        held: Any = self._held
        return held.__dlpack_device__()

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __getattr__(self, name: str) -> Any:
        """What else `jax.Array` has, of the logical value."""
        if name.startswith("_") or not hasattr(type(self.padded), name):
            raise AttributeError(f"UnevenArray has no attribute {name!r}")
        return getattr(self.value, name)

    def __dir__(self) -> list[str]:
        own = object.__dir__(self)
        return sorted({*own, *(n for n in dir(self.padded) if not n.startswith("_"))})

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __repr__(self) -> str:
        note = f"padded to {self.padded.shape} on {self.sharding.num_devices} devices"
        if not self.is_fully_addressable or self.is_deleted():
            state = "deleted" if self.is_deleted() else "not all here"
            return f"UnevenArray(<{state}>, shape={self.shape}, dtype={self.dtype}, {note})"
        if jax.numpy.issubdtype(self.dtype, _jax.extended):
            return f"UnevenArray(shape={self.shape}, dtype={self.dtype}, {note})"
        text = np.array2string(np.asarray(self), prefix="UnevenArray(", separator=", ")
        return f"UnevenArray({text}, dtype={self.dtype}, {note})"

    def __format__(self, spec: str) -> str:
        is_shown = spec and self.is_fully_addressable
        return format(np.asarray(self)[()], spec) if is_shown else str(self)

    def __str__(self) -> str:
        is_keys = jax.numpy.issubdtype(self.dtype, _jax.extended)
        is_shown = self.is_fully_addressable and not is_keys  # as of a jax.Array
        return str(np.asarray(self)) if is_shown else repr(self)

    def __copy__(self) -> "UnevenArray":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "UnevenArray":
        return self.copy()

    def __reduce__(self) -> Any:
        """Pickled like `jax.Array`: the numbers, not the devices."""
        return jax.numpy.asarray, (np.asarray(self),)


_UNARY = ("neg", "pos", "abs", "invert", "round", "float", "int", "bool", "complex", "index")
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_COMPARING = ("lt", "le", "eq", "ne", "gt", "ge")


def _forward(name: str) -> Callable[..., Any]:
    def method(self: UnevenArray, *args: Any) -> Any:
        values = [a.value if isinstance(a, UnevenArray) else a for a in args]
        return getattr(self.value, name)(*values)

    method.__name__ = method.__qualname__ = name
    return method


@dataclass(frozen=True)
class _Wrapping:
    """A padded array as a tree that is put together again as an `UnevenArray`."""

    padded: jax.Array
    shape: tuple[int, ...]


def wrapping(leaf: Any) -> Any:
    """A leaf as a tree of arrays of JAX, which gives the leaf's like where it is put together."""
    return _Wrapping(leaf.padded, leaf.shape) if type(leaf) is UnevenArray else leaf


def wrap(padded: jax.Array, shape: tuple[int, ...]) -> UnevenArray:
    """An `UnevenArray` of what is known to be padded as its sharding says."""
    made = object.__new__(UnevenArray)
    made.padded = padded
    made.shape = shape
    return made


def _wrapped(shape: Any, leaves: Any) -> Any:
    return wrap(leaves[0], shape)


jax.tree_util.register_pytree_node(_Wrapping, lambda w: ((w.padded,), w.shape), _wrapped)


for _name in (*_UNARY, *_BINARY, *(f"r{n}" for n in _BINARY), *_COMPARING, "getitem"):
    setattr(UnevenArray, f"__{_name}__", _forward(f"__{_name}__"))

_jax.register_array(UnevenArray, lambda array: array.aval, lambda array: array.value)


def _logical_shard(shard: Any, shape: tuple[int, ...]) -> UnevenShard:
    """One device's shard, cut to the rows that exist."""
    index = []
    for part, size in zip(shard.index, shape, strict=False):  # a PRNG key's data has dims too
        start, stop, _ = part.indices(max(size, part.stop or size))
        index.append(slice(min(start, size), min(stop, size)))
    data = shard.data[tuple(slice(i.stop - i.start) for i in index)]
    return UnevenShard(shard.device, tuple(index), shard.replica_id, data)
