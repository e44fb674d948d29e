"""Teacher, student and a plain window in one chat: they read a document and answer side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from linearizer.errors import FaultError, LinearizerError, RequestError
from linearizer.page import limits, zerogpu
from linearizer.page.chat import chats
from linearizer.page.chat.chats import USUAL, Chat, Key, Message, Models, Settings, Turn
from linearizer.page.visitors import Visitor, is_example, on_space
from linearizer.plan.allocation import StateSize
from linearizer.plan.options import options_of
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.names import refuse_encoder

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import MemoryPrompt, Reader
    from linearizer.run.results import Comparison, StateSizes

COMPARISON_SECONDS = 120  # for which ZeroGPU lends its device to compare, or to read a document
SAMPLE_PROMPTS = {  # of the kinds that the demo model knows, by their titles
    "A story": "The old man sat by the fire, and after a long silence he said that",
    "A manual": "The for statement is used to iterate over",
    "A speech": "Fellow citizens, we meet today to",
}
WORD, PASSAGE = "A word hidden 4 × the state back", "A passage again after 8 × the state"
MEMORY_PROMPTS = {WORD: 4, PASSAGE: 8}  # how far back a prompt reaches, in sizes of the state
MIN_DISTANCE = 64  # tokens that it reaches back at least
ANSWER_ROOM, ANSWER_SHARE = 512, 4  # a document leaves 512 tokens to a turn, or a quarter of the room if that is less
TOKEN_CHARACTERS = 32  # more than any token has: what cannot fit into the room is not even tokenised
Answers = Generator[tuple[Chat, "StateSizes | Comparison"], None, None]


def compare_models(
    visitor: Visitor,
    name: str,
    message: Message,
    tokens: int,
    seed: int,
    sample: bool,
    settings: Settings = USUAL,
    chat_name: str = "",
) -> Answers:
    """Let all models of a run answer a message side by side; a chat with a name goes on.

    Yield the chat with the bytes of the models while they read, and then with what they have written.
    """
    key = chats.key_of(visitor, visitor.find_run(name), chat_name)
    chat = chats.find_chat(key, settings)
    yield from keep_while_answering(key, answer_in_turns(visitor, name, key, chat, message, tokens, seed, sample))


def read_document(visitor: Visitor, name: str, text: str, settings: Settings, chat_name: str = "") -> Answers:
    """Let all models of a run read a document, which begins a new chat; after a stop, what was read is kept."""
    key = chats.key_of(visitor, visitor.find_run(name), chat_name)
    yield from keep_while_answering(key, read_in_turns(visitor, name, key, Chat(settings), text))


def keep_while_answering(key: Key | None, answers: Answers) -> Answers:
    """Keep a chat while the models answer; stop them if they should, or if it is ended meanwhile.

    Until they have read something the chat stays as it was, so a refusal changes nothing.
    """
    with chats.answering(key) as should_stop:
        try:
            for chat, update in answers:
                if should_stop():
                    return
                chats.keep_chat(key, chat)
                yield chat, update
        finally:
            answers.close()
            if key is not None and chats.look_up(key) is None:
                chats.forget_states(key)  # that were kept since


@zerogpu.with_device(COMPARISON_SECONDS)
def read_in_turns(visitor: Visitor, name: str, key: Key | None, chat: Chat, text: str) -> Answers:
    """Read a document, as far as it leaves room for a question and an answer."""
    from linearizer.evaluate import side_by_side

    run = require_student(visitor.find_run(name))
    check_document(text, chat.settings.system)
    room = prompt_room(run)
    room -= min(ANSWER_ROOM, room // ANSWER_SHARE)
    with chats.lent_models(run, visitor) as models, models.readers(key, chat) as readers, explained():
        excerpt = text[: room * TOKEN_CHARACTERS]
        ids = chats.document_tokens(chat.settings, models.tokenizer, excerpt)
        is_complete, readers[:] = len(ids) <= room and excerpt == text, [reader.restart() for reader in readers]
        for progress in side_by_side.read_in_turns(readers, [ids[:room]] * len(readers)):
            document = chats.Document(progress.tokens, is_complete and progress.tokens == progress.total)
            yield replace(chat, heard=collect_heard(readers), document=document), progress


@zerogpu.with_device(COMPARISON_SECONDS)
def answer_in_turns(
    visitor: Visitor, name: str, key: Key | None, chat: Chat, message: Message, tokens: int, seed: int, sample: bool
) -> Answers:
    """Answer a message after what was heard; with a template turns follow each other, else each follows the document.

    Another try of a message draws other tokens.
    """
    from linearizer.evaluate.side_by_side import read_in_turns, write_in_turns
    from linearizer.run.results import Comparison

    run = require_student(visitor.find_run(name))
    check_message(message, tokens, seed, chat.settings.system)
    how = tokens, seed + message.tries, sample or message.tries > 0
    with chats.lent_models(run, visitor) as models, models.readers(key, chat) as readers, explained():
        earlier, prompt = chats.turn_prompt(chat, models, message)
        goes_on = chats.is_templated(chat.settings, models.tokenizer)
        check_room(run, chat, len(earlier) + len(prompt.tokens), tokens)
        for progress in catch_up(readers, chat, models):
            yield chat, progress
        talking = readers if goes_on else [reader.fork() for reader in readers]
        before = {reader.subject.name: len(reader.tokens) for reader in talking}
        if earlier:
            for progress in read_in_turns(talking, [earlier] * len(talking)):
                yield chat, progress
        for update in write_in_turns(talking, models.tokenizer, message.text, prompt.tokens, *how, prompt.pictures):
            if isinstance(update, Comparison):
                heard = collect_heard(talking) if goes_on else chat.heard
                turns = *chat.turns, Turn(message, before, update)
                kept = turns if goes_on else turns[-chats.MAX_TURNS :]
                yield replace(chat, heard=heard, turns=kept, templated=goes_on), update
            else:
                yield chat, update


def catch_up(readers: list[Reader], chat: Chat, models: Models) -> Iterator[StateSizes]:
    """Let readers catch up with what their models have heard.

    If one is without its state, all read everything again, and see the pictures again.
    """
    from linearizer.evaluate.side_by_side import read_in_turns

    texts = [chat.heard.get(reader.subject.name, []) for reader in readers]
    goes_on = all(reader.before(text) is reader for reader, text in zip(readers, texts, strict=True))
    if not goes_on or (chat.state and not readers[0].tokens):
        readers[:] = [chats.restart(reader, chat) for reader in readers]
    again = any(not reader.tokens for reader in readers)

    def read_to(ends: Sequence[int | None]) -> Iterator[StateSizes]:
        parts = [text[len(reader.tokens) : end] for reader, text, end in zip(readers, texts, ends, strict=True)]
        if any(parts):
            yield from read_in_turns(readers, parts, again)

    for place, turn in enumerate(chat.turns if chat.templated else ()):
        begins = [turn.before.get(reader.subject.name, 0) for reader in readers]
        if turn.message.pictures and len(readers[0].tokens) <= begins[0]:
            earlier, prompt = chats.turn_prompt(replace(chat, turns=chat.turns[:place]), models, turn.message)
            yield from read_to([begin + len(earlier) for begin in begins])
            yield from read_in_turns(readers, [prompt.tokens] * len(readers), again, prompt.pictures)
    yield from read_to([None] * len(readers))


def load_state(visitor: Visitor, name: str, path: Path, settings: Settings, chat_name: str) -> Answers:
    """Begin a new chat with the student's state in a file, which is kept with it; if it is refused, the old one stays.

    The teacher and the window have not read what the state holds, so they do not take part.
    """
    key = chats.key_of(visitor, visitor.find_run(name), chat_name)
    try:
        yield from keep_while_answering(key, load_in_turns(visitor, name, key, Chat(settings, state=path)))
    finally:
        if (chat := chats.look_up(key)) is None or chat.state != path:
            path.unlink(missing_ok=True)


@zerogpu.with_device(COMPARISON_SECONDS)
def load_in_turns(visitor: Visitor, name: str, key: Key | None, chat: Chat) -> Answers:
    """Load the state with which a chat begins."""
    from linearizer.run.results import StateSizes
    from linearizer.teacher.logits import recurrent_bytes

    run = require_student(visitor.find_run(name))
    with chats.lent_models(run, visitor) as models, models.readers(key, chat) as readers, explained():
        readers[:] = [student] = [chats.restart(reader, chat) for reader in readers]
        tokens, sizes = len(student.tokens), {"student": student.bytes()}
        loaded = replace(chat, heard=collect_heard(readers))
        check_room(run, loaded, 1, 1)
        yield loaded, StateSizes(tokens, tokens, sizes, recurrent_bytes=recurrent_bytes(student.cache))


def save_state(visitor: Visitor, name: str, chat_name: str) -> Path:
    """Write the student's state after a chat to a file, from which the page or `linearizer ask` goes on."""
    key = chats.key_of(visitor, visitor.find_run(name), chat_name)
    if (chat := chats.look_up(key)) is None or not chat.heard.get("student"):
        raise RequestError(
            "this chat has nothing that a state could keep: read a file first, or chat with a model that has a "
            "template; without one, each text is continued alone"
        )
    path = chats.fresh_file()
    for _ in save_in_turns(visitor, name, key, chat, path):
        pass
    return path


