"""Loads a teacher (complete, in pieces or quantised) and its text, and runs it.

Nothing here measures it or decides what a head holds.
"""
