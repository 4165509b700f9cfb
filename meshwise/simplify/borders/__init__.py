"""Moves of rows that are several equations, written as one."""
