"""What the partitioners we compare with emit, read from their compilers' output."""
