"""The step Compare: a chat with teacher, student and a plain window, its parts, their events and handlers.

A message waits in the chat until those before it are answered, so another one can be sent meanwhile. All that is shown
comes from the chat, which the server keeps: a page that is loaded again shows it again.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import size
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, chat, chats, sending
from linearizer.page.calls import ONCE, QUICK, SLOW, Browser, handler
from linearizer.page.chats import Chat, Key, Message, Settings
from linearizer.report.markup import message_box, values_list

if TYPE_CHECKING:
    from PIL import Image

    from linearizer.run.results import Comparison, Side, StateSizes

ABOUT = (
    "One chat with three models, which take turns, a token each. They can all read a file, and then each answers from "
    "what it remembers."
)
ABOUT_STATES = (
    "A state is what the student remembers of this chat, without the text. Load it here, or let "
    "<code>linearizer ask RUN --state FILE</code> answer from it. The other two cannot go on from it."
)
ALONE = "This chat began with a state of the student, so the student answers alone."
COLUMNS = {"teacher": "Teacher", "student": "Student", "window": "Plain window"}
HEADS = {name: f"{name}_head" for name in COLUMNS}
DRAFT = ("drafted", "drafts", "drop_pictures")  # pictures that are not sent yet, what shows them and drops them
OUTPUTS = ("as_chat", "prompt", "answer", "chat_note", *DRAFT, *HEADS.values(), *COLUMNS)
NAME = "page"  # of the chat that all pages of a visitor show of a run
LOADING = "Loading the models."
TAKE = "text => [text, '']"  # the field is empty at once, for the next message
MIN_TIMED_TOKENS = 16  # written: with fewer, the pace is chance and is not shown
SHOWN_BEGIN, SHOWN_END = 80, 160  # characters of a long prompt
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of pictures
MAX_PIXELS, MAX_SIDE, SHOWN_SIDE = 50_000_000, 1536, 240  # of a picture as sent, as kept, as shown
TOO_LARGE = f"the picture has more than {MAX_PIXELS // 10**6} million points: send a smaller one"
MAX_PICTURES = 8  # of a chat
NO_PICTURE = "the file is no picture that can be read: send a whole PNG, JPEG, WebP, GIF, BMP or TIFF file"


def place(ui: SimpleNamespace) -> None:
    """Place a column for each model, and below them the field in which all are asked."""
    gr.HTML(f'<div class="lz-lead"><h2>Compare</h2><p>{ABOUT}</p></div>')
    with gr.Row():
        for name, title in COLUMNS.items():
            with gr.Column(min_width=220) as column:
                setattr(ui, HEADS[name], gr.HTML(head_card(name), elem_id=f"{name}-head"))
                look: dict[str, Any] = {"show_label": False, "height": "20rem", "layout": "panel", "elem_id": name}
                setattr(ui, name, gr.Chatbot(label=title, allow_tags=False, buttons=["copy"], **look))
    ui.window_place = column  # the last
    ui.chat_note, ui.answer = gr.HTML(elem_id="chat-note"), gr.State("")
    ui.prompt = gr.Textbox(
        label="Message", placeholder="Enter sends it, Shift+Enter breaks the line", max_lines=8, elem_id="prompt"
    )
    ui.message = gr.Textbox(visible="hidden", label="what is sent")
    ui.drafted, ui.drafts = gr.State(()), gr.HTML(elem_id="drafts")
    with gr.Row(elem_id="prompts", elem_classes="lz-chips"):
        titles = (*chat.SAMPLE_PROMPTS, *chat.MEMORY_PROMPTS)
        ui.prompts = {title: gr.Button(title, size="sm", min_width=90) for title in titles}
    with gr.Row(elem_id="chat-acts"):
        ui.compare = gr.Button("Send", variant="primary", elem_id="compare", interactive=False, min_width=120)
        ui.stop_writing = gr.Button("Stop", elem_id="stop-writing", min_width=120)
        look = {"size": "lg", "min_width": 120, "interactive": False, "elem_id": "file"}
        ui.file = gr.UploadButton("Read a file", file_types=["text", ".md", ".pdf"], type="filepath", **look)
        look |= {"visible": False, "interactive": True, "elem_id": "picture"}
        ui.picture = gr.UploadButton("Add a picture", file_types=["image"], type="filepath", **look)
        ui.drop_pictures = gr.Button("Leave the picture out", visible=False, elem_id="drop-pictures", min_width=120)
        ui.end_chat = gr.Button("New chat", elem_id="end-chat", min_width=120)
    place_manner(ui)


def place_manner(ui: SimpleNamespace) -> None:
    """Place the settings of prompts, and of how the models write."""
    with gr.Accordion("Template, length and more", open=False, elem_id="manner"):
        about = "the beginning of a chat, if the model has a template"
        ui.system = gr.Textbox("", label="System message", info=about, lines=1, max_lines=4, elem_id="system")
        with gr.Row():
            about = "if the model has a template; else each continues every text alone"
            ui.as_chat = gr.Checkbox(True, label="As a chat", info=about, min_width=180, elem_id="as-chat")
            about = "sinks and the newest tokens, in the student’s bytes"
            ui.with_window = gr.Checkbox(
                True, label="A plain window, too", info=about, min_width=180, elem_id="with-window"
            )
        with gr.Row():
            ui.tokens = gr.Slider(8, 256, 64, step=8, label="Tokens", scale=3, min_width=220)
            ui.prompt_seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31, min_width=100)
            about = "instead of the likeliest token"
            ui.sample = gr.Checkbox(False, label="Draw tokens", info=about, scale=2, min_width=180)
        gr.HTML(f'<p class="lz-faint">{ABOUT_STATES}</p>')
        with gr.Row(elem_classes="lz-chips"):
            ui.save_state = gr.Button("Save the student’s state", size="sm", elem_id="save-state")
            ui.load_state = gr.UploadButton("Load a state", size="sm", type="filepath", elem_id="load-state")
            ui.saved = gr.Textbox(visible="hidden", label="where the state is fetched")


def wire(ui: SimpleNamespace) -> None:
    """Connect the parts with their handlers. One message is answered at a time, or one file read."""
    outputs = [getattr(ui, name) for name in OUTPUTS]
    how = [ui.tokens, ui.prompt_seed, ui.sample]
    manner = [ui.as_chat, ui.system, ui.with_window]
    many: dict[str, Any] = {**QUICK, "trigger_mode": "multiple"}
    turn: dict[str, Any] = {**many, "queue": True, "concurrency_limit": 1, "concurrency_id": "chat"}
    triggers = [ui.compare.click, ui.prompt.submit]
    taken = gr.on(triggers, None, ui.prompt, [ui.message, ui.prompt], js=TAKE, **many)
    sent = taken.then(send, [ui.memory, ui.message, ui.answer, ui.drafted, *how], outputs, **many)
    retried = gr.on([getattr(ui, name).retry for name in COLUMNS], retry, ui.memory, outputs, **many)
    for event in (sent, retried):
        event.then(answer, [ui.memory, *how, *manner], outputs, **turn)
    ui.file.upload(read_file, [ui.memory, ui.file, *manner], outputs, **turn)
    ui.load_state.upload(load_state, [ui.memory, ui.load_state, *manner], outputs, **turn)
    saved = ui.save_state.click(save_state, ui.memory, ui.saved, **{**ONCE, "show_progress_on": ui.save_state})
    saved.success(None, ui.saved, None, js="fetchFile", **QUICK)
    ui.picture.upload(add_picture, [ui.memory, ui.picture, ui.drafted], outputs, **QUICK)
    ui.drop_pictures.click(lambda: update(**draft(())), None, outputs, **QUICK)
    ui.stop_writing.click(stop, [ui.memory, ui.prompt, ui.drafted], outputs, **QUICK)
    ui.end_chat.click(end, ui.memory, outputs, **QUICK)
    ui.with_window.change(lambda is_shown: gr.Column(visible=bool(is_shown)), ui.with_window, ui.window_place, **QUICK)
    for title, button in ui.prompts.items():
        button.click(take_prompt(title), [ui.memory, ui.tokens], outputs, show_progress_on=ui.prompt, **SLOW)


def update(**parts: Any) -> list[Any]:
    """Return updates of the parts, in the order of OUTPUTS; the other parts stay."""
    return [parts.get(name, gr.skip()) for name in OUTPUTS]


def key_of(browser: Browser) -> Key:
    key = chats.key_of(browser.visitor, browser.find_run(), NAME)
    assert key is not None, "it has a name"
    return key


def show(key: Key) -> dict[str, Any]:
    """Show a chat: its turns, what is not answered yet, and what each model remembers."""
    talk = chats.look_up(key) or Chat(Settings())
    shown: dict[str, Any] = columns_of(talk, chats.asked(key))
    return shown | {HEADS[name]: head_card(name) for name in HEADS} | heads_of(talk)


def show_kept(browser: Browser, another: bool = False) -> dict[str, Any]:
    """Show the chat of a run that is opened; without one, only that of `another` run is emptied."""
    with suppress(LinearizerError):  # the visitor may be unknown, and has none
        key = key_of(browser)
        if another or chats.look_up(key) or chats.asked(key):
            return show(key)
    return {}


def columns_of(talk: Chat, waiting: Sequence[Message]) -> dict[str, Any]:
    """Write the messages of each column; only chats are read as Markdown, as what continues a text is plain."""
    columns = {}
    for name in COLUMNS:
        messages = [] if talk.document is None else [of_user(Message(document_line(talk.document)))]
        messages += [of_user(Message("A state" if talk.has(name) else ALONE))] if talk.state else []
        for turn in talk.turns[-chats.MAX_TURNS :] if talk.has(name) else ():
            side: Side | None = getattr(turn.answers, name)
            text = "" if side is None else side.text or "(ended at once)" * bool(side.tokens)
            messages += [of_user(turn.message), {"role": "assistant", "content": text}]
        messages += map(of_user, waiting if talk.has(name) or not talk.state else ())
        columns[name] = gr.update(value=messages, render_markdown=talk.templated)
    return columns


def of_user(message: Message) -> dict[str, Any]:
    """Write what a user says: the pictures, and the text."""
    pictures = [gr.HTML(picture_html(content), render=False) for content in message.pictures]
    return {"role": "user", "content": [*pictures, shorten(message.text)] if pictures else shorten(message.text)}


@lru_cache(maxsize=64)  # an answer is drawn a few times a second
def picture_html(content: bytes) -> str:
    """Show a small copy of a picture, which lies in no file."""
    small = chats.open_picture(content)
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    source = f"data:image/jpeg;base64,{base64.b64encode(write_picture(small)).decode()}"
    return f'<img class="lz-picture" alt="The picture that was sent" src="{source}">'


def write_picture(picture: Image.Image) -> bytes:
    picture.save(file := io.BytesIO(), "JPEG", quality=95)
    return file.getvalue()


def draft(pictures: Sequence[bytes]) -> dict[str, Any]:
    """Show the pictures that the next message has."""
    shown = gr.HTML("".join(map(picture_html, pictures)))
    return {"drafted": tuple(pictures), "drafts": shown, "drop_pictures": gr.Button(visible=bool(pictures))}


def document_line(document: chats.Document) -> str:
    return f"{'A document' if document.whole else 'The beginning of a document'}, {document.tokens:,} tokens"


def shorten(prompt: str) -> str:
    """Leave out the middle of a long prompt."""
    if len(prompt) <= SHOWN_BEGIN + SHOWN_END:
        return prompt
    return f"{prompt[:SHOWN_BEGIN]} […] {prompt[-SHOWN_END:]}"


def head_card(name: str, held: int = 0, most: int = 0, tokens: int = 0, side: Side | None = None) -> str:
    """Show what a model remembers, beside the model that remembers most, and how fast it wrote."""
    timed = side is not None and side.tokens >= MIN_TIMED_TOKENS
    pairs = [
        (f"memory at {tokens:,} tokens" if tokens else "memory", size(held) if tokens else "–"),
        ("tokens/s", f"{side.tokens_per_second:.1f}" if side and timed else "–"),
        ("first token", f"{side.first_token_seconds * 1000:.0f} ms" if side and side.tokens else "–"),
    ]
    bar = f'<div class="lz-held lz-{name}"><i style="width:{held / max(most, 1):.1%}"></i></div>'
    return f"<h3>{COLUMNS[name]}</h3>{bar}{values_list(pairs, 'lz-thirds')}"


def heads_of(talk: Chat) -> dict[str, str]:
    """Show what each model remembers after the last turn."""
    answers = talk.turns[-1].answers if talk.turns else None
    sides = {name: side for name in COLUMNS if talk.has(name) and (side := getattr(answers, name, None)) is not None}
    most = max((side.state_bytes for side in sides.values()), default=0)
    return {
        HEADS[name]: head_card(name, side.state_bytes, most, side.tokens_read, side) for name, side in sides.items()
    }


def heads_of_reading(progress: StateSizes, before: int) -> dict[str, str]:
    """Show the memories while a text is read after `before` tokens; the bars have room for the teacher's end."""
    tokens, held = before + progress.tokens, progress.bytes.get("teacher", 0)
    growing = max(0, held - progress.recurrent_bytes)
    end = progress.recurrent_bytes + growing * (before + progress.total) // max(tokens, 1)
    most = max(end, *progress.bytes.values())
    return {HEADS[name]: head_card(name, held, most, tokens) for name, held in progress.bytes.items()}


