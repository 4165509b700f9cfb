"""Pipelines: a model cut into stages, which lie on the devices along one axis of the mesh."""
