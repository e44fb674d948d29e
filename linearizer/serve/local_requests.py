"""Refuses requests that another site sends to a server on this machine through a browser on this machine.

The other site's name may stand for this machine (DNS rebinding), which the Host shows; or its page may post to this
server, which the Origin shows.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_HOSTS = (None, "127.0.0.1", "localhost", "::1")  # to listen at, for this machine alone
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
REFUSAL = (
    "This server serves this machine only, and the request names another host. Use http://localhost, or start the "
    "server with --host ADDRESS to serve others.\n"
)


class LocalRequests:
    """Serves requests whose Host, and Origin if there is one, name this machine."""

    def __init__(self, app: ASGIApp, refuse: ASGIApp | None = None) -> None:
        self.app, self.refuse = app, refuse or PlainTextResponse(REFUSAL, 403)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if not is_local(f"//{headers.get('host', '')}") or (origin is not None and not is_local(origin)):
                await self.refuse(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_local(address: str) -> bool:
    """Tell whether an address names this machine."""
    try:
        return urlsplit(address).hostname in LOCAL_NAMES
    except ValueError:
        return False
