"""The step Compare: a chat with teacher, student and a plain window, its parts, their events and handlers.

A message waits in the chat until those before it are answered, so another one can be sent meanwhile. All that is shown
comes from the chat, which the server keeps: a page that is loaded again shows it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import size
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, limits, sending
from linearizer.page.calls import ONCE, QUICK, SLOW, Browser, handler
from linearizer.page.chat import answers, cards, chats, recorded
from linearizer.page.chat.chats import Chat, Key, Message, Settings
from linearizer.page.visitors import is_example
from linearizer.report.markup import message_box
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.run.results import Comparison

ABOUT = (
    "One chat with three models, which take turns, a token each. They can all read a file, and then each answers from "
    "what it remembers."
)
ABOUT_STATES = (
    "A state is what the student remembers of this chat, without the text. Load it here, or let "
    "<code>linearizer ask RUN --state FILE</code> answer from it. The other two cannot go on from it."
)
DRAFT = ("drafted", "drafts", "drop_pictures")  # pictures that are not sent yet, what shows them and drops them
SHOWN = ("about_recorded", "recorded_text", *cards.HEADS.values(), *cards.COLUMNS)  # of a chat
OUTPUTS = ("as_chat", "prompt", "answer", "chat_note", *DRAFT, *SHOWN)
NAME = "page"  # of the chat that all pages of a visitor show of a run
LOADING = "Loading the models."


def place(ui: SimpleNamespace) -> None:
    """Place a column for each model, and below them the field in which all are asked."""
    gr.HTML(f'<div class="lz-lead"><h2>Compare</h2><p>{ABOUT}</p></div>')
    place_recorded(ui)
    with gr.Row():
        for name, title in cards.COLUMNS.items():
            with gr.Column(min_width=220) as column:
                setattr(ui, cards.HEADS[name], gr.HTML(cards.head_card(name), elem_id=f"{name}-head"))
                look: dict[str, Any] = {"show_label": False, "height": "20rem", "layout": "panel", "elem_id": name}
                setattr(ui, name, gr.Chatbot(label=title, allow_tags=False, buttons=["copy"], **look))
    ui.window_place = column  # the last
    ui.chat_note, ui.answer = gr.HTML(elem_id="chat-note"), gr.State("")
    ui.prompt = gr.Textbox(
        label="Message", placeholder="Enter sends it, Shift+Enter breaks the line", max_lines=8, elem_id="prompt"
    )
    ui.drafted, ui.drafts = gr.State(()), gr.HTML(elem_id="drafts")
    with gr.Row(elem_id="prompts", elem_classes="lz-chips") as ui.prompts_place:
        titles = (*answers.SAMPLE_PROMPTS, *answers.MEMORY_PROMPTS)
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


def place_recorded(ui: SimpleNamespace) -> None:
    """Place the questions of the example whose answers were recorded, and the text that the chosen one is about."""
    ui.questions = {}
    with gr.Column(visible=False, elem_id="recorded") as ui.recorded_place:
        ui.about_recorded = gr.HTML()
        for reading in recorded.read_recorded().readings:
            with gr.Row(elem_classes="lz-chips"):
                gr.HTML(f"<h3>{reading.title}</h3>")
                for question in reading.questions:
                    button = gr.Button(question.text, size="sm", min_width=90)
                    ui.questions[button] = recorded.chat_about(reading, question)
    ui.recorded_text = gr.HTML(elem_id="recorded-text")


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
    message = [ui.memory, ui.prompt, ui.answer, ui.drafted]
    sent = gr.on(triggers, send, [*message, *how], outputs, js="putTakenMessage", **many)
    retried = gr.on([getattr(ui, name).retry for name in cards.COLUMNS], retry, ui.memory, outputs, **many)
    for event in (sent, retried):
        event.then(answer, [ui.memory, *how, *manner], outputs, **turn)
    ui.file.upload(read_file, [ui.memory, ui.file, *manner], outputs, **turn)
    ui.load_state.upload(load_state, [ui.memory, ui.load_state, *manner], outputs, **turn)
    shown: dict[str, Any] = {**ONCE, "show_progress_on": ui.save_state}
    saved = ui.save_state.click(save_state, ui.memory, [ui.saved, ui.chat_note], **shown)
    saved.success(None, ui.saved, None, js="fetchFile", **QUICK)
    ui.picture.upload(add_picture, [ui.memory, ui.picture, ui.drafted], outputs, **QUICK)
    ui.drop_pictures.click(lambda: update(**draft(())), None, outputs, **QUICK)
    ui.stop_writing.click(stop, [ui.memory, ui.prompt, ui.drafted], outputs, **QUICK)
    ui.end_chat.click(end, ui.memory, outputs, **QUICK)
    ui.with_window.change(lambda is_shown: gr.Column(visible=bool(is_shown)), ui.with_window, ui.window_place, **QUICK)
    for title, button in ui.prompts.items():
        button.click(take_prompt(title), [ui.memory, ui.tokens], outputs, show_progress_on=ui.prompt, **SLOW)
    for button, talk in ui.questions.items():
        button.click(take_recorded(talk), ui.memory, outputs, **QUICK)


def update(**parts: Any) -> list[Any]:
    """Return updates of the parts, in the order of OUTPUTS; the other parts stay."""
    return [parts.get(name, gr.skip()) for name in OUTPUTS]


def key_of(browser: Browser) -> Key:
    key = chats.key_of(browser.visitor, browser.find_run(), NAME)
    assert key is not None, "it has a name"
    return key


def show(key: Key) -> dict[str, Any]:
    """Show a chat: its turns, what is not answered yet, and what each model remembers."""
    talk = shown_chat(key)
    shown: dict[str, Any] = cards.columns_of(talk, chats.asked(key))
    heads = {cards.HEADS[name]: cards.head_card(name) for name in cards.HEADS} | cards.heads_of(talk)
    return shown | heads | {"recorded_text": recorded.text_html(talk)}


def show_kept(browser: Browser, another: bool = False) -> dict[str, Any]:
    """Show the chat of a run that is opened; without one, only that of `another` run is emptied.

    Messages that wait while nothing is answered return to the field: the page that sent them is gone.
    """
    with suppress(LinearizerError):  # the visitor may be unknown, and has none
        key, run = key_of(browser), browser.find_run()
        about = {"about_recorded": recorded.about_html(run)} if is_example(run) else {}
        left = [] if chats.is_answering(key) else chats.stop(key)
        if chats.look_up(key) or another or chats.asked(key) or about:
            returned = give_back(left) if left else {}
            return show(key) | about | returned | {"chat_note": last_note(shown_chat(key))}
    return {}


def shown_chat(key: Key) -> Chat:
    """Return the chat so far; that of the example begins with a recorded one."""
    return chats.look_up(key) or (recorded.first_chat() if is_example(Run(key[1][0])) else Chat(Settings()))


def keep_shown(browser: Browser) -> Key:
    """Keep the chat that the page shows, which goes on now."""
    if chats.look_up(key := key_of(browser)) is None:
        chats.keep_chat(key, shown_chat(key))
    return key


def last_note(talk: Chat) -> str:
    """Compare the answers to the last message; a student that answers alone is compared with none."""
    if talk.state or not talk.turns:
        return ""
    return cards.turn_note(talk.turns[-1].answers, talk.turns[-1].message.answer)


def draft(pictures: Sequence[bytes]) -> dict[str, Any]:
    """Show the pictures that the next message has."""
    shown = gr.HTML("".join(map(cards.picture_html, pictures)))
    return {"drafted": tuple(pictures), "drafts": shown, "drop_pictures": gr.Button(visible=bool(pictures))}


def give_back(messages: Sequence[Message]) -> dict[str, Any]:
    """Return messages that will not be answered to the field."""
    pictures = draft([picture for message in messages for picture in message.pictures])
    return {"prompt": "\n".join(message.text for message in messages if message.text), **pictures}


@handler
def send(
    browser: Browser, prompt: str, answer: str, pictures: tuple[bytes, ...], tokens: float, seed: float, sample: bool
) -> list[Any]:
    """Show a message at once, and let it wait for its turn; refuse one that no model can answer."""
    message = Message(prompt or "", answer, pictures=tuple(pictures or ()))
    try:
        answers.require_student(browser.find_run())
        answers.check_message(message, *read_how(tokens, seed, sample)[:2])
        chats.ask(key := keep_shown(browser), message)
    except LinearizerError as error:
        return update(prompt=prompt or "", chat_note=message_box(str(error), "bad"))
    note = "It waits for its turn." if chats.ANSWERING else LOADING  # also that of another visitor
    return update(**show(key), **draft(()), answer="", chat_note=message_box(note))


@handler
def add_picture(browser: Browser, path: str | None, drafted: tuple[bytes, ...]) -> list[Any]:
    """Let the next message show a picture."""
    try:
        picture, shown = cards.take_picture(path), len(drafted or ())
        if (talk := chats.look_up(key := key_of(browser))) is not None:
            shown += talk.pictures
        cards.check_pictures(1 + shown + sum(len(message.pictures) for message in chats.asked(key)))
    except LinearizerError as error:
        return update(chat_note=message_box(str(error), "bad"))
    return update(**draft((*(drafted or ()), picture)), chat_note="")


@handler
def retry(browser: Browser) -> list[Any]:
    """Take the last turn back, and ask again for other tokens."""
    key = keep_shown(browser)
    talk = shown_chat(key)
    if chats.is_answering(key) or not talk.turns:
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
    """Let all models answer the messages that wait; a message that cannot be answered returns to its field.

    The page that sent the first ones may be gone, and the next event answers them, too.
    """
    key = key_of(browser)
    if not (waiting := chats.asked(key)):
        yield update(**show(key))  # it was answered or taken back meanwhile
    for message in waiting:
        if message not in chats.asked(key):
            return
        try:
            yield from show_answers(browser, key, message, read_how(tokens, seed, sample), read_settings(*manner))
        except LinearizerError as error:
            chats.take_asked(key)
            yield update(**show(key), **give_back([message]), chat_note=message_box(str(error), "bad"))
            return


def show_answers(
    browser: Browser, key: Key, message: Message, how: tuple[int, int, bool], settings: Settings
) -> Iterator[list[Any]]:
    """Show what the models read and write until the message is answered, or should not be."""
    from linearizer.run.results import StateSizes

    turn: Comparison | None = None
    talk = chats.look_up(key)
    before = talk.tokens if talk else 0
    for talk, news in answers.compare_models(browser.visitor, browser.run_name, message, *how, settings, NAME):
        if isinstance(news, StateSizes):
            heads = cards.heads_of_reading(news, 0 if news.again else before)
            yield update(**heads, chat_note=cards.reading_note(news, "the prompt"))
        else:
            if turn is None:
                chats.take_asked(key)
            turn = news
            yield update(**cards.columns_of(talk, chats.asked(key)), **cards.heads_of(talk, False), chat_note="")
    yield update(**show(key), **({} if turn is None else {"chat_note": last_note(shown_chat(key))}))


@handler
def read_file(browser: Browser, path: str | None, *manner: Any) -> Iterator[list[Any]]:
    """Let all models read a file, which begins a new chat; nothing else of it is kept."""
    from linearizer.run.results import StateSizes

    yield update(chat_note=message_box(LOADING))
    key, settings, note = key_of(browser), read_settings(*manner), ""
    try:
        for talk, news in answers.read_document(browser.visitor, browser.run_name, take_text(path), settings, NAME):
            assert isinstance(news, StateSizes), "nothing is written"
            parts = cards.columns_of(talk, chats.asked(key)) | cards.heads_of_reading(news, 0)
            yield update(**parts, recorded_text="", chat_note=cards.reading_note(news, "the document"))
            note = message_box("Now ask about the document.")
        if note and (kept := chats.look_up(key)) is not None and kept.document is not None:
            yield update(chat_note=note)
    except LinearizerError as error:
        yield update(**show(key), chat_note=message_box(str(error), "bad"))


@handler
def save_state(browser: Browser) -> tuple[str, str]:
    """Return the address of the student's state, which the browser then fetches, or say why there is none."""
    try:
        keep_shown(browser)
        path = answers.save_state(browser.visitor, browser.run_name, NAME)
    except LinearizerError as error:
        return "", message_box(str(error), "bad")
    limit = f"This page loads files of at most {size(limits.MAX_FILE)}: `linearizer ask` goes on from this state."
    note = message_box(limit) if path.stat().st_size > limits.MAX_FILE else ""
    return sending.offer_state(browser.find_run(), path), note


