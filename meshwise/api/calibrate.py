"""`mw.calibrate`: the figures of the devices at hand, measured once and kept.

They are kept in a file of the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`), one for each
kind and number of devices, and for each shape of a mesh that was measured. `mw.autotune` predicts
with them where it times programs, and says so in its table; `mw.jit` plans with them where it is
told to, `hardware="measured"`, and `explain()` says so. Otherwise plans are the same on every
machine.
"""

import dataclasses
import json
import os
import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwise import _jax
from meshwise.api.meshes import process_count
from meshwise.cost.hardware import Hardware
from meshwise.cost.links import Links
from meshwise.errors import ArgumentError, message
from meshwise.run.calibrate import calibrate as measure
from meshwise.run.calibrate import calibrate_axes as measure_axes
from meshwise.run.placement import count_processes, other_processes

# Said in the place of figures: those that were measured of the devices at hand.
MEASURED = "measured"


@overload
def calibrate(devices: Sequence[Any] | None = None, *, again: bool = False) -> Hardware: ...


@overload
def calibrate(devices: Mesh, *, again: bool = False) -> Links: ...


@_jax.hides_frames
def calibrate(
    devices: Sequence[Any] | Mesh | None = None, *, again: bool = False
) -> Hardware | Links:
    """Figures of some devices (by default all): those kept, or measured now and kept.

    Each kind of collective is run at three sizes, for its latency and its bandwidth; a product and
    a sum on all devices at once. That takes half a minute or so. Of a `jax.sharding.Mesh` the link
    of each axis is measured too, all groups along it at once; its devices' figures are those of any
    mesh of so many. They are kept in `$XDG_CACHE_HOME/meshwise`, by default `~/.cache/meshwise`.
    `again` measures although there are figures.
    Raises ArgumentError for what are no devices, and for devices of other processes.
    """
    if isinstance(devices, Mesh):
        _check_are_here(devices.devices.flat)
        flat = list(devices.devices.flat)
        links = None if again else kept_of_mesh(devices)
        if links is None:
            links = measure_axes(devices)
            axes = [(axis, _dated(figures)) for axis, figures in links.axes]
            links = dataclasses.replace(links, device=_dated(links.device), axes=tuple(axes))
            _keep(_path(flat, devices), links)
        if again or kept(flat) is None:
            _keep(_path(flat), links.device)
        return links
    chosen = _devices(jax.devices() if devices is None else devices)
    known = None if again else kept(chosen)
    if known is not None:
        return known
    figures = _dated(measure(chosen))
    _keep(_path(chosen), figures)
    return figures


def _devices(given: Any) -> list[Any]:
    found = list(given) if isinstance(given, Iterable) else []
    if not found or not all(isinstance(one, jax.Device) for one in found):
        raise ArgumentError(
            message(
                "mw.calibrate was asked for figures of no devices",
                [f"{given!r:.60}"],
                "Figures are measured on devices, all at once, or along the axes of a mesh.",
                "Pass jax.devices(), some of them, a jax.sharding.Mesh, or nothing.",
            )
        )
    twice = [str(d) for d, times in Counter(found).items() if times > 1]
    if twice:
        raise ArgumentError(
            message(
                "mw.calibrate was given devices more than once",
                twice,
                "Figures are of all devices at once, each in its own place.",
                "Name each device once.",
            )
        )
    _check_are_here(found)
    return found


def _check_are_here(devices: Iterable[Any]) -> None:
    others = other_processes(devices)
    if others:
        raise ArgumentError(
            message(
                "mw.calibrate was asked for figures of devices of other processes",
                [f"devices of process {number}" for number in others],
                "A process runs its own devices, and measures them by a clock of its own.",
                "Pass jax.local_devices(), or a mesh of some of them.",
            )
        )


def kept(devices: Sequence[Any]) -> Hardware | None:
    """The figures that an earlier `calibrate` measured of such devices, None where none did."""
    return _read(_path(devices), _hardware)


