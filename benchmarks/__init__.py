"""Measurements beside other partitioners."""
