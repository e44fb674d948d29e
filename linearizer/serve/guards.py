"""Refuses requests without the key, and requests that another site sends through a browser on this machine.

The other site's name may resolve to this machine (DNS rebinding): the Host shows that. Or its page may post to this
server: the Origin shows that.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health",)  # without a key: for monitoring, which learns nothing about the requests
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
REFUSAL = (
    "This server serves this machine only, and the request names another host. Use http://localhost, or start the "
    "server with --host ADDRESS to serve others.\n"
)
REFUSED = PlainTextResponse(REFUSAL, 403)


class Guard:
    """Serves requests for which `allows` is true; `refuse` answers the others."""

    def __init__(self, app: ASGIApp, allows: Callable[[Scope], bool], refuse: ASGIApp = REFUSED) -> None:
        self.app, self.allows, self.refuse = app, allows, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] not in ("http", "websocket") or self.allows(scope)
        await (self.app if is_allowed else self.refuse)(scope, receive, send)


def has_key(keys: Sequence[str]) -> Callable[[Scope], bool]:
    """Check for one of the keys as OpenAI's clients send it: `Authorization: Bearer KEY`."""

    def allows(scope: Scope) -> bool:
        sent = Headers(scope=scope).get("authorization", "").encode("latin-1")
        # in constant time, which reveals nothing about the keys
        return scope["path"] in OPEN_PATHS or any([hmac.compare_digest(sent, f"Bearer {key}".encode()) for key in keys])

    return allows


def is_local(scope: Scope) -> bool:
    """Whether a request's Host, and its Origin if there is one, name this machine."""
    headers = Headers(scope=scope)
    addresses = f"//{headers.get('host', '')}", *headers.getlist("origin")
    try:
        return all(urlsplit(address).hostname in LOCAL_NAMES for address in addresses)
    except ValueError:
        return False
