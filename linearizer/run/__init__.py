"""The folder and the log of a run, its stops and locks, and the products of its steps.

Nothing here imports torch or transformers, so that the page and the command line start quickly.
"""
