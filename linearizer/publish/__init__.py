"""Turns products into tables, charts, HTML and the model card, and sends them to the Hub.

Only upload.py writes to the network. Nothing here measures.
"""
