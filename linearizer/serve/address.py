"""The defaults of the endpoint, and an address of this machine, taken before anything slow begins or is imported."""

from __future__ import annotations

import socket

from linearizer.errors import RequestError, first_line

HOST, PORT = "127.0.0.1", 8000
MAX_STATE_BYTES = 2**30  # of states kept between requests
MAX_SECONDS = 3600.0  # of a request


def listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise RequestError(f"--port {port} is no port: give a number from 1 to 65535, or 0 for any free port")
    try:
        if b"\0" in host.encode("idna"):  # what no host is called is found here: the socket would stay open
            raise ValueError("it has a null character")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RequestError(
            f"{ascii(host)[1:-1]}:{port} cannot be listened at ({reason}): name another --port or --host"
        ) from error
