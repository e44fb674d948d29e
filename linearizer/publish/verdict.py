"""The verdict on a student: one sentence, from what judging measured, that leads every account of a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from linearizer.run.folder import Run
from linearizer.run.results import Estimate, Language, Part, Predictions
from linearizer.run.state_size import StateSize

ALIKE_SHARE = 0.02  # of a kl: a smaller difference says nothing
NEAR, FAR = 0.9, 0.5  # agreement from which on a student is near its teacher, and below which it is far from it
ADVICE = "Another recipe, a larger budget or more training may do better."


@dataclass(frozen=True)
class Verdict:
    """The worth of a student beside a plain window of the same bytes."""

    kind: Literal["good", "note", "bad"]
    sentence: str
    agreement: float | None  # share of tokens whose likeliest is the teacher's; None: there was no teacher
    window_agreement: float | None
    worse_than_window: bool


def judge_run(run: Run) -> Verdict | None:
    """Give the verdict on the student of a run; None until it is judged."""
    parts: Mapping[str, Part] = run.results
    if run.allocation is None or "language" not in parts:
        return None
    return judge_language(parts["language"].result, StateSize.of(run.allocation, run.layers))


def judge_language(language: Language, state: StateSize) -> Verdict:
    """Give the verdict on a student: compare its predictions with the predictions of a window of the same bytes."""
    named = {subject.name: subject for subject in language.subjects}
    student, window = named["student"], named["window"]
    if student.kl is None or student.agreement is None or window.kl is None or window.agreement is None:
        return judge_alone(student, window, state)
    agreement, of_window = student.agreement.mean, window.agreement.mean
    agrees = f"grees with its teacher on {percent(student.agreement)} of tokens"
    size = f"{state.in_words}."
    if is_above(student.kl, window.kl):
        text = f"Worse than a plain window of the same bytes: a{agrees}, the window on {percent(window.agreement)}."
        return Verdict("bad", f"{text} {size} {ADVICE}", agreement, of_window, True)
    if not is_above(window.kl, student.kl):
        text = f"No better than a plain window of the same bytes: a{agrees}, the window on {percent(window.agreement)}."
        return Verdict("note", f"{text} {size}", agreement, of_window, False)
    text = f"A{agrees}; a plain window of the same bytes on {percent(window.agreement)}. {size}"
    if agreement < FAR:
        return Verdict("bad", f"{text} That is far from its teacher. {ADVICE}", agreement, of_window, False)
    return Verdict("good" if agreement >= NEAR else "note", text, agreement, of_window, False)


def judge_alone(student: Predictions, window: Predictions, state: StateSize) -> Verdict:
    """Give the verdict where the teacher was not there to agree with."""
    worse = is_above(student.loss, window.loss)
    text = f"Loss {student.loss.mean:.3f} nats per token; a plain window of the same bytes {window.loss.mean:.3f}."
    text = f"{text} {state.in_words}. The teacher was not there to compare with."
    return Verdict("bad" if worse else "note", text, None, None, worse)


def is_above(first: Estimate, second: Estimate) -> bool:
    """Tell whether a mean is above another by more than says nothing."""
    return first.mean > second.mean + ALIKE_SHARE * abs(second.mean)


def percent(share: Estimate) -> str:
    return f"{100 * share.mean:.1f}%"
