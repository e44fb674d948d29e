"""The endpoint that other programs talk to: requests that run as one batch, and the states of conversations.

What is computed is the model's; here is decided which rows are computed together, and what is kept between requests.
"""
