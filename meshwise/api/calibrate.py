"""`mw.calibrate`: the figures of the devices at hand, measured once and kept.

They are kept in a file of the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`), one for each
kind and number of devices. `mw.autotune` predicts with them where it times programs, and says so
in its table; `mw.jit` plans with them where it is told to, `hardware="measured"`, and `explain()`
says so. Otherwise plans are the same on every machine.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from datetime import date
from typing import Any

import jax
from jax.sharding import AbstractMesh

from meshwise.cost.hardware import Hardware
from meshwise.errors import ArgumentError, message
from meshwise.run.calibrate import calibrate as measure


def calibrate(devices: Sequence[Any] | None = None, *, again: bool = False) -> Hardware:
    """Figures of some devices (by default all): those kept, or measured now and kept.

    Each kind of collective is run at two sizes, a product and a sum on all devices at once; that
    takes some seconds. `again` measures although there are figures.
    """
    chosen = list(devices or jax.devices())
    known = None if again else kept(chosen)
    if known is not None:
        return known
    figures = measure(chosen)
    figures = dataclasses.replace(figures, source=f"{figures.source}, {date.today().isoformat()}")
    path = _path(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(figures), indent=1), encoding="utf-8")
    return figures


def kept(devices: Sequence[Any]) -> Hardware | None:
    """The figures that an earlier `calibrate` measured of such devices, None where none did."""
    try:
        fields = json.loads(_path(devices).read_text(encoding="utf-8"))
        fields["byte_factors"] = tuple((str(k), float(v)) for k, v in fields["byte_factors"])
        return Hardware(**fields)
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        return None


def figures_of(hardware: Hardware | str, mesh: Any) -> Hardware:
    """The figures that are given, or with "measured" those kept of a mesh's devices.

    Raises ArgumentError where nobody measured them.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware != "measured":
        raise ArgumentError(
            message(
                "mw.jit was given figures that are none",
                [f"hardware={hardware!r}"],
                'They are of a device (meshwise.cost.hardware), or "measured".',
                "Leave it out to plan by bytes.",
            )
        )
    known = None if isinstance(mesh, AbstractMesh) else kept(list(mesh.devices.flat))
    if known is None:
        raise ArgumentError(
            message(
                'hardware="measured" asks for figures that nobody measured',
                [f"the mesh is {mesh}"],
                "Figures are measured once for each kind and number of devices.",
                "Call mw.calibrate(mesh.devices.flat) first, or give the figures of a device.",
            )
        )
    return known


def _path(devices: Sequence[Any]) -> pathlib.Path:
    """Where figures of devices like these are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kind = str(devices[0].device_kind).replace(" ", "_").replace("/", "_")
    hosts = len({d.process_index for d in devices})
    name = f"{devices[0].platform}-{kind}-{len(devices)}-of-{hosts}-{os.cpu_count()}.json"
    return pathlib.Path(cache) / "meshwise" / name
