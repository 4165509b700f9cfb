"""Completion: hints on some values -> a sharding for every value, each with its cause."""
