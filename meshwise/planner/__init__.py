"""The planner: hints for arguments where the user gives none (Alpa, arXiv 2201.12023)."""
