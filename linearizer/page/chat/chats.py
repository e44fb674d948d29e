"""The chats that a server keeps, what each model has heard turn by turn, and the models of one run in memory.

A chat is data: tokens from which the models can build their states again. It is kept under a name that its visitor
chose, for this visitor and this run alone, for an hour after its last turn. All pages of a visitor share one name, so a
page that is loaded again finds its chat.
"""

from __future__ import annotations

import io
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from linearizer.errors import ModelNotAvailable, RequestError
from linearizer.page import limits
from linearizer.page.visitors import Visitor, is_example
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import Reader
    from linearizer.evaluate.subjects import Subject
    from linearizer.run.results import Comparison
    from linearizer.teacher.picture_prompts import Prompt

WAIT_SECONDS = 120  # for other visitors who use the models
MAX_NAME = 100  # characters of a chat's name
MAX_WAITING = 8  # messages of a chat that are not answered yet
MAX_TURNS = 50  # of a chat that are shown
UNKNOWN = -1  # stands for each token that the state in a file has read
Key = tuple[Path, tuple[Path, str], str]  # the folder of the visitor, the run, and the name of the chat


@dataclass(frozen=True)
class Settings:
    """The settings of a chat, which do not change until it ends."""

    as_chat: bool = True  # in the template of the model, if it has one; else all continue a text
    system: str = ""  # the system message of the template
    window: bool = True  # whether a plain window takes part


USUAL = Settings()


@dataclass(frozen=True)
class Document:
    """A text that all models have read at the beginning of a chat."""

    tokens: int
    whole: bool  # not cut to the room of the model


class Message(NamedTuple):
    """What a visitor says."""

    text: str
    answer: str = ""  # the right one, where it is known
    tries: int = 0  # answers that were taken back: the next one draws other tokens
    pictures: tuple[bytes, ...] = ()  # files of pictures, which are shown before the text


@dataclass(frozen=True)
class Turn:
    """A message, and what the models answer."""

    message: Message
    before: dict[str, int]  # tokens that were heard before it, by model
    answers: Comparison


@dataclass(frozen=True)
class Chat:
    """A conversation so far."""

    settings: Settings
    heard: dict[str, list[int]] = field(default_factory=dict)  # tokens before the next turn, by model
    document: Document | None = None
    turns: tuple[Turn, ...] = ()
    templated: bool = False  # whether turns follow each other; else each follows the document
    state: Path | None = None  # the file of the student's state with which it began

    @property
    def tokens(self) -> int:
        return max(map(len, self.heard.values()), default=0)

    @property
    def pictures(self) -> int:
        return sum(len(turn.message.pictures) for turn in self.turns)

    def has(self, name: str) -> bool:
        """Whether a model takes part; only the student goes on from a state."""
        return name == "student" if self.state else self.settings.window or name != "window"

    def take_back(self) -> Chat:
        """Return the chat without its last turn."""
        before = self.turns[-1].before
        heard = {name: tokens[: before.get(name)] for name, tokens in self.heard.items()}
        return replace(self, heard=heard, turns=self.turns[:-1])


def is_templated(settings: Settings, tokenizer: Any) -> bool:
    return settings.as_chat and bool(tokenizer.chat_template)


def document_tokens(settings: Settings, tokenizer: Any, text: str) -> list[int]:
    """Turn the document that a chat begins with into tokens."""
    from linearizer.teacher.chat_template import tokens_of, turn_texts

    if not is_templated(settings, tokenizer):
        return tokens_of(tokenizer, text, True)
    return tokens_of(tokenizer, turn_texts(tokenizer, settings.system).opening + text, False)


def turn_prompt(chat: Chat, models: Models, message: Message) -> tuple[list[int], Prompt]:
    """Turn a message into tokens that follow what was heard, and, if it has pictures, the tokens before these."""
    from linearizer.teacher.chat_template import BETWEEN, tokens_of, turn_texts
    from linearizer.teacher.picture_prompts import Pictures, Prompt, make_prompt

    settings, tokenizer, opening, closing = chat.settings, models.tokenizer, "", ""
    templated = is_templated(settings, tokenizer)
    if templated:
        opening, separator, closing = turn_texts(tokenizer, settings.system)
    before = separator if templated and chat.turns else BETWEEN if chat.document else "" if chat.state else opening
    is_first = not (chat.document or chat.state or (templated and chat.turns))
    if not message.pictures:
        text = before + message.text + closing
        return [], Prompt(tokens_of(tokenizer, text, is_first and not templated), Pictures())
    begins = is_first and not (templated and settings.system)
    earlier = [] if begins else tokens_of(tokenizer, before, False)
    pictures = [open_picture(content) for content in message.pictures]
    return earlier, make_prompt(tokenizer, models.processor, message.text, pictures, begins, raw=not templated)


