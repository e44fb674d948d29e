"""The routes of the states that clients own: list, read a text into one, download, upload, fork, delete."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from transformers.cache_utils import Cache

from linearizer.serve.bodies import FILES, Refusal, media_of, receive_in_time
from linearizer.serve.state_files import held
from linearizer.serve.states import RECEIVED, States, load_for_client

PIECE = 2**20  # bytes of a state that are sent or written at once


def add_state_routes(
    app: FastAPI,
    states_of: Callable[[Request], States],
    load: Callable[[Path], Cache],
    read: Callable[[Request], Awaitable[Cache]],
    max_seconds: float,
) -> None:
    @app.get("/v1/states")
    def list_states(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": states_of(request).cards()}

    @app.post("/v1/states")
    async def read_into_new(request: Request) -> dict[str, Any]:
        states = states_of(request)
        await run_in_threadpool(states.check_room, 1)  # before a text is read in vain
        return await run_in_threadpool(states.save, states.new_path(), await read(request))

    @app.get("/v1/states/{name}")
    def download(request: Request, name: str) -> StreamingResponse:
        file = open(states_of(request).path(name), "rb")  # noqa: SIM115
        size = str(file.seek(0, 2))
        return StreamingResponse(pieces_of(file), media_type=FILES[0], headers={"Content-Length": size})

    @app.put("/v1/states/{name}")
    async def upload(request: Request, name: str) -> dict[str, Any]:
        states = states_of(request)
        if media_of(request) != FILES[0]:
            raise Refusal(400, f"the bytes of a state are sent as {FILES[0]}")
        path = states.path(name, exists=False)
        received = states.new_path().with_suffix(RECEIVED)
        try:
            await receive_in_time(receive_file(request, received, states, path), max_seconds)
            return await run_in_threadpool(replace, states, path, received, load)
        finally:
            received.unlink(missing_ok=True)

    @app.post("/v1/states/{name}/fork")
    def fork(request: Request, name: str) -> dict[str, Any]:
        states = states_of(request)
        return states.fork(states.path(name))

    @app.delete("/v1/states/{name}")
    def delete(request: Request, name: str) -> dict[str, Any]:
        path = states_of(request).path(name)
        with held(path):
            path.unlink()
        return {"id": name, "object": "state", "deleted": True}


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file: of the state as it was when the file was opened."""
    with file:
        file.seek(0)
        while piece := file.read(PIECE):
            yield piece


async def receive_file(request: Request, place: Path, states: States, path: Path) -> None:
    """Receive a file that has room in the place of a state."""
    piece = b""
    with open(place, "wb") as file:
        async for sent in request.stream():
            piece += sent
            if len(piece) >= PIECE or not sent:  # nothing is sent at the end
                await run_in_threadpool(states.receive, file, piece, path)
                piece = b""


def replace(states: States, path: Path, received: Path, load: Callable[[Path], Cache]) -> dict[str, Any]:
    """Put a received file in the place of a state, if it is one of this model."""
    load_for_client(received, load)
    with held(path):
        return states.put(path, partial(os.rename, received))
