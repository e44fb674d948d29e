"""The recorded chats of the finished example: what model, student and a plain window answered about texts.

They need no weights. A recorded chat goes on like any other: then the models are loaded, and read its tokens.
`python -m tests.benchmarks.example` records them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from html import escape

from linearizer.amounts import size
from linearizer.page.chat.chats import USUAL, Chat, Document, Message, Turn
from linearizer.page.planning import known_source
from linearizer.page.visitors import example_folder
from linearizer.plan.json_products import JsonProduct
from linearizer.report.markup import folded
from linearizer.run.folder import Run
from linearizer.run.results import Comparison

FILE = "chats.json"  # in the folder of the example


@dataclass(frozen=True)
class Question:
    """A question about a text, and what each model answered."""

    text: str
    answer: str  # as it stands in the text
    fact: str  # the sentence there
    distance: int  # tokens from there to the question
    heard: dict[str, tuple[int, ...]]  # tokens after the text, by the names of models
    answers: Comparison


@dataclass(frozen=True)
class Reading:
    """A text that all models have read, and questions about it."""

    title: str
    text: str
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class RecordedChats(JsonProduct):
    """The texts with the questions that are shown, and how many of all that were asked each model answered right."""

    asked: int
    right: dict[str, int]  # by the names of models
    readings: tuple[Reading, ...]


@cache
def read_recorded() -> RecordedChats:
    return RecordedChats.from_json((example_folder() / FILE).read_text(encoding="utf-8"))


def chat_about(reading: Reading, question: Question) -> Chat:
    """Make the chat in which a question was asked about a text."""
    document, begin = Document(len(reading.tokens), True), len(reading.tokens)
    heard = {name: [*reading.tokens, *tokens] for name, tokens in question.heard.items()}
    turn = Turn(Message(question.text, question.answer), dict.fromkeys(heard, begin), question.answers)
    return Chat(USUAL, heard, document, (turn,), templated=True)


def first_chat() -> Chat:
    """Return the chat that the example shows before a question is chosen."""
    reading = read_recorded().readings[0]
    return chat_about(reading, reading.questions[0])


def find_question(talk: Chat) -> tuple[Reading, Question] | None:
    """Find what a chat began with, if it was recorded."""
    begun = (talk.document, talk.turns[0].message.text) if talk.turns else None
    for reading in read_recorded().readings:
        for question in reading.questions:
            if begun == (Document(len(reading.tokens), True), question.text):
                return reading, question
    return None


def about_html(run: Run) -> str:
    """Say what was recorded, and what it takes to ask more."""
    from linearizer.hub.models import download_bytes

    recorded, teacher = read_recorded(), run.inspection
    load = download_bytes(known_source(teacher.name, teacher.parameters, teacher.weight_bytes))
    takes = f"{size(load)} are downloaded, and" if load else "its weights are here, and"
    counts = ", ".join(f"the {name} {count}" for name, count in recorded.right.items())
    return (
        "<p>These chats were <b>recorded</b>: all three read a lease or a log, both ours, or Joyce’s Dubliners with a "
        f"sentence of ours, and then a question. Answers with the right words, of {recorded.asked}: {counts}.</p>"
        f"<p>To ask your own, write it below, which loads the model: {takes} the student is made again, in a minute or "
        "more.</p>"
    )


def text_html(talk: Chat) -> str:
    """Show the text that a recorded chat is about, and where the answer stands in it."""
    if (found := find_question(talk)) is None:
        return ""
    reading, question = found
    before, fact, after = reading.text.partition(question.fact)
    marked = f"{escape(before)}<mark>{escape(fact)}</mark>{escape(after)}"
    title = f"The answer stands {question.distance:,} tokens before the question: “{question.fact}”"
    return folded(title, f'<pre class="lz-text" tabindex="0">{marked}</pre>')
