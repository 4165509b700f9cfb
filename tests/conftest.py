"""What every test shares: eight CPU devices, the meshes, golden files, Hypothesis's profiles."""

import gc
import os
import pathlib
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# Before the first import of jax, which reads both.
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run once and briefly: machine code is not worth optimising. XLA's own passes, which
# decide about collectives and memory, are left as they are.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
    # In one piece, not in as many as there are cores: each costs a code generator of its own.
    + " --xla_cpu_parallel_codegen_split_count=1"
    # What writes code for fusions takes half of the time; 0.11 has no other, 0.10 has.
    + " --xla_cpu_use_fusion_emitters=false" * (version("jaxlib").startswith("0.10."))
).strip()

import hypothesis
import jax
import pytest
from jax._src.interpreters import mlir
from jax.sharding import AxisType, Mesh

GOLDEN = pathlib.Path(__file__).parent / "golden"

# "fixed" draws the same examples in every run, so that a failure is the change's and not luck's.
# HYPOTHESIS_PROFILE=search draws new ones, and more of them.
_SHARED_SETTINGS = {
    "deadline": None,  # the first example of a shape pays for a compilation
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, max_examples=50, **_SHARED_SETTINGS
)
hypothesis.settings.register_profile("search", max_examples=500, **_SHARED_SETTINGS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, eight CPU devices"


def pytest_collection_finish() -> None:
    """Cycles of garbage are looked for seldom, and never among what was imported.

    Plans and jaxprs live long and are many small objects: looking through them, and through all
    else there is, takes from a twentieth to a fourth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def _shared_by_ten(make: Callable[[], Any]) -> Callable[[], Any]:
    """Ten programs after each other are lowered in one context of MLIR, as in JAX 0.11.

    To make one takes longer than to lower a small program. Threads of XLA, which may ask for a
    program as well, each get contexts of their own: they end without Python's lock.
    """
    shared: Any = None
    uses = 0

    def context() -> Any:
        nonlocal shared, uses
        if threading.get_ident() != threading.main_thread().ident:
            return make()
        if uses % 10 == 0:
            shared = make()
        uses += 1
        return shared

    return context


if jax.__version_info__ < (0, 11):
    mlir.make_ir_context = _shared_by_ten(mlir.make_ir_context)


def _mesh(**axes: int) -> Mesh:
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=jax.devices()[:8])


@pytest.fixture(scope="session")
def mesh8() -> Mesh:
    """Eight devices in a row: x."""
    return _mesh(x=8)


@pytest.fixture(scope="session")
def mesh2x4() -> Mesh:
    """Two by four devices: x, y."""
    return _mesh(x=2, y=4)


@pytest.fixture(scope="session")
def mesh4x2() -> Mesh:
    """Four by two devices: x, y."""
    return _mesh(x=4, y=2)


@pytest.fixture(scope="session")
def mesh2x2x2() -> Mesh:
    """Two by two by two devices: x, y, z."""
    return _mesh(x=2, y=2, z=2)


@pytest.fixture(params=["mesh8", "mesh2x4", "mesh4x2", "mesh2x2x2"])
def any_mesh(request: pytest.FixtureRequest) -> Mesh:
    """Each of the four meshes in turn; all have an axis x."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/NAME.txt`; `--update-golden` writes it anew."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        if not file.exists():
            pytest.fail(f"no golden file {file}: run pytest --update-golden and read what it wrote")
        assert text == file.read_text(encoding="utf-8"), (
            f"{file.name} differs: if the new text is right, run pytest --update-golden"
        )

    return check