def ending_tokens(chat: Chat, tokenizer: Any) -> list[int]:
    """Return the tokens between what was heard and what a visitor says next, as in the state of `linearizer ask`."""
    from linearizer.teacher.chat_template import BETWEEN, next_turn_tokens, tokens_of

    if chat.turns and chat.templated:
        return next_turn_tokens(tokenizer)
    return tokens_of(tokenizer, BETWEEN, False) if chat.document else []


def open_picture(content: bytes) -> Any:
    """Open the file of a picture of a message."""
    from PIL import Image

    return Image.open(io.BytesIO(content))


CHATS: OrderedDict[Key, tuple[float, Chat]] = OrderedDict()
ASKED: dict[Key, list[Message]] = {}  # what is not answered yet, the message that is being read first
ANSWERING: dict[Key, bool] = {}  # chats in which the models read or write, and whether they should stop
CHATS_LOCK = threading.Lock()


def key_of(visitor: Visitor, run: Run, name: str) -> Key | None:
    """Return the key of a chat; None: it has no name, and is not kept."""
    if len(name) > MAX_NAME:
        raise RequestError(f"the name of a chat has {len(name)} characters: give it at most {MAX_NAME}")
    home = visitor.home if is_example(run) else run.folder.parent  # also of a run before its visitor signed in
    return (home, run.key, name) if name else None


def look_up(key: Key | None) -> Chat | None:
    end_old_chats()
    with CHATS_LOCK:
        return CHATS[key][1] if key is not None and key in CHATS else None


def ask(key: Key, message: Message, first: bool = False) -> None:
    """Let a message wait until those before it are answered."""
    with CHATS_LOCK:
        waiting = ASKED.get(key, [])
        if len(waiting) >= MAX_WAITING:
            raise RequestError(f"{MAX_WAITING} messages wait for an answer: wait until one is answered, or press Stop")
        ASKED[key] = [message, *waiting] if first else [*waiting, message]


def asked(key: Key) -> list[Message]:
    """Return the messages that are not answered yet."""
    with CHATS_LOCK:
        return [*ASKED.get(key, ())]


def take_asked(key: Key) -> None:
    """Take the first message off the list: it is being answered, or cannot be."""
    with CHATS_LOCK:
        if rest := ASKED.pop(key, [])[1:]:
            ASKED[key] = rest


def stop(key: Key) -> list[Message]:
    """Ask the models to stop; return the messages that will not be answered."""
    with CHATS_LOCK:
        if key in ANSWERING:
            ANSWERING[key] = True
        return ASKED.pop(key, [])


def is_answering(key: Key) -> bool:
    return key in ANSWERING


@contextmanager
def answering(key: Key | None) -> Iterator[Callable[[], bool]]:
    """Note that the models answer in a chat, once at a time; give a function that says whether they should stop."""
    if key is None:
        yield lambda: False
        return
    with CHATS_LOCK:
        if key in ANSWERING:
            raise RequestError("the models read or answer in this chat already: wait until they are done")
        ANSWERING[key] = False
    try:
        yield lambda: ANSWERING[key]
    finally:
        with CHATS_LOCK:
            del ANSWERING[key]


def find_chat(key: Key | None, settings: Settings) -> Chat:
    """Return the chat that goes on, or a new chat; those settings cannot change that a file was read with."""
    chat = look_up(key)
    if chat is None or chat.settings == settings:
        return chat or Chat(settings)
    if chat.document or chat.state:
        begun = "document was read" if chat.document else "state was loaded"
        raise RequestError(
            f"the {begun} with another template, system prompt or choice of the window: set these as they were, or "
            "begin a new chat and send the file again"
        )
    return Chat(settings)


def keep_chat(key: Key | None, chat: Chat) -> None:
    """Keep a chat; beyond MAX_CHATS, the visitor with the most chats loses their oldest."""
    if key is None:
        return
    with CHATS_LOCK:
        _, earlier = CHATS.pop(key, (0.0, None))
        CHATS[key] = time.monotonic(), chat
        counts = Counter(home for home, *_ in CHATS)
        most = max(CHATS, key=lambda kept_key: counts[kept_key[0]]) if len(CHATS) > limits.MAX_CHATS else None
    if earlier is not None and earlier.state not in (None, chat.state):
        earlier.state.unlink(missing_ok=True)
    end_chat(most)


def end_old_chats() -> None:
    """End the chats that were not used for an hour, but no chat in which the models answer."""
    oldest = time.monotonic() - limits.CHAT_SECONDS
    with CHATS_LOCK:
        old = [key for key, (used_at, _) in CHATS.items() if used_at < oldest and key not in ANSWERING]
    for key in old:
        end_chat(key)


def end_chats_of(run: Run) -> None:
    """End the chats of a run that was deleted, and free its models, unless a call is using them."""
    with CHATS_LOCK:
        ended = [key for key in {*CHATS, *ANSWERING} if key[1][0] == run.folder]
    for key in ended:
        end_chat(key)
    if MODELS_LOCK.acquire(blocking=False):
        LOADED[:] = [models for models in LOADED if models.run_key[0] != run.folder]
        MODELS_LOCK.release()


