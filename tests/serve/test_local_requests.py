"""A server on this machine refuses requests by another site's name or from its pages."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from linearizer.serve.guards import Guard, is_local


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "headers, status",
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000", "origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ],
)
def test_host_and_origin_must_name_this_machine(method, headers, status):
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("served"), methods=["GET", "POST"])])
    app.add_middleware(Guard, allows=is_local)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, "/", headers=headers)

    assert asyncio.run(ask()).status_code == status
