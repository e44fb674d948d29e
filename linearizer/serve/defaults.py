"""The defaults of the endpoint: where it listens, and how much it keeps; imports nothing."""

HOST, PORT = "127.0.0.1", 8000
MAX_STATE_BYTES = 2**30  # of states kept between requests
