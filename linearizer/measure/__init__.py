"""Runs a teacher over text and writes numbers down: degrees of freedom, the kl of every head, gates.

Nothing here decides what a head gets.
"""
