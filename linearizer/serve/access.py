"""Asks for a key where an endpoint serves others than this machine."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health",)  # for what watches the server, and says nothing of its requests


class KeyHolders:
    """Serves requests that carry the key as OpenAI's clients send it: `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str, refuse: ASGIApp) -> None:
        self.app, self.expected, self.refuse = app, f"Bearer {key}".encode(), refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self.expected):  # in a time that tells nothing of the key
                await self.refuse(scope, receive, send)
                return
        await self.app(scope, receive, send)