def kept_of_mesh(mesh: Mesh) -> Links | None:
    """The figures that an earlier `calibrate` measured of such a mesh, None where none did."""
    return _read(_path(list(mesh.devices.flat), mesh), _links)


def check_figures(hardware: Any) -> None:
    """An error for what are no figures to plan by."""
    if isinstance(hardware, Hardware) or hardware == MEASURED:
        return
    given = f"a {type(hardware).__name__}" if isinstance(hardware, Links) else repr(hardware)
    raise ArgumentError(
        message(
            "mw.jit was given figures that are none",
            [f"hardware={given}"],
            "They are of one device (CPU, H100, TPU_V5E and GENERIC in meshwise.cost.hardware, or "
            '`device` of what mw.calibrate measured of a mesh), or "measured": plans are priced as '
            "if every axis ran over that device's link.",
            "Leave it out to plan by bytes.",
        )
    )


def links_or_figures(mesh: Any) -> Links | Hardware:
    """What was measured of a mesh, with the link of each axis, else of its devices."""
    has_devices = isinstance(mesh, Mesh) and process_count(mesh) == 1
    return (kept_of_mesh(mesh) if has_devices else None) or figures_of(MEASURED, mesh)


def figures_of(hardware: Hardware | str, mesh: Any) -> Hardware:
    """The figures that are given, or with "measured" those kept of a mesh's devices.

    Raises ArgumentError where nobody measured them.
    """
    check_figures(hardware)
    if isinstance(hardware, Hardware):
        return hardware
    if process_count(mesh) > 1:
        raise ArgumentError(
            message(
                'hardware="measured" asks for figures that processes measured, each its own',
                [f"the mesh is of {process_count(mesh)} processes"],
                "All processes must make one plan, of one set of figures.",
                "Give these in each of them: hardware=, with what mw.calibrate measured in one.",
            )
        )
    if isinstance(mesh, AbstractMesh):
        raise ArgumentError(
            message(
                'hardware="measured" asks for figures of a mesh without devices',
                [f"the mesh is {mesh}"],
                "Figures are measured on devices, and an AbstractMesh has none.",
                "Give the figures of a device: hardware=, with what mw.calibrate measured of one.",
            )
        )
    known = kept(list(mesh.devices.flat))
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


def measured_so_far(hardware: Hardware | str) -> Any:
    """Where figures are those measured: something that every `calibrate` makes another."""
    if hardware != MEASURED:
        return None
    return tuple(sorted((path.name, path.stat().st_mtime_ns) for path in _folder().glob("*.json")))


def _dated(figures: Hardware) -> Hardware:
    source = f"{figures.source}, {date.today().isoformat()}"
    return dataclasses.replace(figures, source=source)


def _keep(path: pathlib.Path, figures: Hardware | Links) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(figures), indent=1)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)  # another process reads all of it or what was there before


def _read(path: pathlib.Path, made_of: Callable[[Any], Any]) -> Any:
    try:
        return made_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        return None


def _hardware(fields: Any) -> Hardware:
    if missing := {field.name for field in dataclasses.fields(Hardware)} - fields.keys():
        raise KeyError(*missing)  # what is left out would be taken for its default, not measured
    for name in ("byte_factors", "launch_factors"):
        fields[name] = tuple((str(kind), float(factor)) for kind, factor in fields[name])
    return Hardware(**fields)


def _links(fields: Any) -> Links:
    axes = tuple((str(axis), _hardware(figures)) for axis, figures in fields["axes"])
    return Links(_hardware(fields["device"]), axes)


def _path(devices: Sequence[Any], mesh: Mesh | None = None) -> pathlib.Path:
    """Where figures of devices like these are kept, or of a mesh of them."""
    kind = str(devices[0].device_kind).replace(" ", "_").replace("/", "_")
    hosts = count_processes(devices)
    axes = [f"-{axis}{size}" for axis, size in mesh.shape.items()] if mesh else []
    where = f"{len(devices)}{''.join(axes)}-of-{hosts}-{os.cpu_count()}"
    name = f"{devices[0].platform}-{kind}-{where}.json"
    return _folder() / name


def _folder() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "meshwise"