def reading_note(progress: StateSizes, what: str) -> str:
    """Say how much of a text is read."""
    reread = ", which was read before: its states have made room for others" if progress.again else ""
    done = "Read" if progress.tokens == progress.total else "Reading"
    recurrent = (
        f" {size(progress.recurrent_bytes)} of each memory are in recurrent layers, and do not grow."
        if progress.recurrent_bytes
        else ""
    )
    return message_box(f"{done} {what}{reread}: {progress.tokens:,} of {progress.total:,} tokens.{recurrent}")


def turn_note(turn: Comparison, answer: str = "") -> str:
    """Say how far student and window write what the teacher writes, or whether all gave the right answer."""
    sides: Mapping[str, Side] = {n: side for n in ("student", "window") if (side := getattr(turn, n)) is not None}
    if answer:
        found = {
            name: side.text.strip().startswith(answer) for name, side in {"teacher": turn.teacher, **sides}.items()
        }
        marks = ", ".join(f"the {name} {'right' if is_right else 'wrong'}" for name, is_right in found.items())
        alone = "" if found["teacher"] else " The teacher itself does not recall it: this says nothing of the student."
        return message_box(f"The text went on with “{answer}”: {marks}.{alone}", "note")
    total = turn.teacher.tokens
    if all(not side.text for side in (turn.teacher, *sides.values())):
        return message_box(f"{'All' if len(sides) > 1 else 'Both'} ended at once.")
    if all(side.difference is None and side.tokens == total for side in sides.values()):
        return message_box(f"{'All' if len(sides) > 1 else 'Both'} write the same {total} tokens.")
    counts = {name: same_tokens(turn.teacher, side) for name, side in sides.items()}
    shares = ", ".join(f"the {name} {count} of {total} ({count / max(total, 1):.0%})" for name, count in counts.items())
    parts = "".join(
        f" Then the {name} writes “{side.difference.own}” in place of “{side.difference.teacher}”."
        for name, side in sides.items()
        if side.difference is not None
    )
    return message_box(f"Tokens equal to the teacher's before the first difference: {shares}.{parts}")


