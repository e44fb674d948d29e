"""An endpoint at work behind a real socket."""

import socket
import threading
from contextlib import contextmanager

import uvicorn

from linearizer.serve.endpoint import make_endpoint


@contextmanager
def listening(served, **options):
    """Serve a model whose engine is at work; give the address."""
    taken = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(make_endpoint(served, **options), log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, args=([taken],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        taken.close()


def complete(client, **options):
    return client.post("completions", json={"model": "tiny", "prompt": "Once upon", "temperature": 0, **options})


def chat(client, *words, **options):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]
    return client.post("chat/completions", json={"model": "tiny", "messages": messages, "temperature": 0, **options})
