"""What was asked of a run, what came of it, and the folder and log that hold both.

Nothing here imports torch or transformers, so that the page and the command line open at once.
"""
