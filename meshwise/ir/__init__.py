"""What things are: frozen data with checked invariants. No algorithm lives here."""
