"""Tasks of the harness are scored alike for all, offline from a folder, and as the logits say."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from linearizer.errors import RequestError
from linearizer.evaluate.subjects import Subject
from linearizer.evaluate.tasks import collect_scores, find_tasks, measure_tasks
from linearizer.method import checkpoint
from linearizer.progress import finish
from linearizer.teacher.logits import logits_of
from tests.support.models import MIXED, allocation_of, layers_of, teacher_of

pytestmark = pytest.mark.filterwarnings("ignore")  # lm_eval's own imports warn
FOLDER = Path(__file__).parents[1] / "support" / "tasks"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The task says where its data is, seen from here."""
    monkeypatch.chdir(FOLDER.parents[2])


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """Let lm_eval read all tasks of its own, thousands of files, only once; it is imported by these tests alone."""
    pytest.importorskip("lm_eval.models.huggingface", reason="tasks are an extra")
    from lm_eval import tasks

    manager, tasks.TaskManager = tasks.TaskManager, cache(tasks.TaskManager)
    yield
    tasks.TaskManager = manager


@pytest.fixture(scope="module")
def subjects():
    teacher = teacher_of("llama", vocab_size=4096)
    layers = layers_of(teacher)
    allocation = allocation_of(layers, MIXED, 2)
    student = checkpoint.put_student_into(teacher_of("llama", vocab_size=4096), layers, allocation)
    return [Subject("teacher", teacher), Subject("student", student, allocation)]


def accuracy(model, tokenizer, samples):
    """How often the right answer has the larger chance, each read by itself."""
    right = 0
    for sample in samples:
        context = tokenizer(f"Question: {sample['question']}\nAnswer:")["input_ids"]
        chances = []
        for choice in sample["choices"]:
            ids = tokenizer(f"Question: {sample['question']}\nAnswer: {choice}")["input_ids"]
            logs = logits_of(model, torch.tensor([ids]))[0].log_softmax(-1)
            chances.append(sum(logs[place - 1, ids[place]].item() for place in range(len(context), len(ids))))
        right += chances.index(max(chances)) == sample["answer"]
    return right / len(samples)


def test_scores_are_those_of_the_logits_padding_and_batches_or_not(subjects, tokenizer):
    samples = [json.loads(line) for line in (FOLDER / "colours.jsonl").read_text().splitlines()]
    padding = tokenizer.padding_side
    result = finish(measure_tasks(subjects, tokenizer, ["colours", "colour_words"], folder=str(FOLDER), batch=5))
    assert [scored.name for scored in result.subjects] == ["teacher", "student"]
    for subject, scored in zip(subjects, result.subjects, strict=True):
        assert [(score.task, score.metric, score.samples) for score in scored.scores] == [
            ("colours", "acc", 12),
            ("colours", "acc_norm", 12),
            ("colour_words", "exact_match", 12),
        ]
        assert scored.accuracy == scored.scores[0].value
        assert scored.accuracy == pytest.approx(accuracy(subject.model, tokenizer, samples))
    assert tokenizer.padding_side == padding
    options = {"names": ["colours"], "folder": str(FOLDER), "limit": 5, "few_shot": 2, "seed": -1}
    small = finish(measure_tasks(subjects[1:], tokenizer, **options))
    assert small.subjects[0].scores[0].samples == 5 and (small.limit, small.few_shot) == (5, 2)


def test_tasks_that_cannot_be_had_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="there is no task 'colors': did you mean .*colours"):
        find_tasks(["colours", "colors"], str(FOLDER))
    with pytest.raises(RequestError, match="lists all tasks"):
        find_tasks(["#"], str(FOLDER))
    (tmp_path / "far.yaml").write_text((FOLDER / "colours.yaml").read_text().replace("tests/support/tasks/", "absent/"))
    with pytest.raises(RequestError, match="the data of colours cannot be loaded .*--task-folder"):
        find_tasks(["colours"], str(tmp_path))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(RequestError, match=r"not installed here: pip install 'linearizer\[tasks\]'"):
        find_tasks(["colours"], str(FOLDER))


def test_of_a_tag_its_tasks_are_read_and_names_are_kept():
    row = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,strict": 0.25, "sample_len": 4}
    results = {"results": {"a": row, "b": {**row, "acc,none": 1.0}}, "group_subtasks": {"both": ["a", "b"]}}
    result = collect_scores("student", results, ["both"])
    assert [(s.task, s.metric, s.value, s.error) for s in result.scores][:2] == [
        ("a", "acc", 0.5, None),
        ("a", "f1 (strict)", 0.25, None),
    ]
    assert result.accuracy == 0.75 and collect_scores("x", {"results": {"a": {"f1,x": 1}}}, ["a"]).accuracy is None
