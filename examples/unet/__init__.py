"""A 3-D U-Net with its volumes in pieces: one device's program, hints, and what is sent."""
