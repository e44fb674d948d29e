"""What a model's chat template writes around messages.

A template comes with its model, so it is data of others: transformers renders it in a sandbox, and whatever it raises
becomes one sentence. A model without a template continues a text as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from linearizer.errors import RequestError, first_line

MARKS = ("first turn", "second turn", "third turn")  # turns with which a template shows what it writes around them
BETWEEN = "\n\n"  # a document and the question about it
CONTINUE = "continue the text without the template (--raw, /v1/completions, or the page's switch)"


class TurnTexts(NamedTuple):
    """What a template writes before the first turn, between an answer and the next turn, and before an answer."""

    opening: str
    separator: str
    closing: str


def write_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Write messages by the template, up to the begin of an answer; it may use the `variables`.

    The content of a message is a text, or a list of parts, which are texts and the places of pictures.
    """
    given, arguments = variables or {}, inspect.signature(tokenizer.apply_chat_template).parameters
    if reserved := given.keys() & arguments.keys():
        raise RequestError(f"chat_template_kwargs may not set {min(reserved)}: name variables of the template only")
    said = [each["content"] for each in messages]
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in said]
    last = "".join(part.get("text", "") for part in parts[-1]).strip()

    def write(messages: Sequence[Mapping[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True, **given))

    try:
        written = write(messages) if all(isinstance(each, str) for each in said) else ""
        if last and last not in written:  # templates of models that read pictures may want a list of parts
            in_parts = write([{**each, "content": part} for each, part in zip(messages, parts, strict=True)])
            written = in_parts if last in in_parts else written
    except Exception as error:  # a template is a program, and may raise any error
        remedy = "leave the system prompt out, or " * (messages[0]["role"] == "system") + CONTINUE
        raise RequestError(
            f"the model's chat template refuses these messages ({first_line(error)}): {remedy}"
        ) from error
    return written


def turn_texts(
    tokenizer: PreTrainedTokenizerBase, system: str = "", variables: Mapping[str, Any] | None = None
) -> TurnTexts:
    """Find what the template writes around the turns of a user."""

    def write(*turns: str) -> str:
        messages = [{"role": "system", "content": system}] * bool(system)
        messages += [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
        return write_chat(tokenizer, messages, variables)

    first, second, third = MARKS
    try:
        opening, closing = write(first).split(first)
        separator = write(*MARKS).split(second)[1].split(third)[0]
    except (ValueError, IndexError) as error:  # it changes or repeats what a turn says
        raise RequestError(f"the model's chat template does not write turns as they are: {CONTINUE}") from error
    return TurnTexts(opening, separator, closing)


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, begins: bool = True, asks: bool = True, raw: bool = False
) -> list[int]:
    """Turn what a user says into tokens: with `begins` the first of all; with `asks` an answer follows.

    Else the user goes on in the same turn: a small model answers from a text better if its question is not far from it.
    `raw`: without the template.
    """
    if raw or not tokenizer.chat_template:
        return tokens_of(tokenizer, text, begins)
    opening, _, closing = turn_texts(tokenizer)
    return tokens_of(tokenizer, opening * begins + text + (closing if asks else BETWEEN), False)


def next_turn_tokens(tokenizer: PreTrainedTokenizerBase, raw: bool = False) -> list[int]:
    """Return the tokens between an answer, without its end, and what the user says next."""
    if raw or not tokenizer.chat_template:
        return []
    return tokens_of(tokenizer, turn_texts(tokenizer).separator, False)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Turn a text into tokens; `special`: with the start token that a text without a template has."""
    tokens: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tokens
