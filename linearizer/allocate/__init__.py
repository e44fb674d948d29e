"""Numbers and a budget become an allocation: what every KV head holds.

Only step.py uses torch; decide.py, by_freedoms.py and by_prices.py are arithmetic.
"""
