"""The model behind the endpoint, and the states that its clients own."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from linearizer.errors import RequestError
from linearizer.serve.bodies import Processor, Refusal
from linearizer.serve.engine import Engine
from linearizer.serve.saved_state import read_file, restore_state
from linearizer.serve.state_files import reading
from linearizer.serve.states import States
from linearizer.student.modeling_linearized import LinearizedForCausalLM

STOPPED = "the server was stopped before the answer was complete: ask again when it is back"
RETRY_SECONDS = 5  # after which a refused client may try again


@dataclass(frozen=True)
class Served:
    """A model behind the endpoint."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    positions: int  # tokens of the longest text
    engine: Engine
    max_seconds: float  # of a request
    states: Path | None = None  # the folder of the states that clients own; None: there are none
    state_bytes: int = 0  # of the longest text in layers with a student, or in the teacher's same layers
    recurrent_bytes: int = 0  # of any text in recurrent layers
    processor: Processor | None = None
    since: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> dict[str, Any]:
        about = {"object": "model", "created": self.since, "owned_by": "linearizer"}
        sizes = {"state_bytes": self.state_bytes, "recurrent_bytes": self.recurrent_bytes}
        return {"id": self.name, **about, "max_model_len": self.positions, **sizes}

    def states_of(self, request: Request) -> States:
        """Return the states of a request's key."""
        if self.states is None or not isinstance(self.model, LinearizedForCausalLM):
            raise Refusal(404, "no states are kept here for clients: serve a student, with --states FOLDER")
        return States.of(self.states, owner_of(request), self.engine.kept.max_bytes, self.model)

    def load(self, path: Path) -> Cache:
        """Load a state; the engine's thread has no part in it but the model's."""
        with reading(path):
            read = read_file(path)
            tokens, texts = read.sizes[-1]
            if texts != 1:
                raise RequestError("the state is of several texts at once: send the state of one")
            if tokens > self.positions:
                raise RequestError(
                    f"the state has read {tokens} tokens, more than the {self.positions} of the model: send the state "
                    "of a shorter text"
                )
            try:
                cache: Cache = self.engine.call(lambda: restore_state(self.model, read)).result()
            except CancelledError as error:
                raise Refusal(503, STOPPED) from error
        return cache


def owner_of(request: Request) -> str:
    """Return the key of a request's client, if the server asks for keys."""
    return request.headers["authorization"] if request.app.state.asks_for_keys else ""


def no_room(served: Served) -> Refusal:
    """Return the refusal of a request that finds no room."""
    if served.engine.closed:
        return Refusal(503, STOPPED)
    wait = {"Retry-After": str(RETRY_SECONDS)}
    return Refusal(429, "too many requests wait already: try again later", code="too_many_requests", headers=wait)


def refuse_other_model(served: Served, name: str) -> None:
    if name != served.name:
        raise Refusal(404, f"there is no model {name!r} here: ask for {served.name!r}", "model", "model_not_found")