@handler
def load_state(browser: Browser, path: str | None, *manner: Any) -> Iterator[list[Any]]:
    """Begin a new chat with the state in a file that a visitor has sent."""
    from linearizer.run.results import StateSizes

    yield update(chat_note=message_box(LOADING))
    key, file = key_of(browser), chats.fresh_file()
    try:
        take_file(path, file)
        for _, news in answers.load_state(browser.visitor, browser.run_name, file, read_settings(*manner), NAME):
            assert isinstance(news, StateSizes), "nothing is written"
            note = message_box(f"The student remembers {news.tokens:,} tokens. Now ask about them.")
            yield update(**show(key) | cards.heads_of_reading(news, 0), chat_note=note)
    except LinearizerError as error:
        yield update(chat_note=message_box(str(error).replace(repr(str(file)), "the file"), "bad"))


def take_text(path: str | None) -> str:
    """Return the text of a file that a visitor has sent, and delete the file."""
    from linearizer.teacher.text import decode_document

    take_file(path, file := chats.fresh_file())
    try:
        return decode_document("the file", file.read_bytes())
    finally:
        file.unlink()


def take_file(path: str | None, target: Path) -> None:
    """Move a file that a visitor has sent; it may be gone, as two visitors who send the same file share one path."""
    try:
        shutil.move(path or "", target)
    except OSError as error:
        raise RequestError(f"the file did not arrive ({error.strerror}): send it again") from error


