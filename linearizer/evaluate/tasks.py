"""Scores on tasks of lm_eval, the harness that published figures come from: all go through its own code alike."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from linearizer.errors import RequestError, first_line
from linearizer.evaluate.subjects import Subject
from linearizer.progress import Progress, Steps
from linearizer.run.results import Score, Scored, Tasks

DRAWN = 1000  # times that results are drawn again, for the errors of metrics that are no means
INSTALL = "pip install 'linearizer[tasks]'"


def measure_tasks(
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    limit: int | None = None,
    few_shot: int | None = None,
    folder: Path | None = None,
    seed: int = 0,
    batch: int = 8,
) -> Steps[Tasks]:
    """Let all subjects do the same tasks; a folder may hold tasks of the user."""
    manager = find_tasks(names, folder)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    scores = []
    for done, subject in enumerate(subjects):
        yield Progress("tasks", done, len(subjects), "models")
        with subject.at_work() as model, silent():
            results = lm_eval.simple_evaluate(
                HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), backend="causal", batch_size=batch),
                tasks=list(names),
                task_manager=manager,
                num_fewshot=few_shot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=DRAWN,
                **dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed),
            )
        scores.append(collect_scores(subject.name, results, names))
    yield Progress("tasks", len(subjects), len(subjects), "models")
    return Tasks(tuple(names), limit, few_shot, tuple(scores))


def find_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """Return lm_eval's manager of tasks; load the named tasks once, so that missing data is known before measuring."""
    if folder is not None and not folder.is_dir():
        raise RequestError(f"--task-folder {str(folder)!r} is not a folder: name one that holds tasks as YAML files")
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise RequestError(f"tasks need lm_eval, which is not installed here: {INSTALL}") from error
    with silent():
        manager = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
        if manager is None or not set(names) <= set(manager.all_tasks):  # reading all of its own takes seconds
            manager = TaskManager(include_path=None if folder is None else str(folder))
    known = manager.all_tasks
    for name in names:
        if name not in known:
            near = " or ".join(get_close_matches(name, known, 3))
            advice = f"did you mean {near}?" if near else "`lm-eval ls tasks` lists those that there are"
            raise RequestError(f"there is no task {name!r}: {advice}")
    try:
        with silent():
            get_task_dict(list(names), manager)
    except Exception as error:  # each task loads its data in its own way, with errors of many types
        raise RequestError(
            f"the data of {', '.join(names)} cannot be loaded ({first_line(error)}): connect, or name a folder with "
            "tasks and data of your own with --task-folder"
        ) from error
    return manager


def collect_scores(name: str, results: Mapping[str, Any], names: Sequence[str]) -> Scored:
    """Read the scores of the tasks that were asked for; a tag stands for its tasks."""
    members = results.get("group_subtasks", {})
    tasks = [own for task in names for own in ([task] if task in results["results"] else members.get(task, []))]
    scores = []
    for task in tasks:
        row = results["results"][task]
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = row.get(f"{metric}_stderr,{kind}")
                known = isinstance(error, (int, float)) and math.isfinite(error)
                label = metric if kind == "none" else f"{metric} ({kind})"
                samples = int(row.get("sample_len", 0) or 0)
                scores.append(Score(task, label, float(value), float(error) if known else None, samples))
    accuracies = [score.value for score in scores if score.metric == "acc"]
    return Scored(name, tuple(scores), math.fsum(accuracies) / len(accuracies) if accuracies else None)


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the output of the harness: errors are raised, and results are returned."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