def move_chats(run: Run, renamed: Run) -> None:
    """Keep the chats of a run that was renamed; the models read them again."""
    kept: Any
    with CHATS_LOCK:
        for kept in (CHATS, ASKED):
            for key in [key for key in kept if key[1][0] == run.folder]:
                home, (_, run_id), name = key
                kept[home, (renamed.folder, run_id), name] = kept.pop(key)


def end_chat(key: Key | None) -> None:
    """Forget a chat, and the states of the models, which stop if they are answering in it."""
    if key is not None:
        with CHATS_LOCK:  # another thread may be going through all chats
            if key in ANSWERING:
                ANSWERING[key] = True
            _, chat = CHATS.pop(key, (0.0, None))
            ASKED.pop(key, None)
        forget_states(key)
        if chat is not None and chat.state is not None:
            chat.state.unlink(missing_ok=True)


def fresh_file() -> Path:
    """Name a file for a state that nobody can guess, in a folder that is gone when the server ends."""
    return Path(states_folder().name) / secrets.token_hex(16)


@cache
def states_folder() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="linearizer-states-")


@dataclass(frozen=True)
class Models:
    """Teacher, student and a plain window of the student's bytes."""

    run: Run
    run_key: tuple[Path, str]  # as it was when they were loaded: another run may have the same folder later
    subjects: tuple[Subject, ...]
    tokenizer: Any
    kept: OrderedDict[Key, list[Reader]] = field(default_factory=OrderedDict)

    @cached_property
    def processor(self) -> Any:
        """What prepares pictures; None: the models read none."""
        from linearizer.method.checkpoint import load_processor_of

        return load_processor_of(self.run)

    @contextmanager
    def readers(self, key: Key | None, chat: Chat) -> Iterator[list[Reader]]:
        """Lend the readers of a chat with their states, and keep them afterwards.

        The caller may replace them in the list. After an error they are dropped, as they may have read half a text.
        """
        from linearizer.evaluate.side_by_side import Reader

        subjects = [subject for subject in self.subjects if chat.has(subject.name)]
        kept = self.kept.pop(key, None) if key else None
        is_whole = kept is not None and [reader.subject for reader in kept] == subjects
        readers = kept if kept and is_whole else [Reader.of(subject) for subject in subjects]
        try:
            yield readers
        except GeneratorExit:  # it was stopped between two pieces or tokens
            self.keep(key, readers)
            raise
        self.keep(key, readers)

    def keep(self, key: Key | None, readers: list[Reader]) -> None:
        """Keep the states of a chat, and drop the least recently used states beyond the limit."""
        if key is None or not any(reader.tokens for reader in readers):
            return
        self.kept[key] = readers
        sizes = {old_key: sum(reader.bytes() for reader in group) for old_key, group in [*self.kept.items()]}
        while len(sizes) > 1 and sum(sizes.values()) > limits.MAX_STATE_BYTES:
            oldest = next(iter(sizes))
            self.kept.pop(oldest, None)  # a visitor who leaves may have ended it meanwhile
            del sizes[oldest]


def restart(reader: Reader, chat: Chat) -> Reader:
    """Return a reader of the same model at the begin of a chat."""
    if chat.state is None:
        return reader.restart()
    from linearizer.serve.state_files import load_state

    with reader.subject.prepared() as student:
        cache = load_state(student, chat.state)
    return replace(reader, cache=cache, tokens=[UNKNOWN] * cache.get_seq_length(), unread=[])


MODELS_LOCK = threading.Lock()  # the models of one run in memory, and one visitor who uses them
LOADED: list[Models] = []


@contextmanager
def lent_models(run: Run, visitor: Visitor) -> Iterator[Models]:
    """Lend the models of a run to one call at a time; those that were loaded last stay in memory."""
    if not MODELS_LOCK.acquire(timeout=WAIT_SECONDS):
        raise RequestError("the models are in use: try again in a minute")
    try:
        if not LOADED or LOADED[0].run_key != run.key:
            LOADED.clear()
            LOADED.append(load(run, visitor))
        yield LOADED[0]
    finally:
        MODELS_LOCK.release()


def load(run: Run, visitor: Visitor) -> Models:
    """Load the models of a run; the example's student is built from its teacher."""
    from linearizer.evaluate.subjects import assembled, make_again

    if is_example(run):
        setup = make_again(run, visitor.token)
    else:
        with assembled(run, visitor.token) as setup:
            if setup.teacher is None:
                raise ModelNotAvailable(setup.alone or "the teacher is not available: nothing can be compared")
    return Models(run, run.key, tuple(setup.subjects(run.positions)), setup.tokenizer)


def forget_states(key: Key) -> None:
    """Free the states of a chat."""
    for models in LOADED:
        models.kept.pop(key, None)
