"""A teacher in memory, its text as tokens, and a student made of it: loaded, saved, or exchanged for a while.

Only model/hub.py reads the network. Nothing here decides what a head gets.
"""
