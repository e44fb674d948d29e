"""What a chat with three models shows: messages and pictures, what each remembers, and how their answers differ."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import size
from linearizer.errors import RequestError
from linearizer.page.chat import chats
from linearizer.page.chat.chats import Chat, Message
from linearizer.report.markup import message_box, values_list
from linearizer.teacher.picture_files import MAX_PICTURES, read_picture, read_picture_url

if TYPE_CHECKING:
    from PIL import Image

    from linearizer.run.results import Comparison, Difference, Side, StateSizes

ALONE = "This chat began with a state of the student, so the student answers alone."
COLUMNS = {"teacher": "Teacher", "student": "Student", "window": "Plain window"}
HEADS = {name: f"{name}_head" for name in COLUMNS}
MIN_TIMED_TOKENS = 16  # written: with fewer, the pace is chance and is not shown
SHOWN_BEGIN, SHOWN_END = 80, 160  # characters of a long prompt
SHOWN_SIDE = 240  # of a picture


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


def document_line(document: chats.Document) -> str:
    return f"{'A document' if document.whole else 'The beginning of a document'}, {document.tokens:,} tokens"


def shorten(prompt: str) -> str:
    """Leave out the middle of a long prompt."""
    if len(prompt) <= SHOWN_BEGIN + SHOWN_END:
        return prompt
    return f"{prompt[:SHOWN_BEGIN]} […] {prompt[-SHOWN_END:]}"


def head_card(
    name: str, held: int = 0, most: int = 0, tokens: int = 0, side: Side | None = None, answer: str = ""
) -> str:
    """Show what a model remembers, beside the model that remembers most, how fast it wrote, and whether rightly."""
    timed = side is not None and side.tokens >= MIN_TIMED_TOKENS
    pairs = [
        (f"memory at {tokens:,} tokens" if tokens else "memory", size(held) if tokens else "–"),
        ("tokens/s", f"{side.tokens_per_second:.1f}" if side and timed else "–"),
        ("first token", f"{side.first_token_seconds * 1000:.0f} ms" if side and side.tokens else "–"),
    ]
    if side and side.tokens and not side.first_token_seconds:  # it was recorded, without times
        del pairs[1:]
    bar = f'<div class="lz-held lz-{name}"><i style="width:{held / max(most, 1):.1%}"></i></div>'
    mark = mark_html(answer_in(side, answer)) if side and answer else ""
    return f"<h3>{COLUMNS[name]}{mark}</h3>{bar}{values_list(pairs, 'lz-thirds')}"


def answer_in(side: Side, answer: str) -> bool:
    """Whether a model has given the right answer."""
    return answer.casefold() in side.text.casefold()


def mark_html(is_right: bool) -> str:
    sign, word = ("✓", "right") if is_right else ("✗", "wrong")
    return f' <small class="lz-mark lz-{word}"><span aria-hidden="true">{sign}</span> {word}</small>'


def heads_of(talk: Chat, written: bool = True) -> dict[str, str]:
    """Show what each model remembers after the last turn, and once that is written, whether it answered rightly."""
    turn = talk.turns[-1] if talk.turns else None
    answers, answer = (turn.answers, turn.message.answer if written else "") if turn else (None, "")
    sides = {name: side for name in COLUMNS if talk.has(name) and (side := getattr(answers, name, None)) is not None}
    most = max((side.state_bytes for side in sides.values()), default=0)
    return {
        HEADS[name]: head_card(name, side.state_bytes, most, side.tokens_read, side, answer)
        for name, side in sides.items()
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
    reread = ", which was read before: the states are not in memory" if progress.again else ""
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
        found = {name: answer_in(side, answer) for name, side in {"teacher": turn.teacher, **sides}.items()}
        marks = ", ".join(f"the {name} {'right' if is_right else 'wrong'}" for name, is_right in found.items())
        alone = "" if found["teacher"] else " The teacher itself does not recall it: this says nothing of the student."
        return message_box(f"The right answer is “{answer}”: {marks}.{alone}{parting_of(sides)}", "note")
    total = turn.teacher.tokens
    if all(not side.text for side in (turn.teacher, *sides.values())):
        return message_box(f"{'All' if len(sides) > 1 else 'Both'} ended at once.")
    if all(side.difference is None and side.tokens == total for side in sides.values()):
        return message_box(f"{'All' if len(sides) > 1 else 'Both'} write the same {total} tokens.")
    counts = {name: same_tokens(turn.teacher, side) for name, side in sides.items()}
    shares = ", ".join(f"the {name} {count} of {total} ({count / max(total, 1):.0%})" for name, count in counts.items())
    return message_box(f"Tokens equal to the teacher's before the first difference: {shares}.{parting_of(sides)}")


def parting_of(sides: Mapping[str, Side]) -> str:
    """Say where each model leaves the teacher, and what both give the two tokens there."""
    return "".join(
        f" {name_parting(name, side.difference)}." for name, side in sides.items() if side.difference is not None
    )


def name_parting(name: str, difference: Difference) -> str:
    theirs, own = (
        f"“{token.strip() or token}”" if token else "the end" for token in (difference.teacher, difference.own)
    )
    place = f"At token {difference.place + 1}"
    if difference.chances is None:
        return f"{place} the {name} writes {own} in place of {theirs}"
    teacher, student = ([f"{chance:.1%}" for chance in chances] for chances in difference.chances)
    return (
        f"{place} the teacher writes {theirs}, the {name} {own}; the teacher gives these {teacher[0]} and "
        f"{teacher[1]}, the {name} {student[0]} and {student[1]}"
    )


def same_tokens(teacher: Side, side: Side) -> int:
    """Count the tokens of a model that equal the teacher's, before the first difference."""
    return min(teacher.tokens, side.tokens) if side.difference is None else side.difference.place


def take_picture(path: str | None) -> bytes:
    """Return a picture that a visitor has sent, of bounded size and without what cameras add; delete its file."""
    try:
        return write_picture(read_picture(path))
    finally:
        if path:
            Path(path).unlink(missing_ok=True)


def take_address(address: str) -> bytes:
    """Return the picture that a data: URL holds."""
    return write_picture(read_picture_url(address))


def check_pictures(count: int) -> None:
    if count > MAX_PICTURES:
        raise RequestError(f"a chat shows at most {MAX_PICTURES} pictures: begin a new chat")
