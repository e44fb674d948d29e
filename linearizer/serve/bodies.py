"""What a request to the endpoint may say, in the words of OpenAI's API, and the prompts that it means.

A field is served (top_k, min_p, repetition_penalty and chat_template_kwargs, too, which other servers know), ignored
where it says nothing of the text by its nature (IGNORED), or refused: an answer that leaves out what was asked for
looks like one that does not.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from random import Random
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from linearizer.errors import RequestError, first_line
from linearizer.serve.sampling import Drawing

MAX_PROMPTS, MAX_STOPS = 64, 16  # of one request
DEFAULT_COMPLETION = 16  # new tokens, as OpenAI has it; a chat goes on to its end
# Options of other servers that are not served here, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# Options that say nothing of the text: who asks, what is stored or cached, what it costs, and how fast it comes.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "keep_alive", "request_id", "chat_id", "session_id",
}  # fmt: skip


def refuse_truth(value: Any) -> Any:
    """Refuse true and false where a number belongs, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


Whole = Annotated[int, BeforeValidator(refuse_truth)]
Number = Annotated[float, BeforeValidator(refuse_truth)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Body(BaseModel, ABC):
    """What both kinds of request say."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: Whole | None = Field(None, ge=1)
    temperature: Number = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: Number = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Whole = Field(0, ge=-1)  # 0 and -1: all
    min_p: Number = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: Number = Field(1.0, gt=0, allow_inf_nan=False)
    seed: Whole | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False  # go on after the end of a text: for measurements

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_not_served(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if (value := values.get(name)) is not None and value not in neutral:
                raise ValueError(f"{name} = {str(value)[:40]} is not served here: leave it out")
        left_out = IGNORED | NEUTRAL.keys()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS or not all(stops):
            raise RequestError(f"stop may name at most {MAX_STOPS} strings, none of them empty: name fewer")
        return tuple(stops)

    @property
    def new_tokens(self) -> int | None:
        """The tokens to write; None: to the end of the text, or as far as positions reach."""
        return self.max_tokens

    def drawing(self, index: int) -> Drawing:
        """Say how the text of one of the prompts is drawn."""
        seeded = Random(None if self.seed is None else f"{self.seed} {index}")
        top_k = self.top_k if self.top_k > 0 else None
        return Drawing(self.temperature, self.top_p, seeded, top_k, self.min_p, self.repetition_penalty)

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Give the tokens of every prompt."""


class CompletionBody(Body):
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]

    @field_validator("prompt", mode="before")
    @classmethod
    def refuse_long_lists(cls, prompt: Any, info: ValidationInfo) -> Any:
        """Refuse, before each is looked at, more tokens than the model has positions."""
        most = max((info.context or {}).get("positions", 0), MAX_PROMPTS)
        if isinstance(prompt, list) and len(prompt) > most:
            raise ValueError(f"{len(prompt)} tokens or prompts are more than the {most} of the model: shorten it")
        return prompt

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Give the tokens of every prompt."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(f"{len(prompts)} prompts are more than the {MAX_PROMPTS} of one request: send several")
        return [tokenizer(each, verbose=False)["input_ids"] if isinstance(each, str) else each for each in prompts]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def refuse_nothing(self) -> Message:
        if self.content is None and self.role != "assistant":  # which may have called a tool in place of speaking
            raise ValueError(f"a message of role {self.role!r} has no content: give a text")
        return self

    def plain(self) -> dict[str, str]:
        """Give the message as chat templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    reasoning_effort: str | None = None  # for the template, if it asks for it
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Give the tokens of the conversation, as the model's own template writes it."""
        if not tokenizer.chat_template:
            raise RequestError("this model has no chat template: send the whole text as a prompt to /v1/completions")
        wanted = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        wanted |= self.chat_template_kwargs
        if own := wanted.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
            raise RequestError(f"chat_template_kwargs may not set {min(own)}: name variables of the template only")
        try:
            text = tokenizer.apply_chat_template(
                [message.plain() for message in self.messages], tokenize=False, add_generation_prompt=True, **wanted
            )
        except Exception as error:  # a template is a program, and refuses in its own way
            raise RequestError(f"the model's chat template refuses these messages ({first_line(error)})") from error
        return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
