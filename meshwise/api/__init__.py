"""What a user types: `jit`, `shard`, and the program they get."""
