"""Decisions and costs in words. Nothing below imports this package."""
