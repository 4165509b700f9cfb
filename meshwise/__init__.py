"""meshwise: one program for one device, made into one program for every device of a mesh."""

from meshwise.api.autotune import Tuned as Tuned
from meshwise.api.autotune import autotune as autotune
from meshwise.api.calibrate import calibrate as calibrate
from meshwise.api.checkpoints import padded as padded
from meshwise.api.checkpoints import unpadded as unpadded
from meshwise.api.extend import register_rule as register_rule
from meshwise.api.jit import jit as jit
from meshwise.api.like import like as like
from meshwise.api.pipelines import pipeline_value_and_grad as pipeline_value_and_grad
from meshwise.api.plan import Planned as Planned
from meshwise.api.plan import plan as plan
from meshwise.api.programs import program as program
from meshwise.api.reshard import reshard as reshard
from meshwise.api.reshard import reshard_plan as reshard_plan
from meshwise.api.schedule import Schedule as Schedule
from meshwise.api.shard import shard as shard
from meshwise.api.spmd_program import SpmdProgram as SpmdProgram
from meshwise.errors import ArgumentError as ArgumentError
from meshwise.errors import DeletedArrayError as DeletedArrayError
from meshwise.errors import FallbackWarning as FallbackWarning
from meshwise.errors import HintError as HintError
from meshwise.errors import IllegalMove as IllegalMove
from meshwise.errors import LayoutError as LayoutError
from meshwise.errors import MemoryLimitError as MemoryLimitError
from meshwise.errors import MeshError as MeshError
from meshwise.errors import MeshwiseError as MeshwiseError
from meshwise.errors import MissingRuleError as MissingRuleError
from meshwise.errors import NoMeshError as NoMeshError
from meshwise.errors import PipelineError as PipelineError
from meshwise.errors import ReplicationError as ReplicationError
from meshwise.errors import RuleError as RuleError
from meshwise.errors import TracerLeakError as TracerLeakError
from meshwise.errors import TreeError as TreeError
from meshwise.errors import UnplannedError as UnplannedError
from meshwise.pipeline import stack_stages as stack_stages
from meshwise.pipeline import stage_boundary as stage_boundary
from meshwise.pipeline.vectorised import pipeline as pipeline
from meshwise.run.uneven import UnevenArray as UnevenArray
from meshwise.schedule.language.specs import Local as Local
from meshwise.schedule.language.specs import Replicated as Replicated
from meshwise.schedule.language.specs import Sliced as Sliced
from meshwise.schedule.language.specs import Unreduced as Unreduced
from meshwise.schedule.language.verbs import all_gather as all_gather
from meshwise.schedule.language.verbs import all_reduce as all_reduce
from meshwise.schedule.language.verbs import all_to_all as all_to_all
from meshwise.schedule.language.verbs import broadcast as broadcast
from meshwise.schedule.language.verbs import dropout as dropout
from meshwise.schedule.language.verbs import reduce as reduce
from meshwise.schedule.language.verbs import reduce_scatter as reduce_scatter
from meshwise.schedule.language.verbs import send as send
from meshwise.schedule.language.verbs import update as update

__all__ = [
    "ArgumentError",
    "DeletedArrayError",
    "FallbackWarning",
    "HintError",
    "IllegalMove",
    "LayoutError",
    "Local",
    "MemoryLimitError",
    "MeshError",
    "MeshwiseError",
    "MissingRuleError",
    "NoMeshError",
    "PipelineError",
    "Planned",
    "Replicated",
    "ReplicationError",
    "RuleError",
    "Schedule",
    "Sliced",
    "SpmdProgram",
    "TracerLeakError",
    "TreeError",
    "Tuned",
    "UnevenArray",
    "UnplannedError",
    "Unreduced",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "autotune",
    "broadcast",
    "calibrate",
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
