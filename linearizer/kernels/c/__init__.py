"""The kernel in C: its source, how it is compiled, and how a layer calls it."""
