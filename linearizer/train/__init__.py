"""Fits what the heads hold to their own teacher; a training stops and resumes bit for bit.

Nothing here decides what a head gets, or judges what came of it.
"""
