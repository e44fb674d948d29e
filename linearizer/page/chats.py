"""Conversations with the models of a run: what each model has heard, as tokens, turn by turn.

A chat is data, from which the states of the models can be made again. It is kept under a name that its visitor gave,
for this visitor and this run alone: a page gives the name of its session, and ends its chats when it is left.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearizer.errors import RequestError
from linearizer.page import limits, loaded_models
from linearizer.page.visitors import Visitor
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.run.results import Comparison

BETWEEN = "\n\n"  # a document and what is said of it
MARKS = ("first turn", "second turn", "third turn")  # that a template writes, to see what it puts around them
MAX_NAME = 100  # characters of a chat's name
Key = tuple[Path, tuple[Path, str], str]  # the folder of the visitor, the run, and the name of the chat


@dataclass(frozen=True)
class Settings:
    """How a chat is held, from its beginning to its end."""

    as_chat: bool = True  # in the template of the model, where it has a template; else all continue a text
    system: str = ""  # what the template tells the model first
    window: bool = True  # whether a plain window takes part


USUAL = Settings()


@dataclass(frozen=True)
class Document:
    """A text that all models have read at the beginning of a chat."""

    begins: str
    tokens: int
    whole: bool  # whether it was not cut to what the model reads


@dataclass(frozen=True)
class Chat:
    """A conversation so far."""

    settings: Settings
    heard: dict[str, list[int]] = field(default_factory=dict)  # tokens that come before the next turn, model by model
    document: Document | None = None
    turns: tuple[Comparison, ...] = ()
    templated: bool = False  # whether turns follow each other; else each follows the document

    @property
    def tokens(self) -> int:
        return max(map(len, self.heard.values()), default=0)


def is_templated(settings: Settings, tokenizer: Any) -> bool:
    return settings.as_chat and bool(tokenizer.chat_template)


def document_tokens(settings: Settings, tokenizer: Any, text: str) -> list[int]:
    """Turn the document that a chat begins with into tokens."""
    if not is_templated(settings, tokenizer):
        return tokens_of(tokenizer, text, True)
    opening, _, _ = template_texts(tokenizer, settings.system)
    return tokens_of(tokenizer, opening + text, False)


def turn_tokens(chat: Chat, tokenizer: Any, prompt: str) -> list[int]:
    """Turn what a visitor says into tokens that follow what was heard."""
    settings, joined = chat.settings, BETWEEN + prompt if chat.document else prompt
    if not is_templated(settings, tokenizer):
        return tokens_of(tokenizer, joined, not chat.document)
    opening, between, closing = template_texts(tokenizer, settings.system)
    before = between + prompt if chat.turns else joined if chat.document else opening + prompt
    return tokens_of(tokenizer, before + closing, False)


def tokens_of(tokenizer: Any, text: str, special: bool) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tokens


def template_texts(tokenizer: Any, system: str) -> tuple[str, str, str]:
    """Return what a template writes before the first turn, between an answer and the next turn, and after a turn."""

    def write(*turns: str) -> str:
        roles = [{"role": "system", "content": system}] * bool(system)
        roles += [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
        written: str = tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
        return written

    first, second, third = MARKS
    try:
        opening, closing = write(first).split(first)
        between = write(*MARKS).split(second)[1].split(third)[0]
    except Exception as error:  # a template is a program, which may refuse with errors of many types
        asked = "a system prompt" if system else "turns"
        raise RequestError(
            f"the chat template of this model does not take {asked} ({error}): "
            f"{'leave the system prompt empty, or' if system else ''} switch the template off"
        ) from error
    return opening, between, closing


CHATS: OrderedDict[Key, tuple[float, Chat]] = OrderedDict()
LOCK = threading.Lock()


def key_of(visitor: Visitor, run: Run, name: str) -> Key | None:
    """Return the key of a chat; None without a name: it is not kept."""
    if len(name) > MAX_NAME:
        raise RequestError(f"the name of a chat has {len(name)} characters: give it at most {MAX_NAME}")
    return (visitor.home, run.key, name) if name else None


def look_up(key: Key | None) -> Chat | None:
    with LOCK:
        return CHATS[key][1] if key is not None and key in CHATS else None


def find_chat(key: Key | None, settings: Settings) -> Chat:
    """Return the chat that goes on, or a new chat; what a document was read with cannot change."""
    chat = look_up(key)
    if chat is None or chat.settings == settings:
        return chat or Chat(settings)
    if chat.document:
        raise RequestError(
            "the document was read with another template, system prompt or without the window: set these as they were, "
            "or begin a new chat and read it again"
        )
    end_chat(key)
    return Chat(settings)


def keep_chat(key: Key | None, chat: Chat) -> None:
    """Keep a chat, and no more chats than a server keeps."""
    if key is None:
        return
    with LOCK:
        CHATS.pop(key, None)
        CHATS[key] = (now := time.monotonic()), chat
        old = [each for each, (used, _) in CHATS.items() if used < now - limits.CHAT_SECONDS]
        old += [*CHATS][: max(0, len(CHATS) - limits.MAX_CHATS)]
    for each in {*old}:
        end_chat(each)


def end_chat(key: Key | None) -> None:
    """Forget a chat, and the states of the models."""
    if key is not None:
        CHATS.pop(key, None)
        loaded_models.forget(key)


def end_chats_named(name: str) -> None:
    """Forget the chats of a page that was left."""
    for key in [key for key in [*CHATS] if key[-1] == name]:
        end_chat(key)
