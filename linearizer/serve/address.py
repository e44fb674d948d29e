"""The defaults of the endpoint, and an address of this machine, taken before anything slow begins or is imported."""

from __future__ import annotations

import socket

from linearizer.errors import RequestError

HOST, PORT = "127.0.0.1", 8000
MAX_STATE_BYTES = 2**30  # of states kept between requests


def listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise RequestError(f"--port {port} is no port: give a number from 1 to 65535, or 0 for any free port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RequestError(
            f"{host}:{port} cannot be listened at ({error.strerror or error}): name another --port or --host"
        ) from error
