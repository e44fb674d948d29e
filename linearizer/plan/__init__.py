"""The options of a run, the contents of a head and their bytes, and the facts about a model that matter for them.

Nothing here imports torch or transformers, or writes a file.
"""