def same_tokens(teacher: Side, side: Side) -> int:
    """Count the tokens of a model that equal the teacher's, before the first difference."""
    return min(teacher.tokens, side.tokens) if side.difference is None else side.difference.place


@handler
def send(
    browser: Browser, prompt: str, answer: str, pictures: tuple[bytes, ...], tokens: float, seed: float, sample: bool
) -> list[Any]:
    """Show a message at once, and let it wait for its turn; refuse one that no model can answer."""
    message = Message(prompt or "", answer, pictures=tuple(pictures or ()))
    try:
        chat.require_student(browser.find_run())
        chat.check_message(message, *read_how(tokens, seed, sample)[:2])
        chats.ask(key := key_of(browser), message)
    except LinearizerError as error:
        return update(prompt=prompt or "", chat_note=message_box(str(error), "bad"))
    note = "It waits for its turn." if chats.is_answering(key) else LOADING
    return update(**show(key), **draft(()), answer="", chat_note=message_box(note))


@handler
def add_picture(browser: Browser, path: str | None, drafted: tuple[bytes, ...]) -> list[Any]:
    """Let the next message show a picture."""
    try:
        picture, shown = take_picture(path), len(drafted or ())
        if (talk := chats.look_up(key := key_of(browser))) is not None:
            shown += sum(len(turn.message.pictures) for turn in talk.turns)
        if shown + sum(len(message.pictures) for message in chats.asked(key)) >= MAX_PICTURES:
            raise RequestError(f"a chat shows at most {MAX_PICTURES} pictures: begin a new chat")
    except LinearizerError as error:
        return update(chat_note=message_box(str(error), "bad"))
    return update(**draft((*(drafted or ()), picture)), chat_note="")


