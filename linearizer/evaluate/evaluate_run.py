"""Measures a finished run, part by part. Each part is stored when it ends, so an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch

from linearizer.evaluate.generation import measure_generation
from linearizer.evaluate.language import measure_language
from linearizer.evaluate.recall import (
    MIN_NEEDLE_TOKENS,
    RepeatReader,
    check_needle_length,
    measure_needle,
    measure_recall,
    needle_lengths,
)
from linearizer.evaluate.speed import LENGTHS, measure_speed
from linearizer.evaluate.subjects import Setup, read_together
from linearizer.evaluate.tasks import LONG_TEXT, find_tasks, measure_long_text_tasks, measure_tasks
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.names import absolute_source
from linearizer.run.results import Part, Request, Result, Scored, Tasks, TextRead
from linearizer.run.stopping import log_progress
from linearizer.teacher.logits import drawn_places
from linearizer.teacher.text import document_numbers, start_tokens

JUDGING = Request(("language", "recall"))  # for a student that has just been made
FEWEST_PAIRS = 4  # of texts that are joined: fewer texts hardly ever show a difference
MAX_WRITTEN_TOKENS = 96
Measured = tuple[Result, torch.Tensor | None]  # and the texts that were read; None: the part reads no source


def measure_parts(
    setup: Setup, request: Request, measure_again: tuple[str, ...] = (), step: str | None = None
) -> Steps[dict[str, Part]]:
    """Measure and store the parts of a request, unless they are stored for the same request; return all parts.

    `measure_again` names parts that are measured even if stored; `step` is the step of a run that the parts belong to.
    """
    # so that a text of the same name in another folder is another text
    request = replace(request, text=request.text and absolute_source(request.text))
    run, parts = setup.run, parts_to_measure(setup, request)
    check_request(setup, request, parts)
    for place, name in enumerate(parts, 1):
        measure, uses = PART_MEASURES[name]
        fields = {field: getattr(request, field) for field in uses}
        fields = json.loads(json.dumps(fields))  # as it is stored: a tuple becomes a list
        made_with, stored = setup.made_with(), run.results.get(name)
        if stored is not None and (stored.asked, stored.made_with) == (fields, made_with) and name not in measure_again:
            continue
        details = {"part": name, "place": place, "parts": len(parts)}
        # without patience: a part is stored completely or not at all
        steps = log_progress(run, measure(setup, request), 0.0, step, **details)
        result, windows = yield from steps
        read = None if windows is None else text_read(setup, request, windows)
        measured = Part(fields, made_with, result, read)
        run.write_evaluation(parts={**run.evaluation_parts, name: measured.to_plain()})
        if step is None:
            run.log(EventName.EXAMINED, part=name)
    return run.results


def judge(setup: Setup) -> Steps[None]:
    """Measure a student that has just been made on texts that were excluded from its training."""
    setup.run.write_evaluation(parts={})
    setup.ranks.hear((EventName.EVALUATE,))
    parts = yield from measure_parts(setup, JUDGING, step="evaluate")
    losses = {subject.name: subject.loss.mean for subject in parts["language"].result.subjects}
    setup.run.log(EventName.EVALUATED, **losses)


def judge_share(setup: Setup) -> Steps[Measured]:
    """Read a rank's share of the texts that `judge` reads."""
    return measure_language_part(setup, JUDGING)


def parts_to_measure(setup: Setup, request: Request) -> tuple[str, ...]:
    """List the parts of a request, without pairs that nobody named if the teacher reads no text long enough."""
    if request.parts or setup.run.positions >= MIN_NEEDLE_TOKENS:
        return request.chosen
    return tuple(part for part in request.chosen if part != "needle")


def check_request(setup: Setup, request: Request, parts: tuple[str, ...]) -> None:
    """Refuse a request that cannot be served before anything is measured."""
    for length in (*request.lengths, request.length or 0):
        setup.beyond(length)
    if "needle" in parts:
        check_needle_length(min(lengths_of_needle(setup, request)))
    if (harness := tasks_of_harness(request)) and parts != ("tasks",):  # the part itself looks for them first
        find_tasks(harness, request.task_folder)


