"""Whole training steps: the same numbers as one device, and no more bytes than they need."""
