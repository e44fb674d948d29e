"""Serves the student of a run, or its teacher, until it is stopped."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from linearizer.errors import RequestError, first_line
from linearizer.plan.head_bytes import cache_bytes
from linearizer.progress import quiet
from linearizer.run.folder import Run

HOST, PORT = "127.0.0.1", 8000
LOCAL_HOSTS = (None, "127.0.0.1", "localhost", "::1")  # only this machine can reach these
MAX_STATE_BYTES = 2**30  # of states kept between requests
MAX_SECONDS = 3600.0  # of a request
KEEP_ALIVE_SECONDS = 75  # of a connection: longer than clients keep it, else they would send into a closing one
UNREAD_SECONDS = 300  # until a connection ends whose client reads nothing
CLOSING_SECONDS = 2  # for requests to finish when the server is stopped
LONGEST_SECONDS = 2**31  # of a request


def listen(host: str, port: int) -> socket.socket:
    """Bind an address of this machine, before anything slow begins or is imported."""
    if not 0 <= port <= 65535:
        raise RequestError(f"--port {port} is not a port: choose a number from 1 to 65535, or 0 for any free port")
    try:
        if b"\0" in host.encode("idna"):  # an invalid name is found here: the socket would stay open
            raise ValueError("it has a null character")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # in Linux; every connection inherits it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        return listening
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RequestError(
            f"{ascii(host)[1:-1]}:{port} cannot be bound ({reason}): name another --port or --host"
        ) from error


def check_key(key: str | None) -> None:
    """Refuse a key that no request could carry."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise RequestError("the API key is empty, or has letters that no header carries: use ASCII without spaces")


def address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bytes_of_text(run: Run, teacher: bool) -> int:
    """Return the bytes of the longest text in the layers that have a student, or in the same layers of its teacher."""
    if teacher or run.allocation is None:
        return cache_bytes(run.layers, run.positions)
    return run.allocation.state_bytes(run.layers, run.positions)


def serve(
    run: Run,
    port: int = PORT,
    host: str = HOST,
    max_state_bytes: int = MAX_STATE_BYTES,
    teacher: bool = False,
    max_seconds: float = MAX_SECONDS,
    api_keys: Sequence[str] = (),
    states: Path | None = None,
    ready: Callable[[str, str], None] = lambda url, name: None,
) -> None:
    """Serve a run's student behind an endpoint like OpenAI's; call `ready` with its address and the model's name.

    A request ends after `max_seconds`, and must carry one of the `api_keys` if there are any. The states that clients
    own lie in the folder `states`, of each key in its own: by default in the run's.
    """
    if max_state_bytes < 0:
        raise RequestError(f"max-state-bytes = {max_state_bytes} is below 0: 0 keeps no states")
    if not 0 < max_seconds < LONGEST_SECONDS:
        raise RequestError(f"max-seconds = {max_seconds:g} is not a time for a request: choose seconds above 0")
    if teacher and states is not None:
        raise RequestError("--states is for the states of a student, and the teacher has none: leave it out")
    for key in api_keys:
        check_key(key)
    with listen(host, port) as listening, quiet():
        import uvicorn

        from linearizer.method import checkpoint
        from linearizer.serve.endpoint import make_endpoint
        from linearizer.serve.engine import Engine
        from linearizer.serve.served import Served
        from linearizer.teacher.load import load_teacher_of
        from linearizer.teacher.ram import bound_shape_caches, short_collections

        bound_shape_caches()
        if teacher:
            loaded = load_teacher_of(run.plan, inspection=run.inspection)
            model, tokenizer = loaded.model, loaded.tokenizer
        else:
            model, tokenizer = checkpoint.load_of_run(run)
        name = run.folder.resolve().name + ("-teacher" if teacher else "")
        with Engine(model, max_state_bytes) as engine, short_collections():
            places = states or run.folder / "states"
            sizes = bytes_of_text(run, teacher), run.inspection.recurrent_bytes
            shows = run.inspection.reads_pictures and run.checkpoint.is_dir()
            processor = cache(partial(checkpoint.load_processor_of, run)) if shows else None
            served = Served(name, model, tokenizer, run.positions, engine, max_seconds, places, *sizes, processor)
            app = make_endpoint(served, host in LOCAL_HOSTS, api_keys)
            config = uvicorn.Config(
                app,
                log_level="error",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
            ready(f"{address(host, listening.getsockname()[1])}/v1", name)
            uvicorn.Server(config).run([listening])
