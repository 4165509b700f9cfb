"""Shallow water on a grid in pieces: one device's program, hints, and what is sent."""
