"""Turns products of a run into tables, charts, HTML and a verdict.

Nothing here measures, or sends anything.
"""