@zerogpu.with_device(COMPARISON_SECONDS)
def save_in_turns(visitor: Visitor, name: str, key: Key | None, chat: Chat, path: Path) -> Iterator[StateSizes]:
    """Let the models catch up with a chat, and write the student's state, ready for what is said next."""
    from linearizer.serve.state_files import save_state

    run = require_student(visitor.find_run(name))
    with chats.lent_models(run, visitor) as models, models.readers(key, chat) as readers, explained():
        yield from catch_up(readers, chat, models)
        (student,) = (reader.fork() for reader in readers if reader.subject.name == "student")
        if ending := chats.ending_tokens(chat, models.tokenizer):
            student.read(ending)
        with student.subject.prepared() as model:
            save_state(model, student.cache, path)


def collect_heard(readers: Sequence[Reader]) -> dict[str, list[int]]:
    """Return the tokens that models have heard, without an end of text: the template writes it before the next turn."""
    from linearizer.teacher.token_loop import ends_of

    heard = {}
    for reader in readers:
        ended = reader.unread and reader.unread[-1] in ends_of(reader.subject.model)
        heard[reader.subject.name] = [*reader.tokens] if ended else reader.heard
    return heard


@contextmanager
def explained() -> Iterator[None]:
    """Turn the failure of a model into a sentence."""
    try:
        yield
    except LinearizerError:
        raise
    except Exception as error:  # code of others raises errors of many types
        raise FaultError(f"reading failed ({type(error).__name__}): try again, with a shorter text") from error


