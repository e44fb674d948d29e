"""Models, data sets, uploads and jobs of the Hub, and files of weights, which are inspected before they are loaded.

No other room talks to the Hub.
"""
