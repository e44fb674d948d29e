"""The body of a request: received within bounds, checked by the fields of OpenAI's API, and turned into prompts.

A field is served (also top_k, min_p, repetition_penalty and chat_template_kwargs, as on other servers), ignored if it
does not concern the text (IGNORED), or refused: an answer without what was requested would look complete.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from linearizer.errors import RequestError
from linearizer.serve.row import Drawing
from linearizer.teacher.chat_template import tokens_of, write_chat

# A body is bounded: one text of the greatest length fits in any script, and several in most.
BYTES_OF_TOKEN = 32  # of a body for each position: a token as a number, or as text in escapes
OTHER_BYTES = 2**20  # of a body, in addition to one text of the greatest length
DRAINED_BYTES = 2**28  # read from a body that is too large: a client that is still sending hears no refusal
BODY_SECONDS = 60  # in which a body must arrive
MAX_PROMPTS, MAX_STOPS = 64, 16  # of one request
DEFAULT_COMPLETION = 16  # new tokens, as at OpenAI; a chat continues to its end
# Options of other servers that are not served here, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# Options that do not concern the text: the user, storage and caches, costs, and speed.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "keep_alive", "request_id", "chat_id", "session_id",
}  # fmt: skip


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


def refuse_boolean(value: Any) -> Any:
    """Refuse true and false in place of a number: to Python they are 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


Integer = Annotated[int, BeforeValidator(refuse_boolean)]
Number = Annotated[float, BeforeValidator(refuse_boolean)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Body(BaseModel, ABC):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None  # the served one
    max_tokens: Integer | None = Field(None, ge=1)
    temperature: Number = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: Number = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Integer = Field(0, ge=-1)  # 0 and -1: all
    min_p: Number = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: Number = Field(1.0, gt=0, allow_inf_nan=False)
    seed: Integer | None = None
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False  # continue after the end of a text: for measurements

    @model_validator(mode="before")
    @classmethod
    def refuse_unserved(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if (value := values.get(name)) is not None and value not in neutral:
                raise ValueError(f"{name} = {str(value)[:40]} is not served here: leave it out")
        left_out = IGNORED | NEUTRAL.keys()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    @property
    def new_tokens(self) -> int | None:
        """The tokens to write; None: until the text ends, or the positions do."""
        return self.max_tokens

    def drawing(self, index: int) -> Drawing:
        """Return how to draw the text of one of the prompts."""
        seeded = Random(None if self.seed is None else f"{self.seed} {index}")
        top_k = self.top_k if self.top_k > 0 else None
        return Drawing(self.temperature, self.top_p, seeded, top_k, self.min_p, self.repetition_penalty)

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of every prompt."""


class CompletionBody(Body):
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]

    @field_validator("prompt", mode="before")
    @classmethod
    def refuse_long_lists(cls, prompt: Any, info: ValidationInfo) -> Any:
        """Refuse more tokens than the model has positions, or too many prompts, before each is checked."""
        if isinstance(prompt, list) and prompt:
            kind, limit = "prompts", MAX_PROMPTS
            if isinstance(prompt[0], int):
                kind, limit = "tokens", (info.context or {})["positions"]
            if len(prompt) > limit:
                raise ValueError(f"{len(prompt)} {kind} are more than the {limit} of one request: send fewer")
        return prompt

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        return [tokens_of(tokenizer, x, True) if isinstance(x, str) else x for x in prompts]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def refuse_empty(self) -> Message:
        if self.content is None and self.role != "assistant":  # an assistant may have called a tool instead
            raise ValueError(f"a message of role {self.role!r} has no content: add a text")
        return self

    def plain(self) -> dict[str, str]:
        """Return the message in the form for chat templates."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    reasoning_effort: str | None = None  # for the template, if it uses it
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of the conversation, written by the model's template."""
        if not tokenizer.chat_template:
            raise RequestError("this model has no chat template: send the whole text as a prompt to /v1/completions")
        variables = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        variables |= self.chat_template_kwargs
        text = write_chat(tokenizer, [message.plain() for message in self.messages], variables)
        return [tokens_of(tokenizer, text, False)]


Read = TypeVar("Read", bound=Body)


async def read_body(request: Request, kind: type[Read], positions: int) -> Read:
    """Read the body of a request, within bounds that follow from the positions of the model."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):  # pages of other sites may send other types unasked
        raise Refusal(400, f"the content type of the body is {media!r}: send JSON, as application/json")
    try:
        content = await asyncio.wait_for(receive_bytes(request, OTHER_BYTES + BYTES_OF_TOKEN * positions), BODY_SECONDS)
    except ClientDisconnect as error:
        raise Refusal(499, "the client has gone") from error  # nobody reads this
    except asyncio.TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS} seconds: send it again") from error
    return await run_in_threadpool(parse_body, content, kind, positions)


async def receive_bytes(request: Request, max_bytes: int) -> bytes:
    """Receive a body; keep nothing of one that is too large."""
    content, received = bytearray(), 0
    async for chunk in request.stream():
        received += len(chunk)
        if received <= max_bytes:
            content += chunk
        elif received > DRAINED_BYTES:
            break
        else:
            content.clear()
    if received > max_bytes:
        raise Refusal(
            413,
            f"the body has more than the {max_bytes} bytes that a request may have here: shorten the prompt, or send "
            "several prompts in separate requests",
        )
    return bytes(content)


def parse_body(content: bytes, kind: type[Read], positions: int) -> Read:
    """Parse a body; a refusal names the first wrong field."""
    try:
        return kind.model_validate_json(content, context={"positions": positions})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    if fault["type"] in ("json_invalid", "model_type"):
        reason = fault.get("ctx", {}).get("error", "it is not an object")
        raise Refusal(400, f"the body is not a JSON object ({reason}): correct it")
    names = [str(part) for part in fault["loc"]]  # of the body, and of the types that pydantic tried
    place = names[:1] + [name for name in names[1:] if name != "str" and "[" not in name]
    reason = fault["msg"].removeprefix("Value error, ")
    raise Refusal(400, f"{'.'.join(place)}: {reason}" if place else reason, place[0] if place else None)
