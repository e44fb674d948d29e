"""What is asked of a run, what a head may hold and in how many bytes, and the facts of a model that decide it.

Nothing here imports torch or transformers, or writes a file.
"""
