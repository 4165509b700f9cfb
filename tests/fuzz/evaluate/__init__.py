"""Jaxprs evaluated with numpy, for one device or for many at once: nothing is compiled."""
