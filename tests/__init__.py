"""The tests. A package, so that a test file can import a generator or a table from another."""