def make_memory_prompt(visitor: Visitor, name: str, kind: str, tokens: int) -> tuple[MemoryPrompt, int]:
    """Make a prompt that needs memory, by the title of its kind; return it and the state's size in tokens of cache.

    It reaches as many sizes of the state back as its kind says, if the model can read that and then write `tokens`.
    """
    from linearizer.evaluate import side_by_side
    from linearizer.hub.models import find_model
    from linearizer.teacher.load import load_tokenizer

    run, times = require_student(visitor.find_run(name)), MEMORY_PROMPTS[kind]
    tokenizer = load_tokenizer(find_model(run.plan.model, visitor.token), visitor.token)
    room, state = prompt_room(run) - tokens, StateSize.of(run.require_allocation(), run.layers).breakeven or 0
    make = side_by_side.hide_word if kind == WORD else side_by_side.repeat_passage
    return make(tokenizer, max(MIN_DISTANCE, min(times * state, room * 7 // 8))), state


def has_student(run: Run) -> bool:
    """Whether a run has a student, or is the example, whose student is built when it is loaded."""
    return run.checkpoint.is_dir() or is_example(run)


def reads_pictures(run: Run) -> bool:
    """Whether the student of a run reads pictures."""
    is_whole = not run.is_encoder_run and run.has_file("inspection.json") and run.inspection.reads_pictures
    return is_whole and has_student(run)


def require_student(run: Run) -> Run:
    refuse_encoder(run)
    if not has_student(run):
        raise RequestError("this run has no student yet: wait until it is done, or end its training")
    return run


def check_message(message: Message, tokens: int, seed: int, system: str = "") -> None:
    """Refuse, before models are loaded, an empty prompt, and too many characters or tokens for the page."""
    options_of(Plan)["seed"].check(seed)
    prompt = message.text
    if not prompt.strip():
        raise RequestError("the prompt is empty: write a text to continue")
    characters = len(prompt) + len(system)
    too_long = on_space() and characters > limits.MAX_DOCUMENT_CHARACTERS
    if too_long or not 1 <= tokens <= limits.MAX_COMPARED_TOKENS:
        raise RequestError(
            f"a prompt of {characters} characters and {tokens} tokens cannot be compared here: give a shorter prompt, "
            f"and ask for 1 to {limits.MAX_COMPARED_TOKENS} tokens"
        )


def prompt_room(run: Run) -> int:
    """Return the tokens that may be read and written: a model's positions, or the limit of a Space."""
    return min(run.positions, limits.MAX_PROMPT_TOKENS) if on_space() else run.positions


def check_document(text: str, system: str) -> None:
    """Refuse a document that is empty, or too long for a Space."""
    if not text.strip():
        raise RequestError("the document is empty: there is nothing to read")
    if on_space() and (characters := len(text) + len(system)) > limits.MAX_DOCUMENT_CHARACTERS:
        raise RequestError(
            f"a document of {characters:,} characters is more than this Space reads "
            f"({limits.MAX_DOCUMENT_CHARACTERS:,}): {limits.ELSEWHERE}"
        )


def check_room(run: Run, chat: Chat, count: int, tokens: int) -> None:
    """Refuse a prompt that does not fit after what was heard."""
    room = prompt_room(run) - tokens - chat.tokens
    if count > room:
        context = f", after {chat.tokens:,} tokens of this chat" if chat.tokens else ""
        remedy = ", ask for fewer tokens, or begin a new chat" if chat.tokens else ", or ask for fewer tokens"
        raise RequestError(
            f"a prompt of {count:,} tokens does not fit: there is room for {max(room, 0):,}, beside the {tokens} to "
            f"write{context}: give a shorter prompt{remedy}"
        )
