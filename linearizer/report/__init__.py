"""Turns products of a run into tables, charts, HTML and a verdict; it neither measures nor sends anything."""