@handler
def stop(browser: Browser, prompt: str, drafted: tuple[bytes, ...]) -> list[Any]:
    """Stop what is being read or written; messages that wait return to the field."""
    left = [Message(prompt or "", pictures=tuple(drafted or ())), *chats.stop(key := key_of(browser))]
    return update(**show(key), **give_back(left), chat_note=message_box("Stopped."))


@handler
def end(browser: Browser) -> list[Any]:
    """Begin a new chat, in the template of the model; forget what was read and said."""
    actions.end_chat(browser.visitor, browser.run_name, NAME)
    if is_example(browser.find_run()):  # which would begin with a recorded one
        chats.keep_chat(key_of(browser), Chat(Settings()))
    return update(**show(key_of(browser)), **draft(()), as_chat=True, answer="", chat_note="")


def take_prompt(title: str) -> Any:
    """Return the handler of a button that fills in a prompt; one that needs memory is a plain text, not a chat."""

    @handler
    def take(browser: Browser, tokens: float) -> list[Any]:
        if title in answers.SAMPLE_PROMPTS:
            return update(prompt=answers.SAMPLE_PROMPTS[title], answer="")
        prompt, state = answers.make_memory_prompt(browser.visitor, browser.run_name, title, int(tokens or 0))
        actions.end_chat(browser.visitor, browser.run_name, NAME)
        note = (
            f"It continues with a text that stands about {prompt.distance:,} tokens back: “{prompt.answer}”. The "
            f"student's state takes the bytes of {state:,} tokens."
        )
        written = {"prompt": prompt.text, "answer": prompt.answer, "as_chat": False}
        return update(**show(key_of(browser)), **written, chat_note=message_box(note))

    return take


def take_recorded(talk: Chat) -> Any:
    """Return the handler of a button that shows a recorded chat."""

    @handler
    def take(browser: Browser) -> list[Any]:
        key = key_of(browser)
        actions.end_chat(browser.visitor, browser.run_name, NAME)
        chats.keep_chat(key, talk)
        return update(**show(key), **draft(()), as_chat=True, answer="", chat_note=last_note(talk))

    return take
