"""Serves the student of a run, or its teacher, until it is stopped."""

from __future__ import annotations

from collections.abc import Callable

import uvicorn

from linearizer.errors import RequestError
from linearizer.model import checkpoint
from linearizer.model.quiet import quiet
from linearizer.model.teacher import load_teacher_of
from linearizer.run.folder import Run
from linearizer.serve.address import HOST, MAX_STATE_BYTES, PORT, listen
from linearizer.serve.endpoint import Served, make_endpoint
from linearizer.serve.engine import Engine
from linearizer.serve.local_requests import LOCAL_HOSTS

CLOSING_SECONDS = 2  # that requests at work are given when the server is stopped


def serve(
    run: Run,
    port: int = PORT,
    host: str = HOST,
    max_state_bytes: int = MAX_STATE_BYTES,
    teacher: bool = False,
    ready: Callable[[str, str], None] = lambda url, name: None,
) -> None:
    """Serve a run's student behind an endpoint like OpenAI's; `ready` receives its address and the model's name."""
    if max_state_bytes < 0:
        raise RequestError(f"max-state-bytes = {max_state_bytes} is below 0: give 0 to keep no states")
    with listen(host, port) as listening, quiet():
        if teacher:
            loaded = load_teacher_of(run.plan, inspection=run.inspection)
            model, tokenizer = loaded.model, loaded.tokenizer
        else:
            model, tokenizer = checkpoint.load_of_run(run)
        name = run.folder.resolve().name + ("-teacher" if teacher else "")
        with Engine(model, max_state_bytes) as engine:
            app = make_endpoint(Served(name, model, tokenizer, run.positions, engine), host in LOCAL_HOSTS)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=CLOSING_SECONDS)
            ready(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1", name)
            uvicorn.Server(config).run([listening])
