"""The endpoint for other programs: requests that run as one batch, and the states of conversations.

This room decides which rows are computed together, and which states are kept between requests.
"""
