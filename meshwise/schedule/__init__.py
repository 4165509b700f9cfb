"""Computation and communication of a per-device program, transformed (CoCoNeT)."""