def take_picture(path: str | None) -> bytes:
    """Return a picture that a visitor has sent, of bounded size and without what cameras add; delete its file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path or os.devnull, formats=FORMATS) as sent:
            if sent.width * sent.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            picture = ImageOps.exif_transpose(sent).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(TOO_LARGE) from error
    except Exception as error:  # formats raise errors of many types
        raise RequestError(NO_PICTURE) from error
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return write_picture(picture)


@handler
def retry(browser: Browser) -> list[Any]:
    """Take the last turn back, and ask again for other tokens."""
    key = key_of(browser)
    talk = chats.look_up(key)
    if chats.is_answering(key) or talk is None or not talk.turns:
        return update(chat_note=message_box("A message is being answered: wait for it, or press Stop.", "bad"))
    last = talk.turns[-1].message
    chats.keep_chat(key, talk.take_back())
    chats.ask(key, last._replace(tries=last.tries + 1), first=True)
    return update(**show(key), chat_note=message_box(LOADING))


def read_how(tokens: float, seed: float, sample: bool) -> tuple[int, int, bool]:
    return int(tokens or 0), int(seed or 0), bool(sample)  # a field of the page may be empty


def read_settings(as_chat: bool, system: str, window: bool) -> Settings:
    return Settings(bool(as_chat), (system or "").strip(), bool(window))


@handler
def answer(browser: Browser, tokens: float, seed: float, sample: bool, *manner: Any) -> Iterator[list[Any]]:
    """Let all models answer the message that waits longest; one that cannot be answered returns to its field."""
    key = key_of(browser)
    if not (waiting := chats.asked(key)):
        yield update()  # it was taken back meanwhile
        return
    message = waiting[0]
    try:
        yield from show_answers(browser, key, message, read_how(tokens, seed, sample), read_settings(*manner))
    except LinearizerError as error:
        chats.take_asked(key)
        returned = {"prompt": message.text, **draft(message.pictures)}
        yield update(**show(key), **returned, chat_note=message_box(str(error), "bad"))


def show_answers(
    browser: Browser, key: Key, message: Message, how: tuple[int, int, bool], settings: Settings
) -> Iterator[list[Any]]:
    """Show what the models read and write until the message is answered, or should not be."""
    from linearizer.run.results import StateSizes

    turn: Comparison | None = None
    talk = chats.look_up(key)
    before = talk.tokens if talk else 0
    for talk, news in chat.compare_models(browser.visitor, browser.run_name, message, *how, settings, NAME):
        if isinstance(news, StateSizes):
            heads = heads_of_reading(news, 0 if news.again else before)
            yield update(**heads, chat_note=reading_note(news, "the prompt"))
        else:
            if turn is None:
                chats.take_asked(key)
            turn = news
            yield update(**columns_of(talk, chats.asked(key)), **heads_of(talk), chat_note="")
    note = "" if turn is None or talk is None or talk.state else turn_note(turn, message.answer)
    yield update(**show(key), **({} if turn is None else {"chat_note": note}))


@handler
def read_file(browser: Browser, path: str | None, *manner: Any) -> Iterator[list[Any]]:
    """Let all models read a file, which begins a new chat; nothing else of it is kept."""
    from linearizer.run.results import StateSizes

    text, key = take_text(path), key_of(browser)
    yield update(**columns_of(Chat(Settings()), []), chat_note=message_box(LOADING))
    for _, news in chat.read_document(browser.visitor, browser.run_name, text, read_settings(*manner), NAME):
        assert isinstance(news, StateSizes), "nothing is written"
        yield update(**heads_of_reading(news, 0), chat_note=reading_note(news, "the document"))
    if (talk := chats.look_up(key)) is not None and talk.document is not None:
        yield update(**columns_of(talk, chats.asked(key)), chat_note=message_box("Now ask about the document."))


@handler
def save_state(browser: Browser) -> str:
    """Return the address of the student's state, which the browser then fetches."""
    path = chat.save_state(browser.visitor, browser.run_name, NAME)
    return sending.offer_state(browser.find_run(), path)


