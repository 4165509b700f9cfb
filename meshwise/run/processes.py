"""What several processes must agree on before an array of one of them is on the devices of all.

An array that was put nowhere in particular, of NumPy or of `jax.numpy`, is on each process's own
host: each cuts its shards out of its own, and these must be equal. One that was put on devices of
one process must be that array in all of them: two would wait for each other for ever.
"""

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwise import _jax
from meshwise.errors import MeshError, message
from meshwise.run.placement import OF_PARTS, count_processes
from meshwise.run.transfers import Array, Transfer, data_of, shown_as, wrapped_as


def laid(array: Array, transfer: Transfer) -> Array:
    """An array that this process has for itself in its new placement: it puts its own shards."""
    held = _on_host(array, transfer)
    padded = *transfer.target_padded, *transfer.item
    host = np.zeros(padded, held.dtype)
    host[tuple(map(slice, held.shape))] = held
    with _jax.moving():
        put = jax.make_array_from_callback(padded, transfer.target, lambda i: host[i], host.dtype)
    return shown_as(wrapped_as(put, transfer.dtype), transfer.shape)


def _on_host(array: Array, transfer: Transfer) -> np.ndarray:
    """The numbers of an array, of PRNG keys too."""
    data = data_of(array)
    if not array.size:  # JAX cannot put empty shards together
        return np.empty((*transfer.shape, *transfer.item), data.dtype)
    return np.asarray(data)


def refuse_others_of_each(arrays: Sequence[Array], transfers: Sequence[Transfer]) -> None:
    """MeshError where what is to be one array on the devices of all is another one in each process.

    Nobody can say so whose devices are not among the targets; as in JAX, nobody asks there.
    """
    if jax.process_count() == 1:
        return
    asked = [
        (zlib.crc32(_fingerprint(array, t)), t)
        for array, t in zip(arrays, transfers, strict=True)
        if (t.is_of_each or count_processes(t.source.device_set) == 1)
        and count_processes(t.target.device_set) == jax.process_count()
    ]
    if not asked:
        return
    numbers = np.array([number for number, _ in asked], np.uint32)
    found = multihost_utils.process_allgather(zlib.crc32(numbers.tobytes()))
    if len({*np.ravel(found).tolist()}) > 1:
        raise MeshError(
            message(
                "mw.reshard was given another array in each of several processes",
                [f"{t.dtype}{list(t.shape)} is to lie as {t.target.spec}" for _, t in asked],
                "What is put on the devices of all is one array: numbers on the host must be equal "
                "in all processes, and what lies on devices of one is that in all of them.",
                OF_PARTS,
            )
        )


def _fingerprint(array: Array, transfer: Transfer) -> bytes:
    """Equal in all processes for what is one array."""
    if transfer.is_of_each:
        return _on_host(array, transfer).tobytes()
    return repr(sorted(device.id for device in transfer.source.device_set)).encode()
