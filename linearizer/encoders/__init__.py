"""Encoders: models that read texts or pictures in both directions; their cost is pairs of tokens, not a cache.

A checkpoint contains attention_both_ways.py, attention_interface.py and modeling_encoder.py; one of a
diffusers pipeline contains the first two and modeling_denoiser.py.
"""
