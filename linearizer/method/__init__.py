"""The method: measure what heads need, price what they may hold, buy it with the budget, and make the student of it.

Steps begin in measure_run.py and allocate_run.py and read what texts.py shares out; decide.py and the by_* modules are
arithmetic without torch.
"""
