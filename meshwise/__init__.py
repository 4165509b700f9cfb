"""meshwise: one program for one device, made into one program for every device of a mesh."""

from meshwise.api.extend import register_rule as register_rule
from meshwise.api.jit import jit as jit
from meshwise.api.jit import shard as shard
from meshwise.api.like import like as like
from meshwise.api.pipelines import pipeline_value_and_grad as pipeline_value_and_grad
from meshwise.api.reshard import reshard as reshard
from meshwise.api.reshard import reshard_plan as reshard_plan
from meshwise.api.schedule import Schedule as Schedule
from meshwise.api.spmd_program import SpmdProgram as SpmdProgram
from meshwise.errors import ArgumentError as ArgumentError
from meshwise.errors import DeletedArrayError as DeletedArrayError
from meshwise.errors import HintError as HintError
from meshwise.errors import IllegalMove as IllegalMove
from meshwise.errors import LayoutError as LayoutError
from meshwise.errors import MemoryLimitError as MemoryLimitError
from meshwise.errors import MeshError as MeshError
from meshwise.errors import MeshwiseError as MeshwiseError
from meshwise.errors import MissingRuleError as MissingRuleError
from meshwise.errors import PipelineError as PipelineError
from meshwise.errors import ReplicationError as ReplicationError
from meshwise.errors import RuleError as RuleError
from meshwise.errors import TracerLeakError as TracerLeakError
from meshwise.errors import TreeError as TreeError
from meshwise.pipeline import stack_stages as stack_stages
from meshwise.pipeline import stage_boundary as stage_boundary
from meshwise.pipeline.vectorised import pipeline as pipeline
from meshwise.run.uneven import UnevenArray as UnevenArray

__all__ = [
    "ArgumentError",
    "DeletedArrayError",
    "HintError",
    "IllegalMove",
    "LayoutError",
    "MemoryLimitError",
    "MeshError",
    "MeshwiseError",
    "MissingRuleError",
    "PipelineError",
    "ReplicationError",
    "RuleError",
    "Schedule",
    "SpmdProgram",
    "TracerLeakError",
    "TreeError",
    "UnevenArray",
    "jit",
    "like",
    "pipeline",
    "pipeline_value_and_grad",
    "register_rule",
    "reshard",
    "reshard_plan",
    "shard",
    "stack_stages",
    "stage_boundary",
]
