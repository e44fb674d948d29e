"""Says which process works on a run, and when: processes, the queue of a device, start, stop, status, forecasts.

It knows pipeline.py, and no step from inside.
"""
