"""The Gradio page, its API, and what only a shared server needs: visitors, limits, sending, ZeroGPU.

Nothing but cli/ imports it.
"""