@handler
def load_state(browser: Browser, path: str | None, *manner: Any) -> Iterator[list[Any]]:
    """Begin a new chat with the state in a file that a visitor has sent."""
    from linearizer.run.results import StateSizes

    yield update(chat_note=message_box(LOADING))
    key, file = key_of(browser), chats.fresh_file()
    try:
        shutil.move(path or os.devnull, file)
        for _, news in chat.load_state(browser.visitor, browser.run_name, file, read_settings(*manner), NAME):
            assert isinstance(news, StateSizes), "nothing is written"
            note = message_box(f"The student remembers {news.tokens:,} tokens. Now ask about them.")
            yield update(**show(key) | heads_of_reading(news, 0), chat_note=note)
    except LinearizerError as error:
        yield update(chat_note=message_box(str(error).replace(repr(str(file)), "the file"), "bad"))


def take_text(path: str | None) -> str:
    """Return the text of a file that a visitor has sent, and delete the file."""
    from linearizer.teacher.text import decode_document

    try:
        return decode_document("the file", Path(path or os.devnull).read_bytes())
    except OSError as error:
        raise RequestError(f"the file did not arrive ({error.strerror}): send it again") from error
    finally:
        if path:
            Path(path).unlink(missing_ok=True)


@handler
def stop(browser: Browser, prompt: str, drafted: tuple[bytes, ...]) -> list[Any]:
    """Stop what is being read or written; messages that wait return to the field."""
    left = [Message(prompt or "", pictures=tuple(drafted or ())), *chats.stop(key := key_of(browser))]
    text = "\n".join(message.text for message in left if message.text)
    pictures = draft([picture for message in left for picture in message.pictures])
    return update(**show(key), **pictures, prompt=text, chat_note=message_box("Stopped."))


@handler
def end(browser: Browser) -> list[Any]:
    """Begin a new chat, in the template of the model; forget what was read and said."""
    actions.end_chat(browser.visitor, browser.run_name, NAME)
    return update(**show(key_of(browser)), **draft(()), as_chat=True, answer="", chat_note="")


def take_prompt(title: str) -> Any:
    """Return the handler of a button that fills in a prompt; one that needs memory is a plain text, not a chat."""

    @handler
    def take(browser: Browser, tokens: float) -> list[Any]:
        if title in chat.SAMPLE_PROMPTS:
            return update(prompt=chat.SAMPLE_PROMPTS[title], answer="")
        prompt, state = chat.make_memory_prompt(browser.visitor, browser.run_name, title, int(tokens or 0))
        actions.end_chat(browser.visitor, browser.run_name, NAME)
        note = (
            f"It continues with a text that stands about {prompt.distance:,} tokens back: “{prompt.answer}”. The "
            f"student's state takes the bytes of {state:,} tokens."
        )
        written = {"prompt": prompt.text, "answer": prompt.answer, "as_chat": False}
        return update(**show(key_of(browser)), **written, chat_note=message_box(note))

    return take
