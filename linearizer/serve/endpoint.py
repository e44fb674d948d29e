"""The endpoint, which follows OpenAI's API: models, completions and chat completions, at once or streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from transformers.cache_utils import Cache

from linearizer.errors import FolderError, LinearizerError, RequestError, first_line
from linearizer.serve.bodies import MAX_PROMPTS, Body, ChatBody, CompletionBody, Refusal, read_body, read_text_body
from linearizer.serve.cache_rows import take_shift
from linearizer.serve.guards import REFUSAL, Guard, has_key, is_local
from linearizer.serve.row import Row, TextDelta
from linearizer.serve.served import STOPPED, Served, no_room, owner_of, refuse_other_model
from linearizer.serve.state_files import BusyState, NoState
from linearizer.serve.state_routes import add_state_routes
from linearizer.serve.states import Beginning, begin_at
from linearizer.teacher.logits import vocabulary
from linearizer.teacher.picture_prompts import Prompt
from linearizer.teacher.token_loop import ends_of

QUIET_SECONDS = 15  # after which a stream sends a comment: proxies cut connections on which nothing is sent
LATE_SECONDS = 10  # after a request's deadline, for the client to read the error
WRONG_KEY = "this server needs its key, and the request has none or another: send it as the API key"


@dataclass
class Work:
    """The texts of one request, and a queue of new text, with the index of its prompt."""

    body: Body
    rows: list[Row]
    received: asyncio.Queue[tuple[int, TextDelta]]
    deadline: float  # on the clock of the event loop
    start: Beginning | None = None
    alarm: asyncio.TimerHandle | None = None  # ends the request at the deadline
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield new text until all texts have ended."""
        unfinished = len(self.rows)
        while unfinished:
            index, delta = await self.received.get()
            if delta.error is not None:
                raise Refusal(delta.status, delta.error)
            unfinished -= delta.last
            yield index, delta

    async def wait_for_state(self) -> Cache:
        """Wait for the state after the text."""
        (row,) = self.rows
        assert row.state is not None
        try:
            seconds = self.deadline - asyncio.get_running_loop().time()
            return await asyncio.wait_for(asyncio.wrap_future(row.state), seconds)
        except Exception as error:  # a device may fail in many ways
            raise Refusal(500, f"the state was not kept ({first_line(error)}): it is as it was before") from error

    async def keep_state(self) -> None:
        """Replace the state that the text continued, if the request asks for it."""
        if self.body.keep and self.start is not None:
            try:
                await run_in_threadpool(self.start.save, await self.wait_for_state())
            except FolderError as error:
                why = "the state was not kept, as its folder cannot be written: it is as it was before"
                raise Refusal(500, why) from error

    @property
    def usage(self) -> dict[str, Any]:
        begun = self.rows[:: self.body.n]  # each prompt counts once
        prompt, written = sum(len(row.prompt) for row in begun), sum(row.written for row in self.rows)
        reused = sum(row.reused for row in begun)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


