"""Plan -> SpmdProgram: a per-device program with explicit collectives."""
