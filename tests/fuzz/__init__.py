"""Random programs against one device: made from a seed, compared, and shrunk where they differ."""
