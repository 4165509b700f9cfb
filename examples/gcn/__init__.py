"""A graph convolutional network on one whole graph: its model, hints, and partitions of graphs."""
