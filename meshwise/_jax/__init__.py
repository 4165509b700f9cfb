"""The only package that touches JAX's private or semi-private parts.

What is used, and since when: `jax.extend.core` (jaxpr classes; semi-public), and from `jax._src`
(private) `core`, `source_info_util`, `api_util`, `config`, `mesh`, `tree_util`, `sharding_impls`
and the rules of `interpreters`. Supported: jax 0.10.2 and 0.11.x. In 0.11 `Jaxpr` and `ClosedJaxpr`
are one class, which has `.jaxpr` and `.consts` still.

One file a subject: `jaxprs` (classes, making and applying equations), `hints` (the hint primitive),
`bodies` (equations with bodies), `control` (loops and branches told by marks), `structure` (when
two jaxprs are equal), `explicit` (types with axes), `tracing` (functions and contexts),
`tracebacks` (errors without our frames), `calls` (the call primitive), `derivatives` (its rules),
`twins` (the primitive of `mw.like`), `custom_partitioning` (functions with a sharding rule),
`dispatch` (calling compiled programs), `sampling` (drawing from distributions), `on_cpu` (what
XLA on CPU is told otherwise), `roll` (rows moved round), `set_rows` (few rows
made of few rows), `written` (what primitives of libraries
are written as).
"""

from meshwise._jax import derivatives as derivatives
from meshwise._jax.bodies import CallBody as CallBody
from meshwise._jax.bodies import call_body as call_body
from meshwise._jax.bodies import constraint_of as constraint_of
from meshwise._jax.bodies import hands_on as hands_on
from meshwise._jax.bodies import has_constants_in_calls as has_constants_in_calls
from meshwise._jax.bodies import scan_counts as scan_counts
from meshwise._jax.bodies import without_hints as without_hints
from meshwise._jax.bodies import without_hints_in as without_hints_in
from meshwise._jax.calls import call as call
from meshwise._jax.calls import witness_of as witness_of
from meshwise._jax.combined_collectives import combine_collectives as combine_collectives
from meshwise._jax.control import Control as Control
from meshwise._jax.control import LoopParts as LoopParts
from meshwise._jax.control import body_p as body_p
from meshwise._jax.control import branch_index_p as branch_index_p
from meshwise._jax.control import carry_p as carry_p
from meshwise._jax.control import close_p as close_p
from meshwise._jax.control import end_p as end_p
from meshwise._jax.control import has_bodies as has_bodies
from meshwise._jax.control import is_mark as is_mark
from meshwise._jax.control import join_p as join_p
from meshwise._jax.control import loop_parts as loop_parts
from meshwise._jax.control import new_mark as new_mark
from meshwise._jax.control import next_p as next_p
from meshwise._jax.control import open_p as open_p
from meshwise._jax.control import operator_name as operator_name
from meshwise._jax.control import stack_p as stack_p
from meshwise._jax.control import step_p as step_p
from meshwise._jax.control import test_p as test_p
from meshwise._jax.control import without_dead as without_dead
from meshwise._jax.custom_partitioning import ShardyRule as ShardyRule
from meshwise._jax.custom_partitioning import axes_of as axes_of
from meshwise._jax.custom_partitioning import custom_name_of as custom_name_of
from meshwise._jax.custom_partitioning import partitioned as partitioned
from meshwise._jax.custom_partitioning import sharding_rule_of as sharding_rule_of
from meshwise._jax.custom_partitioning import spec_of as spec_of
from meshwise._jax.dispatch import ARRAY_CLASSES as ARRAY_CLASSES
from meshwise._jax.dispatch import SURVIVES_DONATED_ARGUMENTS as SURVIVES_DONATED_ARGUMENTS
from meshwise._jax.dispatch import InternalNanError as InternalNanError
from meshwise._jax.dispatch import asks_for_devices as asks_for_devices
from meshwise._jax.dispatch import aval_of_shape as aval_of_shape
from meshwise._jax.dispatch import caller as caller
from meshwise._jax.dispatch import dispatcher as dispatcher
from meshwise._jax.dispatch import fast_path as fast_path
from meshwise._jax.dispatch import guarded as guarded
from meshwise._jax.dispatch import is_called_by_jax as is_called_by_jax
from meshwise._jax.dispatch import is_weak as is_weak
from meshwise._jax.dispatch import kept_with_function as kept_with_function
from meshwise._jax.dispatch import register_array as register_array
from meshwise._jax.dispatch import weakened as weakened
from meshwise._jax.emitters import is_short_float as is_short_float
from meshwise._jax.explicit import auto_mesh as auto_mesh
from meshwise._jax.explicit import is_explicit as is_explicit
from meshwise._jax.explicit import is_typed as is_typed
from meshwise._jax.explicit import plain_jaxpr as plain_jaxpr
from meshwise._jax.explicit import plain_type as plain_type
from meshwise._jax.explicit import struct_of as struct_of
from meshwise._jax.explicit import type_mesh as type_mesh
from meshwise._jax.extremes import extreme_and_place as extreme_and_place
from meshwise._jax.extremes import is_extreme_and_place as is_extreme_and_place
from meshwise._jax.extremes import last_argmax_p as last_argmax_p
from meshwise._jax.extremes import last_argmin_p as last_argmin_p
from meshwise._jax.extremes import max_and_argmax_p as max_and_argmax_p
from meshwise._jax.extremes import min_and_argmin_p as min_and_argmin_p
from meshwise._jax.hints import auto_twin as auto_twin
from meshwise._jax.hints import def_eager_reshard as def_eager_reshard
from meshwise._jax.hints import hint_p as hint_p
from meshwise._jax.hints import on_mesh as on_mesh
from meshwise._jax.inspection import inspected as inspected
from meshwise._jax.jaxprs import ClosedJaxpr as ClosedJaxpr
from meshwise._jax.jaxprs import DropVar as DropVar
from meshwise._jax.jaxprs import Jaxpr as Jaxpr
from meshwise._jax.jaxprs import JaxprEqn as JaxprEqn
from meshwise._jax.jaxprs import Literal as Literal
from meshwise._jax.jaxprs import Primitive as Primitive
from meshwise._jax.jaxprs import ShapedArray as ShapedArray
from meshwise._jax.jaxprs import Tracer as Tracer
from meshwise._jax.jaxprs import Var as Var
from meshwise._jax.jaxprs import applied as applied
from meshwise._jax.jaxprs import are_same as are_same
from meshwise._jax.jaxprs import array_type as array_type
from meshwise._jax.jaxprs import at_source as at_source
from meshwise._jax.jaxprs import bind as bind
from meshwise._jax.jaxprs import cast_literal as cast_literal
from meshwise._jax.jaxprs import close_jaxpr as close_jaxpr
from meshwise._jax.jaxprs import equation_count as equation_count
from meshwise._jax.jaxprs import extended as extended
from meshwise._jax.jaxprs import has_checks as has_checks
from meshwise._jax.jaxprs import has_effects as has_effects
from meshwise._jax.jaxprs import has_jaxpr as has_jaxpr
from meshwise._jax.jaxprs import hoisted as hoisted
from meshwise._jax.jaxprs import in_place_of as in_place_of
from meshwise._jax.jaxprs import is_on_host as is_on_host
from meshwise._jax.jaxprs import jaxpr_as_fun as jaxpr_as_fun
from meshwise._jax.jaxprs import kept_in_order as kept_in_order
from meshwise._jax.jaxprs import key_impl_name as key_impl_name
from meshwise._jax.jaxprs import literal_value as literal_value
from meshwise._jax.jaxprs import names_of as names_of
from meshwise._jax.jaxprs import new_eqn as new_eqn
from meshwise._jax.jaxprs import new_var as new_var
from meshwise._jax.jaxprs import opened as opened
from meshwise._jax.jaxprs import reading as reading
from meshwise._jax.jaxprs import rename as rename
from meshwise._jax.jaxprs import rewritten as rewritten
from meshwise._jax.jaxprs import source_summary as source_summary
from meshwise._jax.jaxprs import threefry2x32_p as threefry2x32_p
from meshwise._jax.jaxprs import with_bodies as with_bodies
from meshwise._jax.jaxprs import without_names as without_names
from meshwise._jax.jaxprs import without_references as without_references
from meshwise._jax.kernels import call_kernel as call_kernel
from meshwise._jax.kernels import mw_kernel_p as mw_kernel_p
from meshwise._jax.manual import Names as Names
from meshwise._jax.manual import Region as Region
from meshwise._jax.manual import run_local as run_local
from meshwise._jax.manual import run_region as run_region
from meshwise._jax.manual import shard_map_jaxpr as shard_map_jaxpr
from meshwise._jax.mapped import mapped as mapped
from meshwise._jax.named_meshes import meshes_in as meshes_in
from meshwise._jax.on_cpu import LIBRARY_ERRS_OVER as LIBRARY_ERRS_OVER
from meshwise._jax.on_cpu import LIBRARY_HAS_SINES as LIBRARY_HAS_SINES
from meshwise._jax.on_cpu import PRODUCTS_ALONE as PRODUCTS_ALONE
from meshwise._jax.on_cpu import WIDENS_PRODUCTS as WIDENS_PRODUCTS
from meshwise._jax.on_cpu import as_cpu_compiles as as_cpu_compiles
from meshwise._jax.on_cpu import cpu_options as cpu_options
from meshwise._jax.on_tpu import as_tpu_compiles as as_tpu_compiles
from meshwise._jax.on_tpu import as_tpu_runs as as_tpu_runs
from meshwise._jax.platforms import on_platform as on_platform
from meshwise._jax.regions import as_regions as as_regions
from meshwise._jax.regions import has_region as has_region
from meshwise._jax.regions import is_same as is_same
from meshwise._jax.regions import spell as spell
from meshwise._jax.replicas import compiled_as_replicas as compiled_as_replicas
from meshwise._jax.replicas import runs_as_replicas as runs_as_replicas
from meshwise._jax.roll import roll as roll
from meshwise._jax.roll import roll_p as roll_p
from meshwise._jax.sampling import gamma_of_keys as gamma_of_keys
from meshwise._jax.set_rows import OfRows as OfRows
from meshwise._jax.set_rows import set_rows as set_rows
from meshwise._jax.set_rows import set_rows_p as set_rows_p
from meshwise._jax.stages import lower_flat as lower_flat
from meshwise._jax.stages import traced_with as traced_with
from meshwise._jax.stages import with_trees as with_trees
from meshwise._jax.structure import number_key as number_key
from meshwise._jax.structure import structure_key as structure_key
from meshwise._jax.tracebacks import hides_frames as hides_frames
from meshwise._jax.tracing import block_mesh as block_mesh
from meshwise._jax.tracing import broadcast_prefix as broadcast_prefix
from meshwise._jax.tracing import context_mesh as context_mesh
from meshwise._jax.tracing import is_tracing as is_tracing
from meshwise._jax.tracing import is_tracing_forbidden as is_tracing_forbidden
from meshwise._jax.tracing import is_unspecified as is_unspecified
from meshwise._jax.tracing import leak_summary as leak_summary
from meshwise._jax.tracing import make_jaxpr_over_axes as make_jaxpr_over_axes
from meshwise._jax.tracing import manual_axes as manual_axes
from meshwise._jax.tracing import over_auto_axes as over_auto_axes
from meshwise._jax.tracing import over_typed_axes as over_typed_axes
from meshwise._jax.tracing import settings_key as settings_key
from meshwise._jax.tracing import stand_ins as stand_ins
from meshwise._jax.tracing import static_arguments as static_arguments
from meshwise._jax.tracing import threefry_partitionable as threefry_partitionable
from meshwise._jax.tracing import trace_function as trace_function
from meshwise._jax.tracing import without_context_mesh as without_context_mesh
from meshwise._jax.tracing import without_leak_checks as without_leak_checks
from meshwise._jax.tracing import without_mesh as without_mesh
from meshwise._jax.twins import Twin as Twin
from meshwise._jax.twins import call_twin as call_twin
from meshwise._jax.written import spelled_out as spelled_out
