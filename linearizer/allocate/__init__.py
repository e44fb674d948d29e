"""Numbers and a budget become an allocation: what every KV head holds.

Only allocate_run.py uses torch; all other modules are arithmetic.
"""
