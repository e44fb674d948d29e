"""Numbers and a budget become an allocation: what every KV head holds.

Only step.py uses torch; all other modules are arithmetic.
"""
