"""Trains students on their own teacher; a training stops and resumes bit for bit.

Nothing here decides what a head holds, or evaluates a student.
"""
