"""The body of a request: received within bounds, checked by the fields of OpenAI's API, and turned into prompts.

A field is served (also top_k, min_p, repetition_penalty and chat_template_kwargs, as on other servers), ignored if it
does not concern the text (IGNORED), or refused: an answer without what was requested would look complete.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Annotated, Any, ClassVar, TypeVar

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

from linearizer.errors import RequestError, TextError
from linearizer.serve.messages import Message, PicturePart
from linearizer.serve.row import Drawing
from linearizer.teacher.chat_template import next_turn_tokens, tokens_of, turn_texts, turn_tokens, write_chat
from linearizer.teacher.picture_files import MAX_PICTURES
from linearizer.teacher.picture_prompts import Prompt, prompt_of
from linearizer.teacher.text import decode_document

# A body is bounded: one text of the greatest length fits in any script, and several in most.
BYTES_OF_TOKEN = 32  # of a body for each position: a token as a number, or as text in escapes
OTHER_BYTES = 2**20  # of a body, in addition to one text of the greatest length
OF_A_CHOICE = ("value_error", "union_tag_invalid")  # errors of pydantic that say more than those of other types tried
WORDS = {  # for errors of pydantic
    "extra_forbidden": "there is no such field here: correct its name, or leave it out",
    "model_type": "it should be an object",
    "model_attributes_type": "it should be an object",
}
PICTURE_BYTES = 2**25  # of a body, in addition, where the model reads pictures
PDF_BYTES = 2**25  # of a PDF, in addition: its pictures and fonts
DRAINED_BYTES = 2**28  # read from a body that is too large: a client that is still sending hears no refusal
BODY_SECONDS = 60  # in which a body must arrive
MAX_PROMPTS, MAX_STOPS = 64, 16  # of one request
DEFAULT_COMPLETION = 16  # new tokens, as at OpenAI; a chat continues to its end
# Options of other servers that are not served here, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# Options that do not concern the text: the user, storage and caches, costs, and speed.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "keep_alive", "request_id", "chat_id", "session_id",
}  # fmt: skip


Processor = Callable[[], Any]  # loads what prepares pictures, for models that read them


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
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of events, which are not padded here


class Body(BaseModel, ABC):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid")
    PREFIX: ClassVar[str] = "cmpl"  # of the answer's id
    PROMPT: ClassVar[str] = "prompt"  # the field that holds it

    model: str | None = None  # the served one
    n: Integer = Field(1, ge=1, le=MAX_PROMPTS)  # answers to each prompt
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
    state: str | None = None  # to continue
    keep: bool = False  # replace this state by the one after the text

    @model_validator(mode="before")
    @classmethod
    def refuse_unserved(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            value = values.get(name)
            same = [each for each in neutral if each == value and isinstance(each, bool) == isinstance(value, bool)]
            if value is not None and not same:  # true is no 1, and false no 0
                raise Refusal(400, f"{name} = {str(value)[:40]} is not served here: leave it out", name)
        left_out = IGNORED | NEUTRAL.keys()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    @model_validator(mode="after")
    def refuse_to_keep(self) -> Body:
        if self.keep and (self.state is None or self.stop):
            why = "there is no state" if self.state is None else "a state cannot forget what follows a stop string"
            raise ValueError(f"keep is not possible here, as {why}: leave it out")
        return self

    @property
    def new_tokens(self) -> int | None:
        """The tokens to write; None: until the text ends, or the positions do."""
        return self.max_tokens

    @property
    def hands_over(self) -> bool:
        """Whether the state after the text is needed."""
        return self.keep

    def after(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens that a state reads after the text."""
        return []

    @property
    def kind(self) -> str:
        """The kind of the answer, or of a part of it."""
        return "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        """Return a text, or a part of it, as the content of an answer."""
        return {"text": text}

    def drawing(self, index: int) -> Drawing:
        """Return how to draw the text of one of the prompts."""
        seeded = Random(None if self.seed is None else f"{self.seed} {index}")
        top_k = self.top_k if self.top_k > 0 else None
        return Drawing(self.temperature, self.top_p, seeded, top_k, self.min_p, self.repetition_penalty)

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase, processor: Processor | None = None) -> list[Prompt]:
        """Return the tokens of every prompt, and its pictures."""


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

    def prompts(self, tokenizer: PreTrainedTokenizerBase, processor: Processor | None = None) -> list[Prompt]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        begins = self.state is None
        return [Prompt(tokens_of(tokenizer, x, begins) if isinstance(x, str) else x) for x in prompts]


class TextBody(Body):
    """A text to read into a new state."""

    text: str = Field(min_length=1)
    raw: bool = False

    @model_validator(mode="after")
    def refuse_others(self) -> TextBody:
        if others := self.model_fields_set - {"model", "text", "raw"}:
            raise ValueError(f"{min(others)} has no effect on a text that is only read: leave it out")
        return self

    @property
    def new_tokens(self) -> int:
        return 0

    @property
    def hands_over(self) -> bool:
        return True

    def prompts(self, tokenizer: PreTrainedTokenizerBase, processor: Processor | None = None) -> list[Prompt]:
        return [Prompt(turn_tokens(tokenizer, self.text, asks=False, raw=self.raw))]


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    reasoning_effort: str | None = None  # for the template, if it uses it
    chat_template_kwargs: dict[str, Any] = {}
    PREFIX: ClassVar[str] = "chatcmpl"
    PROMPT: ClassVar[str] = "messages"

    @property
    def kind(self) -> str:
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def content(self, text: str) -> dict[str, Any]:
        if self.stream:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text}}

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def refuse_many_pictures(self) -> ChatBody:
        if (count := len(self.pictures)) > MAX_PICTURES:
            raise ValueError(f"{count} pictures are more than the {MAX_PICTURES} of a chat: send fewer")
        return self

    @property
    def pictures(self) -> list[PicturePart]:
        return [picture for message in self.messages for picture in message.pictures]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, processor: Processor | None = None) -> list[Prompt]:
        """Return the tokens of the conversation, written by the model's template, and its pictures."""
        if not tokenizer.chat_template:
            raise RequestError("this model has no chat template: send the whole text as a prompt to /v1/completions")
        variables = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        variables |= self.chat_template_kwargs
        text = write_chat(tokenizer, [message.plain() for message in self.messages], variables)
        if self.state is not None:  # which stands where a user goes on
            opening = turn_texts(tokenizer, variables=variables).opening
            if self.messages[0].role != "user" or not text.startswith(opening):
                raise RequestError("after a state the first message is its user's: send no system message with it")
            text = text.removeprefix(opening)
        if not self.pictures:
            return [Prompt(tokens_of(tokenizer, text, False))]
        if processor is None:
            raise RequestError("this model reads no pictures: leave them out")
        return [prompt_of(tokenizer, processor(), text, [picture.read() for picture in self.pictures], False)]

    def after(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return next_turn_tokens(tokenizer)


Read = TypeVar("Read", bound=Body)
Received = TypeVar("Received")
PDF = "application/pdf"
FILES = ("application/octet-stream", PDF)  # pages of other sites may not send these unasked


async def read_body(request: Request, kind: type[Read], positions: int, pictures: bool = False) -> Read:
    """Read the body of a request, within bounds that follow from the positions of the model, perhaps with pictures."""
    media = media_of(request)
    if media != "application/json" and not media.endswith("+json"):  # pages of other sites may send other types unasked
        raise Refusal(400, f"the content type of the body is {media!r}: send JSON, as application/json")
    most = OTHER_BYTES + BYTES_OF_TOKEN * positions + PICTURE_BYTES * pictures
    advice = "shorten the prompt, or send several prompts in separate requests"
    content = await receive_in_time(receive_bytes(request, most, advice))
    return await run_in_threadpool(parse_body, content, kind, positions)


async def read_text_body(request: Request, positions: int) -> TextBody:
    """Read a text to read into a state: JSON, or the bytes of a text file or PDF."""
    if (media := media_of(request)) not in FILES:
        return await read_body(request, TextBody, positions)
    most = OTHER_BYTES + BYTES_OF_TOKEN * positions + PDF_BYTES * (media == PDF)
    advice = f"send a shorter text, a PDF as {PDF}, or only the text of a large PDF"
    content = await receive_in_time(receive_bytes(request, most, advice))
    try:
        text = await run_in_threadpool(decode_document, "the body", content)
        return TextBody.model_validate({"text": text, "raw": request.query_params.get("raw") == "true"})
    except (TextError, ValidationError) as error:
        raise Refusal(400, str(error) if isinstance(error, TextError) else "the file is empty: send a text") from error


def media_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def receive_in_time(receiving: Coroutine[Any, Any, Received], seconds: float = BODY_SECONDS) -> Received:
    """Receive a body, or say why it has not come."""
    try:
        return await asyncio.wait_for(receiving, seconds)
    except ClientDisconnect as error:
        raise Refusal(499, "the client has gone") from error  # nobody reads this
    except asyncio.TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds: send it again") from error


async def receive_bytes(request: Request, max_bytes: int, advice: str) -> bytes:
    """Receive a body; keep nothing of one that is too large, and refuse it with advice."""
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
        raise Refusal(413, f"the body has more than the {max_bytes} bytes that it may have here: {advice}")
    return bytes(content)


def parse_body(content: bytes, kind: type[Read], positions: int) -> Read:
    """Parse a body; a refusal names a wrong field, as deep in the body as it lies."""
    try:
        return kind.model_validate_json(content, context={"positions": positions})
    except ValidationError as error:
        faults = error.errors(include_url=False)
        fault = max(faults, key=lambda each: (each["type"] in OF_A_CHOICE, len(each["loc"])))
    if not fault["loc"] and fault["type"] in ("json_invalid", "model_type"):
        reason = fault.get("ctx", {}).get("error", "it is not an object")
        raise Refusal(400, f"the body is not a JSON object ({reason}): correct it")
    names = [str(part) for part in fault["loc"]]  # of the body, and of the types that pydantic tried
    place = names[:1] + [name for name in names[1:] if name != "str" and "[" not in name]
    reason = WORDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    raise Refusal(400, f"{'.'.join(place)}: {reason}" if place else reason, place[0] if place else None)
