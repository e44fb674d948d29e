"""The HTML of a chat: what each model says, its speed, and the memory of all while they read."""

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
    from linearizer.run.results import Comparison, Difference, Held, Side

HOLDS = {"teacher": "the teacher's cache", "student": "the student's state", "window": "the window"}
MIN_TIMED_TOKENS = 16  # written, from which on their pace is told: that of fewer is chance
MIN_METERED_TOKENS = 64  # read, from which on a meter is shown
SHOWN_BEGIN, SHOWN_END = 80, 160  # characters of a long prompt


def column(turns: Sequence[Comparison], name: str) -> str:
    """Show what one model was asked and what it answered, turn by turn."""
    shown = []
    for turn in turns:
        side: Side | None = getattr(turn, name)
        compared = turn.student if name == "teacher" else side
        first = None if compared is None else compared.difference
        own = "" if first is None else first.teacher if name == "teacher" else first.own
        shown.append(f'<p class="lz-asked">{escape(shorten(turn.prompt))}</p>{writing_card(side, first, own)}')
    return f"<div>{''.join(shown)}</div>" if shown else ""


def shorten(prompt: str) -> str:
    """Leave out the middle of a long prompt."""
    if len(prompt) <= SHOWN_BEGIN + SHOWN_END:
        return prompt
    return f"{prompt[:SHOWN_BEGIN]} […] {prompt[-SHOWN_END:]}"


def writing_card(side: Side | None, difference: Difference | None, own: str) -> str:
    """Show what one model wrote, with a mark on the first token in which it and the teacher differ."""
    text = "" if side is None else side.text
    if side is not None and side.tokens and not text:
        return '<p class="lz-faint">Ended at once.</p>'
    if difference is None or not own or not text.startswith(difference.alike + own):
        return f"<p>{escape(text)}</p>"
    rest = text[len(difference.alike) + len(own) :]
    return f"<p>{escape(difference.alike)}<mark>{escape(own)}</mark>{escape(rest)}</p>"


def comparison_note(now: Comparison) -> str:
    """Say how much of the teacher's text the others write."""
    others = {name: side for name, side in (("student", now.student), ("window", now.window)) if side is not None}
    total = now.teacher.tokens
    alike = {name: same_tokens(now.teacher, side) for name, side in others.items()}
    if all(not side.text for side in (now.teacher, *others.values())):
        said = "All ended at once." if len(others) > 1 else "Both ended at once."
    elif all(side.difference is None and side.tokens == total for side in others.values()):
        said = f"{'All' if len(others) > 1 else 'Both'} write the same {total} tokens."
    else:
        shares = ", ".join(
            f"the {name} {count} of {total} ({count / max(total, 1):.0%})" for name, count in alike.items()
        )
        said = f"Tokens as the teacher's, before the first that differs, which is marked: {shares}."
    return message_box(said)


def same_tokens(teacher: Side, side: Side) -> int:
    """Count the tokens that a model writes as the teacher does, before the first that differs."""
    return min(teacher.tokens, side.tokens) if side.difference is None else side.difference.place


def memory_note(prompt: MemoryPrompt, state: int) -> str:
    """Say how far back stands what a prompt goes on with, and what it is."""
    place = f"It goes on with what stands about {prompt.distance:,} tokens back: “{prompt.answer}”."
    held = f"The student's state takes the bytes of {state:,} tokens."
    return message_box(f"{place} {held} A teacher that does not recall it is too small for this.")


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


def meter_card(course: Sequence[Held], chat: Chat) -> str:
    """Show how the memory of each model grows or stands still while a text is read."""
    now = course[-1]
    done, document = now.tokens == now.total, chat.document
    what = "the document" if document and not chat.turns else "the prompt"
    again = ", which was read before: its states were given to others" if now.again else ""
    title = f"{'Read' if done else 'Reading'} {what}{again}: {now.tokens:,} of {now.total:,} tokens"
    loud = announcement(f"{title}. {told_sizes(now.bytes)}") if done else ""
    cut = document is not None and done and what == "the document" and not document.whole
    note = '<p class="lz-faint">It is longer than the model reads here: this is its beginning.</p>' if cut else ""
    facts = "".join(
        f'<div class="lz-{name}"><dt>{escape(HOLDS[name])}</dt><dd>{size(held)}</dd></div>'
        for name, held in now.bytes.items()
    )
    return (
        f'<section class="lz-meter" aria-label="Memory while reading"><p class="lz-step"{loud}>{escape(title)}</p>'
        f'<dl class="lz-facts lz-thirds">{facts}</dl>{draw_course(course)}{note}</section>'
    )


def told_sizes(held: Mapping[str, int]) -> str:
    return ", ".join(f"{HOLDS[name]} {size(count)}" for name, count in held.items())


def draw_course(course: Sequence[Held]) -> str:
    """Draw a line for each model: bytes over the tokens that were read, up to what the teacher will hold at the end."""
    now = course[-1]
    most = max(*now.bytes.values(), now.bytes["teacher"] * now.total // max(now.tokens, 1), 1)
    begin = {name: 0 if name == "teacher" else held for name, held in course[0].bytes.items()}
    lines = [
        Line(
            name, [(0, begin[name]), *((held.tokens, held.bytes[name]) for held in course)], f"lz-{name}", marked=False
        )
        for name in now.bytes
    ]
    about = f"Bytes over tokens: {told_sizes(now.bytes)} after {now.tokens:,} tokens"
    across = Axis(0, now.total, [(count, f"{count:,}") for count in (0, now.total)], log=False)
    return draw_lines(about, across, Axis(0, most, [(0, "0"), (most, size(most))], log=False), lines)
