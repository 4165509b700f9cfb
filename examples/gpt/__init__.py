"""A small GPT: one device's program, the hints beside it, and a demonstration on eight devices."""
