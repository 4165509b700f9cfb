"""Every primitive of JAX has a rule, or a line that says why not."""

import importlib
import pathlib
import pkgutil

from jax.extend.core import Primitive

import meshwise.rules
from meshwise import _jax
from meshwise.rules.registry import REGISTRY

UNSUPPORTED = pathlib.Path(meshwise.rules.__file__).parent / "unsupported.txt"

# Where JAX defines the primitives that its public functions can trace.
MODULES = """
jax.extend.core.primitives jax.lax jax.lax.linalg jax._src.ad_util jax._src.ad_checkpoint
jax._src.callback jax._src.core jax._src.custom_derivatives jax._src.custom_partitioning
jax._src.debugging jax._src.dispatch jax._src.ffi jax._src.pjit jax._src.shard_map
jax._src.custom_batching jax._src.checkify jax._src.xla_metadata
""".split()
PACKAGES = ("jax._src.lax", "jax._src.random")


def primitives() -> dict[str, str]:
    """Name of each primitive -> a module that holds it."""
    names = list(MODULES)
    for package in PACKAGES:
        found = importlib.import_module(package)
        walked = pkgutil.walk_packages(found.__path__, f"{package}.")
        names += [package, *(info.name for info in walked)]
    modules = [importlib.import_module(name) for name in names]
    return {
        value.name: module.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }


def unsupported() -> dict[str, str]:
    """Name of each primitive computed whole -> the reason."""
    lines = UNSUPPORTED.read_text(encoding="utf-8").splitlines()
    entries = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(entry) == 2 for entry in entries), "a primitive has no reason"
    assert len({entry[0] for entry in entries}) == len(entries), "a primitive is listed twice"
    return {entry[0]: entry[1] for entry in entries}


def test_every_primitive_has_a_rule_or_a_reason():
    known = set(REGISTRY.rules) | set(unsupported())
    missing = {name: module for name, module in primitives().items() if name not in known}
    assert not missing, "write a rule, or a line with the reason in unsupported.txt"


def test_no_primitive_has_both():
    assert not set(REGISTRY.rules) & set(unsupported())


MARKS = "open body end close carry next step stack test branch_index join".split()
OWN = {  # primitives of this package
    "hint",
    "last_argmax",
    "last_argmin",
    "manual_region",
    "max_and_argmax",
    "min_and_argmin",
    "mw_like",
    "mw_pipeline",
    *(primitive.name for primitive in _jax.BORDERED.values()),
    "roll",
    "set_rows",
    "stage",
    "stage_boundary",
    *(f"mark_{name}" for name in MARKS),
}

# Primitives that only some versions of JAX have: up to 0.10, some of 0.11, and since 0.12.
OF_SOME_VERSIONS = set(
    "call closed_call pbroadcast_done pbroadcast_start psum_start unreduced_psum_start"
    " unreduced_reduce_scatter_start"
    " shard_alike log2 one_minus_square program_order relayout unreduced_pmax"
    " unreduced_pmin xla_metadata_call reduced_vary_cast_p vary_unreduced_cast_p"
    " pbroadcast_dynamic polynomial reduced_vary_cast vary_unreduced_cast".split()
)


def test_no_entry_is_stale():
    existing = set(primitives()) | OF_SOME_VERSIONS | OWN
    assert not set(REGISTRY.rules) - existing, "rules for primitives that JAX does not have"
    assert not set(unsupported()) - existing, "reasons for primitives that JAX does not have"
