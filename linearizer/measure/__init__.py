"""Runs a teacher over text and measures it: degrees of freedom, prices of heads, gates, and the kl of whole students.

Nothing here decides what a head holds.
"""
