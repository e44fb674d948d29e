"""The body of a request: received within bounds, checked by the names of OpenAI's API, and turned into prompts.

A field is served (top_k, min_p, repetition_penalty and chat_template_kwargs, too, which other servers know), ignored
where it does not concern the text (IGNORED), or refused: an answer that leaves out what was requested looks complete.
"""

from __future__ import annotations

import asyncio
import inspect
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

from linearizer.errors import RequestError, first_line
from linearizer.serve.row import Drawing

# A body is bounded: one text of the greatest length fits in any writing, and several in most.
BYTES_OF_TOKEN = 32  # of a body for each position: what a token takes as a number, or as text in escapes
OTHER_BYTES = 2**20  # of a body, in addition to one text of the greatest length
DRAINED_BYTES = 2**28  # of a body that is too large: a client that is still sending hears no refusal
BODY_SECONDS = 60  # in which a body must arrive
MAX_PROMPTS, MAX_STOPS = 64, 16  # of one request
DEFAULT_COMPLETION = 16  # new tokens, as OpenAI has it; a chat goes on to its end
# Options of other servers that are not served here, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# Options that do not concern the text: who asks, what is stored or cached, what it costs, and how fast it comes.
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
    """Refuse true and false where a number belongs, which Python takes for 1 and 0."""
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

    model: str | None = None  # the one that is served
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
    ignore_eos: bool = False  # go on after the end of a text: for measurements

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
        """The tokens to write; None: to the end of the text, or as far as positions reach."""
        return self.max_tokens

    def drawing(self, index: int) -> Drawing:
        """Return how the text of one of the prompts is drawn."""
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
            kind, most = "prompts", MAX_PROMPTS
            if isinstance(prompt[0], int):
                kind, most = "tokens", (info.context or {})["positions"]
            if len(prompt) > most:
                raise ValueError(f"{len(prompt)} {kind} are more than the {most} of one request: send fewer")
        return prompt

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        return [tokenizer(each, verbose=False)["input_ids"] if isinstance(each, str) else each for each in prompts]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def refuse_empty(self) -> Message:
        if self.content is None and self.role != "assistant":  # which may have called a tool in place of speaking
            raise ValueError(f"a message of role {self.role!r} has no content: add a text")
        return self

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    reasoning_effort: str | None = None  # for the template, if it asks for it
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of the conversation, as the model's own template writes it."""
        if not tokenizer.chat_template:
            raise RequestError("this model has no chat template: send the whole text as a prompt to /v1/completions")
        wanted = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        wanted |= self.chat_template_kwargs
        if reserved := wanted.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
            raise RequestError(f"chat_template_kwargs may not set {min(reserved)}: name variables of the template only")
        try:
            text = tokenizer.apply_chat_template(
                [message.plain() for message in self.messages], tokenize=False, add_generation_prompt=True, **wanted
            )
        except Exception as error:  # a template is a program, and refuses in its own way
            raise RequestError(f"the model's chat template refuses these messages ({first_line(error)})") from error
        return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


Read = TypeVar("Read", bound=Body)


async def read_body(request: Request, kind: type[Read], positions: int) -> Read:
    """Read the body of a request, within bounds that follow from the positions of the model."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):  # a page of another site may send others unasked
        raise Refusal(400, f"the content type of the body is {media!r}: send JSON, as application/json")
    try:
        content = await asyncio.wait_for(receive_bytes(request, OTHER_BYTES + BYTES_OF_TOKEN * positions), BODY_SECONDS)
    except ClientDisconnect as error:
        raise Refusal(499, "the client has gone") from error  # nobody reads it
    except asyncio.TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS} seconds: send it again") from error
    return await run_in_threadpool(parse_body, content, kind, positions)


async def receive_bytes(request: Request, most: int) -> bytes:
    """Receive a body; of one that is too large, nothing is kept."""
    content, received = bytearray(), 0
    async for chunk in request.stream():
        received += len(chunk)
        if received <= most:
            content += chunk
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
    """Parse a body; a refusal names the first field that is wrong."""
    try:
        return kind.model_validate_json(content, context={"positions": positions})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] in ("json_invalid", "model_type"):
        reason = first.get("ctx", {}).get("error", "it is not an object")
        raise Refusal(400, f"the body is not a JSON object ({reason}): correct it")
    names = [str(part) for part in first["loc"]]  # of the body, and of the types that pydantic tried
    place = names[:1] + [name for name in names[1:] if name != "str" and "[" not in name]
    reason = first["msg"].removeprefix("Value error, ")
    raise Refusal(400, f"{'.'.join(place)}: {reason}" if place else reason, place[0] if place else None)
