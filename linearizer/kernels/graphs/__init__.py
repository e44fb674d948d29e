"""Whole calls of a model by graphs and streams of CUDA."""
