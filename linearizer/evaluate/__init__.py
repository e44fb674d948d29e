"""Measures what a student kept of its teacher: a module for each part, the same code for every subject.

Nothing here draws, or writes a sentence for a reader.
"""
