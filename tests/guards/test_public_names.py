"""What `import meshwise` gives is this list, no more and no less."""

from collections.abc import Iterable

import meshwise
from meshwise import errors

ERRORS = [
    "ArgumentError",
    "DeletedArrayError",
    "HintError",
    "IllegalMove",
    "LayoutError",
    "MemoryLimitError",
    "MeshError",
    "MeshwiseError",
    "MissingRuleError",
    "NoMeshError",
    "PipelineError",
    "ReplicationError",
    "RuleError",
    "TracerLeakError",
    "TreeError",
    "UnplannedError",
]
FUNCTIONS = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "autotune",
    "calibrate",
    "broadcast",
    "dropout",
    "jit",
    "like",
    "padded",
    "pipeline",
    "pipeline_value_and_grad",
    "plan",
    "program",
    "reduce",
    "reduce_scatter",
    "register_rule",
    "reshard",
    "reshard_plan",
    "send",
    "shard",
    "stack_stages",
    "stage_boundary",
    "unpadded",
    "update",
]
LAYOUTS = ["Local", "Replicated", "Sliced", "Unreduced"]
WARNINGS = ["FallbackWarning"]
CLASSES = ["Planned", "Schedule", "SpmdProgram", "Tuned", "UnevenArray"]
PUBLIC = [*ERRORS, *WARNINGS, *LAYOUTS, *CLASSES, *FUNCTIONS]


def differences(actual: Iterable[str], expected: Iterable[str]) -> list[str]:
    actual, expected = set(actual), set(expected)
    added = [f"{n} is public, but is not in the list" for n in sorted(actual - expected)]
    return added + [f"{n} is in the list, but is not public" for n in sorted(expected - actual)]


def visible_names(module: object) -> list[str]:
    """Names a person sees, without the submodules that imports leave behind."""
    submodule = type(errors)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, submodule)
    ]


def error_classes(module: object) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, errors.MeshwiseError)
    ]


def test_all_is_the_list():
    assert not differences(meshwise.__all__, PUBLIC)
    assert len(meshwise.__all__) == len(set(meshwise.__all__))


def test_nothing_else_is_visible():
    assert not differences(visible_names(meshwise), PUBLIC)


def test_every_error_is_public():
    assert not differences(error_classes(errors), ERRORS)


def test_planted_differences_are_found():
    assert differences(["jit", "extra"], ["jit"]) == ["extra is public, but is not in the list"]
    assert differences([], ["jit"]) == ["jit is in the list, but is not public"]

    class Planted:
        errors = errors
        extra = 1
        _private = 1
        NewError = type("NewError", (errors.MeshwiseError,), {})

    assert visible_names(Planted) == ["extra", "NewError"]
    assert error_classes(Planted) == ["NewError"]
