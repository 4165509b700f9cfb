"""Annotated programs through both of XLA's partitioners and ours, in one run: `make bench`."""
