"""How long the parts of an evaluation will take, from what judging the same student took on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.jobs.forecast import JUDGED, START
from linearizer.run.evaluation_request import Request
from linearizer.run.folder import Run

SUBJECTS = 4  # teacher, student, window, untrained
DEPTHS = 5  # of pairs hidden in text
WRITTEN = 96  # tokens
STEP = 0.2  # of a pass: what writing one token of all texts takes
SHORTEST = 128  # tokens that repeated passages and pairs need
ATTENTION = 60  # passes that looking at every head takes, the curve of errors included
CHOICES = 4  # of a sample of a task, each read by itself
LENGTHS = 5  # at which speed is measured


@dataclass(frozen=True)
class Foreseen:
    """How long an evaluation will take, part by part, and what that was reckoned from."""

    seconds: dict[str, float]
    device: str | None  # at which the student was judged when it was made


def foresee(run: Run, request: Request) -> Foreseen:
    """Estimate an evaluation, and say at which device the work was done that it is estimated from."""
    return Foreseen(evaluation_seconds(run, request), run.found["made_with"].get("device"))


def evaluation_seconds(run: Run, request: Request) -> dict[str, float]:
    """Estimate every part, within a factor of about two; nothing where the log does not say what judging took."""
    if (one := pass_seconds(run)) is None:
        return {}
    usual = min(run.plan.length, run.positions)
    length = request.length or usual
    share = length / usual  # of a pass, in tokens
    gaps = max(1, (length // 16).bit_length())
    found = {
        "language": request.texts * share,
        "recall": request.texts * share * gaps,
        "needle": max(1, request.texts // 2) * DEPTHS * sum(needle_lengths(request, usual, run.positions)) / usual,
        "generation": 2 * WRITTEN * STEP,
        "approximation": ATTENTION * min(request.texts, 2) / 2 / SUBJECTS * share**2,
    }
    seconds = {part: 1 + SUBJECTS * passes * one for part, passes in found.items()}
    seconds["speed"] = 3 * LENGTHS / 2 * min(request.seconds, 60.0)
    samples = len(request.tasks) * (request.limit or 1000)
    seconds["tasks"] = START + SUBJECTS * samples * CHOICES * one * 64 / usual
    first = next(iter(request.chosen))
    return {part: took + START * (part == first) for part, took in seconds.items() if part in request.chosen}


def needle_lengths(request: Request, usual: int, positions: int) -> tuple[int, ...]:
    """Say in texts of what lengths pairs will be hidden."""
    doubled = (usual // 2, usual, 2 * usual, 4 * usual)
    return request.lengths or tuple(length for length in doubled if SHORTEST <= length <= positions)


def pass_seconds(run: Run) -> float | None:
    """Say what one text of the run's own length took, in the mean over teacher, student and window."""
    begun = None
    for event in run.events():
        if run.mine(event) and event["event"] == "evaluate" and begun is None:
            begun = event["time"]
        elif run.mine(event) and event["event"] == "started":
            begun = None  # what was judged before a stop is judged again
        elif run.mine(event) and event["event"] == "evaluated" and begun is not None:
            return max(event["time"] - begun, 0.01) / JUDGED
    return None
