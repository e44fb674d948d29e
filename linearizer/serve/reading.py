"""Reads the body of a request, bounded in bytes and seconds, outside the event loop; refuses it in a sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from linearizer.plan.json_products import parse_json
from linearizer.serve.bodies import Body

BYTES_OF_TOKEN = 32  # of a body for each position: what a token takes as a number, or as text in escapes
OTHER_BYTES = 2**20  # of a body besides one text of the greatest length
DRAINED_BYTES = 2**28  # of a body that is too large: a client that is still sending hears no refusal
BODY_SECONDS = 60  # in which a body must arrive

Read = TypeVar("Read", bound=Body)


class Refusal(Exception):
    """An error in the shape of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.headers = status, headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def max_body_bytes(positions: int) -> int:
    """Bound a body: one text of the greatest length fits in any writing, and several in most."""
    return OTHER_BYTES + BYTES_OF_TOKEN * positions


async def read_body(request: Request, kind: type[Read], positions: int) -> Read:
    """Read the body of a request to a model that has so many positions."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):  # a page of another site may send others unasked
        raise Refusal(400, f"the content type of the body is {media!r}: send JSON, as application/json")
    try:
        content = await asyncio.wait_for(receive_bytes(request, max_body_bytes(positions)), BODY_SECONDS)
    except ClientDisconnect as error:
        raise Refusal(499, "the client has gone") from error  # nobody reads it
    except asyncio.TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS} seconds: send it again") from error
    return await run_in_threadpool(parse_body, content, kind, positions)


async def receive_bytes(request: Request, most: int) -> bytes:
    """Receive a body; of one that is too large, nothing is kept."""
    content, received = bytearray(), 0
    async for piece in request.stream():
        received += len(piece)
        if received <= most:
            content += piece
        elif received > DRAINED_BYTES:
            break
        else:
            content.clear()
    if received > most:
        raise Refusal(
            413,
            f"the body has more than the {most} bytes that a request may have here: shorten the prompt, or send "
            "several prompts in requests of their own",
        )
    return bytes(content)


def parse_body(content: bytes, kind: type[Read], positions: int) -> Read:
    """Parse a body, and say what is wrong with it, and with which of its fields."""
    try:
        values = parse_json(content.decode())
        if b"\\ud" in content.lower():  # half of a letter cannot be written, neither in a text nor in an answer
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 (byte {error.start}): send JSON in UTF-8") from error
    except UnicodeEncodeError as error:
        raise Refusal(400, "the body has half of a surrogate pair (\\ud800 to \\udfff): send whole letters") from error
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is no JSON ({error.msg} at character {error.pos}): correct it") from error
    except ValueError as error:  # it is nested too deeply, or a number has thousands of digits
        raise Refusal(400, f"the body cannot be read ({error}): correct it") from error
    try:
        return kind.model_validate(values, context={"positions": positions})
    except ValidationError as error:
        raise refusal_of(error) from error


def refusal_of(error: ValidationError) -> Refusal:
    """Say what is wrong with the values of a body."""
    first = error.errors(include_url=False)[0]
    names = [str(part) for part in first["loc"]]
    # besides names and numbers of the body, places have the types that pydantic tried
    place = names[:1] + [name for name in names[1:] if name != "str" and "[" not in name]
    reason = first["msg"].removeprefix("Value error, ")
    if not place and first["type"] != "value_error":
        return Refusal(400, "the body is no JSON object: send an object, with the content type application/json")
    return Refusal(400, f"{'.'.join(place)}: {reason}" if place else reason, place[0] if place else None)
