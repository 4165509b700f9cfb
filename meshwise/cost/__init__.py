"""What things cost: figures of hardware as data, and formulas over them."""