def make_endpoint(served: Served, local: bool = True, keys: Sequence[str] = ()) -> FastAPI:
    """Make the application that serves a model, `local`: to this machine only; its engine must have started."""
    app = FastAPI(title="Linearizer", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.asks_for_keys = bool(keys)
    if keys:
        refusal = response_of(Refusal(401, WRONG_KEY, code="invalid_api_key"))
        app.add_middleware(Guard, allows=has_key(keys), refuse=refusal)
    if local:
        app.add_middleware(Guard, allows=is_local, refuse=response_of(Refusal(403, REFUSAL.strip())))

    @app.exception_handler(Refusal)
    async def answer_refusal(request: Request, error: Refusal) -> JSONResponse:
        return response_of(error)

    @app.exception_handler(LinearizerError)
    async def answer_error(request: Request, error: LinearizerError) -> JSONResponse:
        return response_of(Refusal(400 if isinstance(error, RequestError) else 500, str(error)))

    @app.exception_handler(FileNotFoundError)
    @app.exception_handler(NoState)
    async def answer_no_state(request: Request, error: Exception) -> JSONResponse:
        why = "there is no such state here any more: see GET /v1/states"
        return response_of(Refusal(404, why, "state", "state_not_found"))

    @app.exception_handler(BusyState)
    async def answer_busy_state(request: Request, error: BusyState) -> JSONResponse:
        wait = {"Retry-After": "1"}
        return response_of(Refusal(409, "another request writes the state: try again", "state", headers=wait))

    @app.exception_handler(FolderError)
    async def answer_folder(request: Request, error: FolderError) -> JSONResponse:
        return response_of(Refusal(500, str(error).replace(f"{served.states}/", "")))  # no path of this machine

    @app.exception_handler(HTTPException)
    async def answer_http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path} is not served ({error.detail}): see GET /v1/models"
        return response_of(Refusal(error.status_code, message))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        engine = served.engine
        if engine.closed:
            raise Refusal(503, STOPPED)
        states = {"kept_states": len(engine.kept.states), "kept_state_bytes": engine.kept.bytes}
        return {"rows": len(engine.rows), "waiting": engine.unread, **states}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        refuse_other_model(served, name)
        return served.card

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await answer(served, CompletionBody, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await answer(served, ChatBody, request)

    add_state_routes(app, served.states_of, served.load, partial(read_into_state, served), served.max_seconds)
    return app


def response_of(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.content, refusal.status, refusal.headers)


async def answer(served: Served, kind: type[Body], request: Request) -> Any:
    """Answer a request, at once or as a stream."""
    deadline = asyncio.get_running_loop().time() + served.max_seconds
    if not served.engine.has_room(1):  # before a body is received in vain
        raise no_room(served)
    body = await read_body(request, kind, served.positions, kind is ChatBody and served.processor is not None)
    start = None
    if body.state is not None:
        start = await run_in_threadpool(begin_at, served.states_of(request), body.state, body.keep, served.load)
    try:
        work = await begin(served, body, deadline, owner_of(request), start)
    except BaseException:
        if start is not None:
            start.let_go()
        raise
    if body.stream:
        return Stream(served, work)
    texts = await finish(served, work, request)
    choices = [choice(work, index, texts[index]) for index in sorted(texts)]
    return {**head(served, work), "choices": choices, "usage": work.usage}


async def read_into_state(served: Served, request: Request) -> Cache:
    """Read the text in a request."""
    deadline = asyncio.get_running_loop().time() + served.max_seconds
    if not served.engine.has_room(1):
        raise no_room(served)
    work = await begin(served, await read_text_body(request, served.positions), deadline, owner_of(request))
    await finish(served, work, request)
    return await work.wait_for_state()


async def finish(served: Served, work: Work, request: Request) -> dict[int, TextDelta]:
    """Wait until all texts are complete, and kept where the request asks for it."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.received.put_nowait((0, TextDelta(error="the client has gone", status=499)))

    leaving = asyncio.create_task(wait_for_disconnect())
    try:
        texts = {index: text async for index, text in work.deltas()}  # each arrives in one piece
        await work.keep_state()
        return texts
    except asyncio.CancelledError as error:  # the server is stopping
        raise Refusal(503, STOPPED) from error
    finally:
        leaving.cancel()
        end(served, work)


async def begin(served: Served, body: Body, deadline: float, owner: str = "", start: Beginning | None = None) -> Work:
    """Check a request, and queue its texts; it ends at the deadline."""
    if body.model is not None:
        refuse_other_model(served, body.model)
    loop, received = asyncio.get_running_loop(), asyncio.Queue[tuple[int, TextDelta]]()

    def sender(index: int) -> Callable[[TextDelta], None]:
        texts: list[str] = []

        def send(delta: TextDelta) -> None:
            if not body.stream:
                texts.append(delta.text)
                if not delta.last:  # waking the loop for every token would slow down the batch
                    return
                delta = replace(delta, text="".join(texts))
            loop.call_soon_threadsafe(received.put_nowait, (index, delta))

        return send

    try:
        prompts = await run_in_threadpool(body.prompts, served.tokenizer, served.processor)  # a long text takes seconds
    except RequestError as error:
        raise Refusal(400, str(error)) from error
    if start is not None and (count := len(prompts) * body.n) > 1:
        raise Refusal(400, f"a state is continued by one text, and here are {count}: fork it", "prompt")
    if (count := len(prompts) * body.n) > MAX_PROMPTS:
        raise Refusal(400, f"{count} answers are more than the {MAX_PROMPTS} of one request: ask for fewer", "n")
    prompts = [prompt for prompt in prompts for _ in range(body.n)]
    rows = [make_row(served, body, prompt, index, sender(index), start) for index, prompt in enumerate(prompts)]
    for row in rows:
        row.owner = owner
    work = Work(body, rows, received, deadline, start)
    if not served.engine.submit(*rows):
        raise no_room(served)
    why = f"the answer was not complete after {served.max_seconds:g} seconds: ask for fewer max_tokens, or stream it"
    work.alarm = loop.call_at(deadline, received.put_nowait, (0, TextDelta(error=why, status=504)))
    return work


def make_row(
    served: Served,
    body: Body,
    prompt: Prompt,
    index: int,
    send: Callable[[TextDelta], None],
    start: Beginning | None = None,
) -> Row:
    """Make the row of a prompt; refuse a prompt that cannot be served."""
    tokens, reach = prompt.tokens, prompt.pictures.reach
    if not tokens:
        raise Refusal(400, "the prompt is empty: send at least one token", "prompt")
    before = [] if start is None else start.tokens
    room = served.positions - len(before) - len(tokens)
    if room < 1 or (body.new_tokens or 1) > room:
        raise Refusal(
            400,
            f"{len(before) + len(tokens)} tokens of prompt and {body.new_tokens or 1} new tokens are more than the "
            f"{served.positions} of the model: shorten the prompt, or ask for fewer max_tokens",
            "max_tokens" if room > 0 else body.PROMPT,
            "context_length_exceeded",
        )
    if min(tokens) < 0 or max(tokens) >= (size := vocabulary(served.model)):
        raise Refusal(400, f"a token is not one of the model's {size}", "prompt")
    ends = frozenset[int]() if body.ignore_eos else ends_of(served.model)
    count = room if body.new_tokens is None else body.new_tokens
    numbered = [-1 - prompt.pictures.number_with(tokens)] * reach + tokens[reach:]
    how = body.drawing(index), tuple(body.stop), ends, len(before), prompt
    row = Row(before + numbered, send, served.tokenizer, count, *how)
    if start is not None:
        row.cache, row.shift = start.cache, take_shift(start.cache)
    if body.hands_over:
        row.state, row.after = Future(), body.after(served.tokenizer)
    return row


def end(served: Served, work: Work) -> None:
    """End a request: abandon its unfinished texts."""
    if work.alarm is not None:
        work.alarm.cancel()
    for row in work.rows:
        if not row.done:
            served.engine.cancel(row)
    if work.start is not None:
        work.start.let_go()


class Stream(StreamingResponse):
    """An answer as events while it is written; it ends if the client goes away, or stops reading."""

    def __init__(self, served: Served, work: Work) -> None:
        super().__init__(events_of(served, work), media_type="text/event-stream")
        self.leave, self.latest = partial(end, served, work), work.deadline + LATE_SECONDS
        self.pulse = partial(add_pulses, work)
        self.late = (
            f"the request was read only after the {served.max_seconds:g} seconds that it may take: send it faster, or "
            "start the server with a larger --max-seconds"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds, begun = self.latest - asyncio.get_running_loop().time(), list[Message]()

        async def begin(message: Message) -> None:
            begun[:] = [message]
            await send(message)

        pulse = asyncio.create_task(self.pulse())
        try:
            await asyncio.wait_for(super().__call__(scope, receive, begin), seconds)
        except asyncio.TimeoutError:  # the client does not read, or its request took all of the time
            if not begun:
                await response_of(Refusal(504, self.late))(scope, receive, send)
        except asyncio.CancelledError:  # the server is stopping
            final = event(Refusal(503, STOPPED).content).encode()
            with suppress(Exception):  # a client may have gone by now
                await send({"type": "http.response.body", "body": final, "more_body": False})
        finally:
            pulse.cancel()
            self.leave()


async def add_pulses(work: Work) -> None:
    """Add empty text to an answer from time to time."""
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        work.received.put_nowait((0, TextDelta()))


async def events_of(served: Served, work: Work) -> AsyncIterator[str]:
    """Yield the answer as events."""
    with_usage = work.body.stream_options is not None and work.body.stream_options.include_usage
    common = {**head(served, work), **({"usage": None} if with_usage else {})}
    if isinstance(work.body, ChatBody):
        opening = {"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
        yield event({**common, "choices": [opening]})
    try:
        async for index, delta in work.deltas():
            is_pulse = delta == TextDelta()
            yield ": wait\n\n" if is_pulse else event({**common, "choices": [choice(work, index, delta)]})
        await work.keep_state()
    except Refusal as error:
        yield event(error.content)
        return
    if with_usage:
        yield event({**common, "choices": [], "usage": work.usage})
    yield "data: [DONE]\n\n"


def head(served: Served, work: Work) -> dict[str, Any]:
    about = {"object": work.body.kind, "created": work.created, "model": served.name}
    return {"id": f"{work.body.PREFIX}-{work.id}", **about}


def choice(work: Work, index: int, delta: TextDelta) -> dict[str, Any]:
    """Return a text, or a part of it, in the form of an answer's choice."""
    return {"index": index, **work.body.content(delta.text), "logprobs": None, "finish_reason": delta.finish}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
