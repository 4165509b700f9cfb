"""Plan: a strategy for every equation and the reshards between them, at least cost."""
