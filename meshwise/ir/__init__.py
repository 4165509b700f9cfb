"""What things are: frozen data with checked invariants, and what is asked of it."""
