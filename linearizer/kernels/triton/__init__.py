"""Kernels in Triton, for texts and tokens with windows and slots, and for texts with features."""