def measure_language_part(setup: Setup, request: Request) -> Steps[Measured]:
    """Read each text once: scores of repeated passages are stored for the part recall."""
    windows, length = texts_to_judge(setup, request)
    longest = windows.shape[1]
    lengths = sorted({max(2, length // 4), length, longest})
    subjects = setup.subjects(longest)
    grows = setup.allocation.growth(setup.layers) > 0
    controls = {tokens: setup.window(tokens) for tokens in lengths if grows and tokens < longest}
    reader = RepeatReader([*subjects, *controls.values()], length, passage_tokens(length))
    read = reader.read if "recall" in request.chosen else read_together
    texts = (windows, document_numbers(windows, setup.tokenizer), setup.layers)
    language = yield from measure_language(subjects, *texts, read, lengths, controls, setup.ranks)
    if read is not read_together:
        reader.gather(setup.ranks)
        recall = reader.result()
        setup.recall_read.append(replace(recall, subjects=recall.subjects[: len(subjects)]))
    return language, windows


def measure_recall_part(setup: Setup, request: Request) -> Steps[Measured]:
    """Repeat passages within texts, unless the language part has already done so on the same texts."""
    windows, length = texts_to_judge(setup, request)
    if setup.recall_read:
        yield Progress("recall", 1, 1, "batches")
        return setup.recall_read.pop(), windows[:, :length]
    subjects, begun = setup.subjects(windows.shape[1]), windows[:, :length]
    places = drawn_places(windows.shape[1] - 1)  # as the language part reads them
    return (yield from measure_recall(subjects, begun, passage_tokens(length), (), places[places < length])), begun


def texts_to_judge(setup: Setup, request: Request) -> tuple[torch.Tensor, int]:
    """Take the texts of a request, and their length; if it names none, join them in pairs as far as positions reach.

    So a student is judged at a quarter of its texts' length, at the length, and at twice the length.
    """
    windows = request_texts(setup, request)
    return windows if request.length else join_pairs(setup, request, windows), windows.shape[1]


def join_pairs(setup: Setup, request: Request, windows: torch.Tensor) -> torch.Tensor:
    """Join texts that follow each other, two at a time, unless they are few or the model has too few positions."""
    start = len(start_tokens(setup.tokenizer))
    pairs, joined = len(windows) // 2, 2 * windows.shape[1] - start
    # texts that a model writes do not continue each other
    if pairs < FEWEST_PAIRS or joined > setup.run.positions or (request.text or setup.run.plan.text) == "self":
        return windows
    return torch.cat([windows[: 2 * pairs : 2], windows[1 : 2 * pairs : 2, start:]], 1)


def passage_tokens(length: int) -> int:
    """Choose the length of the passages that are repeated in texts of a length."""
    return max(2, length // 16)


def lengths_of_needle(setup: Setup, request: Request) -> tuple[int, ...]:
    return request.lengths or needle_lengths(setup.usual_length, setup.run.positions)


def measure_needle_part(setup: Setup, request: Request) -> Steps[Measured]:
    lengths = lengths_of_needle(setup, request)
    windows = setup.windows(request.text, max(lengths), max(1, request.texts // 2), request.seed)
    arguments = setup.subjects(max(lengths)), windows, lengths, setup.run.positions, request.seed
    return (yield from measure_needle(*arguments)), windows


def measure_generation_part(setup: Setup, request: Request) -> Steps[Measured]:
    """Continue the first half of each text by the same number of tokens."""
    windows = request_texts(setup, request)
    prompt = min(windows.shape[1] // 2, MAX_WRITTEN_TOKENS)
    subjects = setup.subjects(2 * prompt - 1)  # the last token is written, but not read
    return (yield from measure_generation(subjects, windows[:, :prompt], prompt, request.seed)), windows


def measure_speed_part(setup: Setup, request: Request) -> Steps[Measured]:
    """Read and write random tokens, up to the end of learned positions."""
    lengths = request.lengths or LENGTHS
    if setup.run.inspection.positions == "learned" and not request.lengths:  # named lengths were checked
        positions = setup.run.positions
        lengths = tuple(sorted({*(length for length in lengths if length <= positions), positions}))
    limits = lengths, setup.run.positions, request.seconds, request.seed
    return (yield from measure_speed(setup.subjects(setup.usual_length), setup.layers, *limits)), None


def measure_tasks_part(setup: Setup, request: Request) -> Steps[Measured]:
    """Let all subjects do tasks of the harness, and tasks that are generated here from the run's text."""
    subjects, scored = setup.subjects(setup.usual_length), []
    if harness := tasks_of_harness(request):
        options = (harness, request.limit, request.few_shot, request.task_folder, request.seed)
        scored = list((yield from measure_tasks(subjects, setup.tokenizer, *options)).subjects)
    if LONG_TEXT in request.tasks:
        lengths = request.lengths or (setup.usual_length,)
        windows = setup.windows(request.text, max(lengths), request.texts, request.seed)
        asked = (windows, lengths, request.limit, request.seed)
        generated = yield from measure_long_text_tasks(subjects, setup.tokenizer, *asked)
        pairs = zip(scored or [Scored(subject.name, (), None) for subject in subjects], generated, strict=True)
        scored = [replace(first, scores=(*first.scores, *second.scores)) for first, second in pairs]
    return Tasks(request.tasks, request.limit, request.few_shot, tuple(scored)), None


def tasks_of_harness(request: Request) -> tuple[str, ...]:
    """List the tasks that are not generated here."""
    return tuple(task for task in request.tasks if task != LONG_TEXT)


def request_texts(setup: Setup, request: Request) -> torch.Tensor:  # (texts, tokens)
    """Take the texts of a request."""
    return setup.windows(request.text, request.length or setup.usual_length, request.texts, request.seed)


def text_read(setup: Setup, request: Request, windows: torch.Tensor) -> TextRead:
    """Describe the texts that a part reads."""
    count, length = windows.shape
    return TextRead(request.text or setup.run.plan.text, count, length, request.seed, setup.beyond(length))


ON_TEXT = ("text", "length", "texts", "seed")
# the function that measures a part, and the fields of a request that it depends on
PART_MEASURES: dict[str, tuple[Callable[[Setup, Request], Steps[Measured]], tuple[str, ...]]] = {
    "language": (measure_language_part, ON_TEXT),
    "recall": (measure_recall_part, ON_TEXT),
    "needle": (measure_needle_part, ("text", "texts", "seed", "lengths")),
    "generation": (measure_generation_part, ON_TEXT),
    "speed": (measure_speed_part, ("lengths", "seconds", "seed")),
    "tasks": (measure_tasks_part, ("tasks", "limit", "few_shot", "task_folder", "seed", "text", "texts", "lengths")),
}
