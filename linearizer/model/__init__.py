"""Loads a teacher and its text, makes a student of it, saves and loads students, and swaps layers for a while.

Only model/hub.py reads the network. Nothing here decides what a head holds.
"""
