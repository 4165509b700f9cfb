"""Pipelines: a model cut into stages, which lie on the devices along one axis of the mesh.

Importing this package registers the rules of its operators.
"""

from meshwise.pipeline import rule as rule
from meshwise.pipeline.boundary import stage_boundary as stage_boundary
from meshwise.pipeline.stacking import stack_stages as stack_stages
from meshwise.pipeline.vectorised import pipeline as pipeline
