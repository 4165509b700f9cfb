"""The moves: each takes a view of a program and returns the program moved, or refuses."""
