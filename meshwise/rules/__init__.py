"""What each operator means: one factor rule an operator, one file an operator family."""
