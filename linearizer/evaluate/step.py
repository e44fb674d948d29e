"""Measures a finished run, part by part; each part is kept as it is done, so that an interrupted one goes on there."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from linearizer.errors import TextError
from linearizer.evaluate.generation import measure_generation
from linearizer.evaluate.head_errors import measure_approximation, measure_curve
from linearizer.evaluate.language import measure_language
from linearizer.evaluate.needle import LEAST, measure_needle
from linearizer.evaluate.recall import measure_longer, measure_recall
from linearizer.evaluate.setup import Bench
from linearizer.evaluate.speed import LENGTHS, measure_speed
from linearizer.evaluate.subjects import Subject
from linearizer.evaluate.tasks import find_tasks, measure_tasks
from linearizer.model.samples import SAMPLES
from linearizer.model.text import document_numbers
from linearizer.progress import Steps
from linearizer.run.evaluation_request import Request
from linearizer.run.folder import Run
from linearizer.run.stopping import interruptible, logged
from linearizer.train.distill import distill
from linearizer.train.settings import training_settings

JUDGING = Request(("language", "recall"))  # of a student that has just been made
WRITTEN = 96  # tokens at most
LOOKED_AT = 2  # texts whose attention is compared, head by head
FEATURES = (8, 16, 32, 64, 128, 256)  # of the curve of errors
Found = dict[str, Any]  # of one part, as it is stored: numbers, strings, lists and dicts


def measure_parts(
    run: Run, bench: Bench, request: Request, anew: tuple[str, ...] = (), step: str | None = None
) -> Steps[dict[str, Found]]:
    """Measure the parts that were asked for, but for those that are there as they were asked; give all of them.

    `anew` names parts that are measured even so; `step` is the step of a run that these are parts of.
    """
    check_request(bench, request)
    for place, part in enumerate(request.chosen, 1):
        if part == "needle" and not request.parts and bench.run.positions < LEAST:
            continue  # nobody named it, and pairs do not fit into what this teacher reads
        measure, uses = PARTS[part]
        asked = {name: getattr(request, name) for name in uses}
        asked |= {"subjects": bench.names, "made_with": bench.made_with()}
        asked = json.loads(json.dumps(asked))  # as it is stored: a tuple becomes a list
        there = run.evaluation_parts.get(part)
        if there is not None and there["asked"] == asked and part not in anew:
            continue
        at = {"part": part, "place": place, "parts": len(request.chosen)}
        found = yield from logged(run, at_once(run, measure(bench, request), at, step))
        run.keep_found(parts={**run.evaluation_parts, part: {"asked": asked, **found}})
        if step is None:
            run.log("examined", part=part)
    return run.evaluation_parts


def judge(run: Run, bench: Bench) -> Steps[None]:
    """Measure a student that has just been made on texts that were kept from its training."""
    run.keep_found(parts={})
    parts = yield from measure_parts(run, bench, JUDGING, step="evaluate")
    run.log("evaluated", **{one["name"]: one["loss"]["mean"] for one in parts["language"]["subjects"]})


def check_request(bench: Bench, request: Request) -> None:
    """Refuse what cannot be served before anything takes its time."""
    for length in (*request.lengths, request.length or 0):
        bench.beyond(length)
    if request.tasks and request.chosen != ("tasks",):  # which are looked for when they begin
        find_tasks(request.tasks, None if request.task_folder is None else Path(request.task_folder))


def at_once(run: Run, steps: Steps[Found], at: Found, step: str | None) -> Steps[Found]:
    """Let a request to stop end a part where it is, for it is kept whole or not at all; say `at` which part it is."""
    with closing(steps):
        while True:
            try:
                with interruptible(run):
                    progress = next(steps)
            except StopIteration as end:
                return end.value
            yield replace(progress, step=step or progress.step, details={**progress.details, **at})


def look_at_language(bench: Bench, request: Request) -> Steps[Found]:
    length = request.length or bench.usual_length
    beyond = bench.beyond(length)
    windows = bench.windows(request.text, length, request.texts, request.seed)
    documents = document_numbers(windows, bench.tokenizer)
    found = yield from measure_language(bench.subjects(length), windows, documents, bench.layers, request.seed)
    return {**of_text(bench, request, windows), "extrapolated": beyond, **asdict(found)}


def look_at_recall(bench: Bench, request: Request) -> Steps[Found]:
    """Passages that come again within the asked length; and twice the training's length, if positions reach there."""
    length = request.length or bench.usual_length
    beyond = bench.beyond(length)
    windows = bench.windows(request.text, length, request.texts, request.seed)
    passages = yield from measure_recall(bench.subjects(length), windows, max(2, length // 16))
    found = {**of_text(bench, request, windows), "extrapolated": beyond, **asdict(passages), "longer": None}
    trained, positions = bench.usual_length, bench.run.positions
    long = max(length, 2 * trained)
    if long > positions and bench.run.inspection["positions"] == "learned":
        return found
    try:
        windows = bench.windows(request.text, long, max(1, request.texts * length // long), request.seed)
    except TextError:  # no text that long is left
        return found
    longer = yield from measure_longer(bench.subjects(long), windows, trained, positions)
    return found if longer is None else {**found, "longer": {"texts": len(windows), **asdict(longer)}}


def look_for_needles(bench: Bench, request: Request) -> Steps[Found]:
    lengths = request.lengths or needle_lengths(bench.usual_length, bench.run.positions)
    texts = max(1, request.texts // 2)
    windows = bench.windows(request.text, max(lengths), texts, request.seed)
    subjects = bench.subjects(max(lengths))
    found = yield from measure_needle(subjects, windows, lengths, bench.run.positions, request.seed)
    return {**of_text(bench, request, windows), **asdict(found)}


def look_at_generation(bench: Bench, request: Request) -> Steps[Found]:
    """Each text's first part is the prompt, as long as what is written."""
    length = request.length or bench.usual_length
    bench.beyond(length)
    windows = bench.windows(request.text, length, request.texts, request.seed)
    prompt = min(length // 2, WRITTEN)
    found = yield from measure_generation(bench.subjects(length), windows[:, :prompt], prompt, request.seed)
    return {**of_text(bench, request, windows), **asdict(found)}


def look_at_approximation(bench: Bench, request: Request) -> Steps[Found]:
    """Every head as it is and as it was before its training; and the error as a function of the features."""
    length = request.length or bench.usual_length
    bench.beyond(length)
    windows = bench.windows(request.text, length, min(request.texts, LOOKED_AT), request.seed)
    profile = bench.run.profile
    assert profile is not None, "a finished run has one"
    teacher = bench.student.base if bench.teacher is None else bench.teacher
    students = [subject for subject in bench.subjects(length) if subject.allocation is not None]
    found = yield from measure_approximation(teacher, students, windows, profile)
    curve = None
    if bench.run.has(SAMPLES):  # without them features begin nowhere
        plain = yield from plain_students(bench, request.curve_steps)
        curve = asdict((yield from measure_curve(teacher, plain, FEATURES, windows, profile)))
    return {**of_text(bench, request, windows), **asdict(found), "curve": curve}


def plain_students(bench: Bench, steps: int) -> Steps[dict[str, list[Subject]]]:
    """Students that have nothing but features, for every number of them: untrained, and trained if that is asked."""
    found = {"untrained": [bench.plain(count) for count in FEATURES]}
    if steps:
        found["trained"] = [bench.plain(count) for count in FEATURES]
        plan = bench.run.plan
        texts = bench.learnt(steps * plan.batch)
        # without adapters: the weights are the teacher's, in memory once
        settings = replace(training_settings(plan)[0], steps=steps, lora=0)
        for subject in found["trained"]:
            with subject.at_work():
                yield from distill(bench.control, texts, settings)
    return found


def look_at_speed(bench: Bench, request: Request) -> Steps[Found]:
    """Of random tokens; as far as learned positions reach."""
    lengths = request.lengths or LENGTHS
    if bench.run.inspection["positions"] == "learned":
        reached = [length for length in lengths if length <= bench.run.positions]
        lengths = tuple(sorted({*reached, bench.run.positions})) if not request.lengths else tuple(reached)
    # an untrained student is as fast as the trained one
    subjects = [subject for subject in bench.subjects(bench.usual_length) if subject.name != "untrained"]
    found = yield from measure_speed(
        subjects, bench.layers, lengths, bench.run.positions, request.seconds, request.seed
    )
    return asdict(found)


def look_at_tasks(bench: Bench, request: Request) -> Steps[Found]:
    folder = None if request.task_folder is None else Path(request.task_folder)
    asked = (request.tasks, request.limit, request.few_shot, folder, request.seed)
    found = yield from measure_tasks(bench.subjects(bench.usual_length), bench.tokenizer, *asked)
    return asdict(found)


def needle_lengths(usual: int, most: int) -> tuple[int, ...]:
    """Half the length of the training's texts, that, and what of its doubles positions allow."""
    lengths = [length for length in (usual // 2, usual, 2 * usual, 4 * usual) if LEAST <= length <= most]
    return tuple(lengths) or (min(LEAST, most),)


def of_text(bench: Bench, request: Request, windows: Any) -> Found:
    """Say what text was read."""
    source = request.text or bench.run.plan.text
    return {"text": source, "texts": windows.shape[0], "length": windows.shape[1], "seed": request.seed}


ON_TEXT = ("text", "length", "texts", "seed")
PARTS: dict[str, tuple[Callable[[Bench, Request], Steps[Found]], tuple[str, ...]]] = {
    # how each is measured, and what of a request it depends on
    "language": (look_at_language, ON_TEXT),
    "recall": (look_at_recall, ON_TEXT),
    "needle": (look_for_needles, ("text", "texts", "seed", "lengths")),
    "generation": (look_at_generation, ON_TEXT),
    "approximation": (look_at_approximation, (*ON_TEXT, "curve_steps")),
    "speed": (look_at_speed, ("lengths", "seconds", "seed")),
    "tasks": (look_at_tasks, ("tasks", "limit", "few_shot", "task_folder", "seed")),
}
