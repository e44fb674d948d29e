"""Loads a teacher and its text, whole, in pieces or quantised, and runs it.

Nothing here measures it or decides what a head holds.
"""
