"""Equations of a flat program that are fewer, smaller, or tell more of what they do."""
