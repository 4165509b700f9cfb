"""A narrow, deep transformer with convolutions, in a pipeline."""
