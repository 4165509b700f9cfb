"""A dense transformer, its layers in a loop."""
