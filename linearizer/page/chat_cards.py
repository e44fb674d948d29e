"""The HTML of a chat: what each model writes, its speed, and the memory of all while they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from linearizer.amounts import size
from linearizer.report.line_chart import Axis, Line, draw_lines
from linearizer.report.markup import announcement, message_box, values_list

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import MemoryPrompt
    from linearizer.page.chats import Chat
    from linearizer.run.results import Comparison, Difference, Side, StateSizes

HOLDS = {"teacher": "the teacher's cache", "student": "the student's state", "window": "the window"}
MIN_TIMED_TOKENS = 16  # written: with fewer, the pace is chance and is not shown
MIN_METERED_TOKENS = 64  # read: with fewer, no meter is shown
SHOWN_BEGIN, SHOWN_END = 80, 160  # characters of a long prompt


def column(turns: Sequence[Comparison], name: str) -> str:
    """Show what one model was asked and what it answered, turn by turn."""
    paragraphs = []
    for turn in turns:
        side: Side | None = getattr(turn, name)
        compared = turn.student if name == "teacher" else side
        difference = None if compared is None else compared.difference
        token = "" if difference is None else difference.teacher if name == "teacher" else difference.own
        written = writing_card(side, difference, token)
        paragraphs.append(f'<p class="lz-asked">{escape(shorten(turn.prompt))}</p>{written}')
    return f"<div>{''.join(paragraphs)}</div>" if paragraphs else ""


def shorten(prompt: str) -> str:
    """Leave out the middle of a long prompt."""
    if len(prompt) <= SHOWN_BEGIN + SHOWN_END:
        return prompt
    return f"{prompt[:SHOWN_BEGIN]} […] {prompt[-SHOWN_END:]}"


def writing_card(side: Side | None, difference: Difference | None, token: str) -> str:
    """Show what one model wrote, with a mark on the first token in which it and the teacher differ."""
    text = "" if side is None else side.text
    if side is not None and side.tokens and not text:
        return '<p class="lz-faint">Ended at once.</p>'
    if difference is None or not token or not text.startswith(difference.alike + token):
        return f"<p>{escape(text)}</p>"
    ending = text[len(difference.alike) + len(token) :]
    return f"<p>{escape(difference.alike)}<mark>{escape(token)}</mark>{escape(ending)}</p>"


def comparison_note(result: Comparison) -> str:
    """Describe how much of the teacher's text student and window write."""
    sides = {name: side for name, side in (("student", result.student), ("window", result.window)) if side is not None}
    total = result.teacher.tokens
    counts = {name: same_tokens(result.teacher, side) for name, side in sides.items()}
    if all(not side.text for side in (result.teacher, *sides.values())):
        sentence = "All ended at once." if len(sides) > 1 else "Both ended at once."
    elif all(side.difference is None and side.tokens == total for side in sides.values()):
        sentence = f"{'All' if len(sides) > 1 else 'Both'} write the same {total} tokens."
    else:
        shares = ", ".join(
            f"the {name} {count} of {total} ({count / max(total, 1):.0%})" for name, count in counts.items()
        )
        sentence = f"Tokens equal to the teacher's before the first difference, which is marked: {shares}."
    return message_box(sentence)


def same_tokens(teacher: Side, side: Side) -> int:
    """Count the tokens of a model that equal the teacher's, before the first difference."""
    return min(teacher.tokens, side.tokens) if side.difference is None else side.difference.place


def memory_note(prompt: MemoryPrompt, state: int) -> str:
    """Describe how a prompt continues, and how far back the model has read that."""
    place = f"It continues with a text that stands about {prompt.distance:,} tokens back: “{prompt.answer}”."
    state_size = f"The student's state takes the bytes of {state:,} tokens."
    return message_box(f"{place} {state_size} A teacher that does not recall it is too small for this.")


def side_card(side: Side | None) -> str:
    """Show the speed of one model, and the bytes that it remembers."""
    if side is None or not side.tokens:
        return values_list([("tokens/s", "–"), ("first token", "–"), ("remembers", "–")], "lz-thirds")
    timed = side.tokens >= MIN_TIMED_TOKENS
    pairs = [
        ("tokens/s", f"{side.tokens_per_second:.1f}" if timed else "–"),
        ("first token", f"{side.first_token_seconds * 1000:.0f} ms"),
        (f"remembers after {side.tokens_read:,} tokens", size(side.state_bytes)),
    ]
    return values_list(pairs, "lz-thirds")


def meter_card(course: Sequence[StateSizes], chat: Chat, before: int = 0) -> str:
    """Show how the memory of each model grows, or does not, while a text is read after `before` other tokens."""
    newest = course[-1]
    done, document = newest.tokens == newest.total, chat.document
    source = "the document" if document and not chat.turns and not before else "the prompt"
    reread = ", which was read before: its states have made room for others" if newest.again else ""
    title = f"{'Read' if done else 'Reading'} {source}{reread}: {newest.tokens:,} of {newest.total:,} tokens"
    loud = announcement(f"{title}. {describe_sizes(newest.bytes)}") if done else ""
    cut = document is not None and done and source == "the document" and not document.whole
    note = '<p class="lz-faint">It is longer than the model reads here: this is its beginning.</p>' if cut else ""
    if newest.recurrent_bytes:
        note += (
            f'<p class="lz-faint">{size(newest.recurrent_bytes)} of each are in recurrent layers, and do not grow.</p>'
        )
    facts = "".join(
        f'<div class="lz-{name}"><dt>{escape(HOLDS[name])}</dt><dd>{size(held_bytes)}</dd></div>'
        for name, held_bytes in newest.bytes.items()
    )
    return (
        f'<section class="lz-meter" aria-label="Memory while reading"><p class="lz-step"{loud}>{escape(title)}</p>'
        f'<dl class="lz-facts lz-thirds">{facts}</dl>{draw_course(course, before)}{note}</section>'
    )


def describe_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{HOLDS[name]} {size(count)}" for name, count in sizes.items())


def draw_course(course: Sequence[StateSizes], before: int) -> str:
    """Draw a line for each model: bytes over the tokens that were read; the axis has room for the teacher's end."""
    first, newest = course[0], course[-1]

    def teacher_at(step: StateSizes, tokens: int) -> int:
        growing = step.bytes["teacher"] - step.recurrent_bytes
        return step.recurrent_bytes + growing * (before + tokens) // max(before + step.tokens, 1)

    max_bytes = max(*newest.bytes.values(), teacher_at(newest, newest.total), 1)
    start = {**first.bytes, "teacher": teacher_at(first, 0)}
    lines = [
        Line(
            name, [(0, start[name]), *((step.tokens, step.bytes[name]) for step in course)], f"lz-{name}", marked=False
        )
        for name in newest.bytes
    ]
    about = f"Bytes over tokens: {describe_sizes(newest.bytes)} after {newest.tokens:,} tokens"
    across = Axis(0, newest.total, [(count, f"{count:,}") for count in (0, newest.total)], log=False)
    return draw_lines(about, across, Axis(0, max_bytes, [(0, "0"), (max_bytes, size(max_bytes))], log=False), lines)
