"""Encoders: models that read texts or pictures in both directions, whose cost is pairs of tokens, not a cache.

attention_both_ways.py, slots_of_all.py, attention_interface.py and modeling_encoder.py are what a checkpoint carries;
that of a pipeline of diffusers carries the first two and modeling_denoiser.py.
"""
