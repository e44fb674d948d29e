"""Trains students on their own teacher; a stopped training resumes bit for bit.

Nothing here decides what a head holds, or evaluates a student.
"""
