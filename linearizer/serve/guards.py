"""Refuses requests without the key, and requests that another site sends through a browser.

The other site's name may resolve to this machine (DNS rebinding): the Host shows that. Or its page may post to this
server: the Origin shows that.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HEALTH = "/health"  # open without a key: for monitoring, which learns nothing about the requests
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
REFUSAL = (
    "This server serves this machine only, and the request names another host. Use http://localhost, or start the "
    "server with --host ADDRESS to serve others.\n"
)
REFUSED = PlainTextResponse(REFUSAL, 403)
KEYLESS = PlainTextResponse(
    "This page needs its key: open its address with ?key=KEY at the end, as in the link that `linearizer app` showed "
    "if it made the key; a program sends `Authorization: Bearer KEY`.\n",
    401,
)
CROSS_SITE = PlainTextResponse("Another site sent this request: open the page itself, and ask there.\n", 403)


class Guard:
    """Serves requests for which `allows` is true; `refuse` answers the others."""

    def __init__(self, app: ASGIApp, allows: Callable[[Scope], bool], refuse: ASGIApp) -> None:
        self.app, self.allows, self.refuse = app, allows, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] not in ("http", "websocket") or self.allows(scope)
        await (self.app if is_allowed else self.refuse)(scope, receive, send)


def equals(sent: str, expected: str) -> bool:
    """Compare in constant time, which reveals nothing about the key."""
    return hmac.compare_digest(sent.encode(), expected.encode())


def has_key(keys: Sequence[str], open_path: str = HEALTH) -> Callable[[Scope], bool]:
    """Check for one of the keys as OpenAI's clients send it: `Authorization: Bearer KEY`."""

    def allows(scope: Scope) -> bool:
        sent = Headers(scope=scope).get("authorization", "")
        return scope["path"] == open_path or any([equals(sent, f"Bearer {key}") for key in keys])

    return allows


def has_key_or_cookie(key: str, open_path: str) -> Callable[[Scope], bool]:
    """Check for the key as a program sends it, or as a browser does that has opened the link with the key."""
    in_header = has_key((key,), open_path)

    def allows(scope: Scope) -> bool:
        cookies = cookie_parser(Headers(scope=scope).get("cookie", ""))
        return in_header(scope) or equals(cookies.get(cookie_name(scope), ""), key)

    return allows


class KeyLink:
    """Answers a link with `?key=KEY` by a cookie, and leads to the same address without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        sent = dict(query).get("key")
        if scope["type"] != "http" or scope["method"] != "GET" or sent is None or not equals(sent, self.key):
            return await self.app(scope, receive, send)
        rest = urlencode([pair for pair in query if pair[0] != "key"])
        # relative, because a proxy may show this server under another name
        answer = RedirectResponse(f"./{scope['path'].rpartition('/')[2]}{'?' * bool(rest)}{rest}", 303)
        # `lax` still lets a link of another site open the page, but sends nothing else that the other site asks for
        is_secure = scope["scheme"] == "https"
        answer.set_cookie(cookie_name(scope), self.key, httponly=True, samesite="lax", secure=is_secure)
        await answer(scope, receive, send)


def cookie_name(scope: Scope) -> str:
    """Name the cookie after the port: browsers send it to all ports of a host."""
    return f"linearizer-{(scope.get('server') or ('', 0))[1]}"


def is_local(scope: Scope) -> bool:
    """Whether a request's Host, and its Origin if there is one, name this machine."""
    headers = Headers(scope=scope)
    addresses = f"//{headers.get('host', '')}", *headers.getlist("origin")
    try:
        return all(urlsplit(address).hostname in LOCAL_NAMES for address in addresses)
    except ValueError:
        return False


def is_same_site(scope: Scope) -> bool:
    """Whether a request's Origin, if there is one, is the Host, or what a proxy calls it."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host") + headers.getlist("x-forwarded-host")
    try:
        return all(urlsplit(origin).netloc in hosts for origin in headers.getlist("origin"))
    except ValueError:
        return False
