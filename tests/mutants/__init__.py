"""Rules broken on purpose, one at a time: for each, a test must turn red."""
