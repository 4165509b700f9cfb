"""meshwise: one program for one device, made into one program for every device of a mesh."""
