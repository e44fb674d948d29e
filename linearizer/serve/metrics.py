"""Counts of requests and tokens, and current values, in the text that Prometheus reads."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")  # all others are one
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "linearizer_"


class Metrics:
    """Counts since the server began; only the event loop writes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()

    def add_usage(self, usage: Mapping[str, Any]) -> None:
        """Count the tokens of a request that has ended."""
        self.tokens["prompt"] += usage["prompt_tokens"]
        self.tokens["cached_prompt"] += usage["prompt_tokens_details"]["cached_tokens"]
        self.tokens["written"] += usage["completion_tokens"]

    def lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        """Yield all counts, then gauges by their names, each with a description and its value."""
        yield from title("requests_total", "counter", "Requests that were answered, by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{path="{path}",status="{status}"}} {count}'
        yield from title("request_seconds", "summary", "Seconds from the beginning of a request to its end.")
        for path, seconds in sorted(self.seconds.items()):
            count = sum(n for (other, _), n in self.requests.items() if other == path)
            yield f'{PREFIX}request_seconds_sum{{path="{path}"}} {seconds:.6f}'
            yield f'{PREFIX}request_seconds_count{{path="{path}"}} {count}'
        for name in ("prompt", "cached_prompt", "written"):
            yield from title(f"{name}_tokens_total", "counter", f"{name.capitalize().replace('_', ' ')} tokens.")
            yield f"{PREFIX}{name}_tokens_total {self.tokens[name]}"
        for name, (about, value) in gauges.items():
            yield from title(name, "gauge", about)
            yield f"{PREFIX}{name} {value}"


def title(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"


class Counted:
    """Counts the requests of an application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, path = time.monotonic(), scope["path"] if scope["path"] in PATHS else "other"
        status = 500

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counting)
        finally:
            self.metrics.requests[path, status] += 1
            self.metrics.seconds[path] += time.monotonic() - begin
