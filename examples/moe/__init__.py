"""A mixture of experts: one device's program, hints for several meshes, and what they come to."""
