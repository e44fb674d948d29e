"""Serves the student of a run, or its teacher, until it is stopped."""

from __future__ import annotations

import re
from collections.abc import Callable

import uvicorn

from linearizer.errors import RequestError
from linearizer.method import checkpoint
from linearizer.quiet import quiet
from linearizer.run.folder import Run
from linearizer.serve.address import HOST, MAX_SECONDS, MAX_STATE_BYTES, PORT, listen
from linearizer.serve.endpoint import Served, make_endpoint
from linearizer.serve.engine import Engine
from linearizer.serve.local_requests import LOCAL_HOSTS
from linearizer.teacher.load import load_teacher_of

CLOSING_SECONDS = 2  # that requests at work are given when the server is stopped
LONGEST_SECONDS = 2**31  # that a request may be given


def serve(
    run: Run,
    port: int = PORT,
    host: str = HOST,
    max_state_bytes: int = MAX_STATE_BYTES,
    teacher: bool = False,
    max_seconds: float = MAX_SECONDS,
    api_key: str | None = None,
    ready: Callable[[str, str], None] = lambda url, name: None,
) -> None:
    """Serve a run's student behind an endpoint like OpenAI's; `ready` receives its address and the model's name.

    A request is given up after `max_seconds`, and must carry the `api_key` if there is one.
    """
    if max_state_bytes < 0:
        raise RequestError(f"max-state-bytes = {max_state_bytes} is below 0: give 0 to keep no states")
    if not 0 < max_seconds < LONGEST_SECONDS:
        raise RequestError(f"max-seconds = {max_seconds:g} is no time for a request: give seconds above 0")
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise RequestError("the API key is empty, or has letters that no header carries: give ASCII without spaces")
    with listen(host, port) as listening, quiet():
        if teacher:
            loaded = load_teacher_of(run.plan, inspection=run.inspection)
            model, tokenizer = loaded.model, loaded.tokenizer
        else:
            model, tokenizer = checkpoint.load_of_run(run)
        name = run.folder.resolve().name + ("-teacher" if teacher else "")
        with Engine(model, max_state_bytes) as engine:
            served = Served(name, model, tokenizer, run.positions, engine, max_seconds)
            app = make_endpoint(served, host in LOCAL_HOSTS, api_key)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=CLOSING_SECONDS)
            ready(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1", name)
            uvicorn.Server(config).run([listening])
