"""What is written is judged as the definitions say, and all write with the same prompts and the same noise."""

import math

import pytest
import torch
from transformers import set_seed

from linearizer.evaluate import generation
from linearizer.evaluate.generation import count_alike_tokens, judge_by_teacher, measure_generation, variety, write
from linearizer.evaluate.subjects import Subject, read_logits
from linearizer.progress import finish
from linearizer.teacher.logits import logits_of, losses_of
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of, tokens


@pytest.fixture(scope="module")
def subjects():
    teacher, student = teacher_of("llama"), student_of("llama")
    allocation = allocation_of(layers_of(teacher), MIXED, 2)
    return [Subject("teacher", teacher), Subject("student", student, allocation)]


def test_greedy_text_is_that_of_generate(subjects):
    prompts = tokens(2, 12)
    for subject in subjects:
        model = subject.model
        expected = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert torch.equal(write(subject, prompts, 8, None), expected[:, 12:])


def test_drawn_text_follows_the_chances(subjects):
    set_seed(0)
    prompts = tokens(1, 12).expand(4000, 12)
    drawn = write(subjects[0], prompts, 1, seed=5)[:, 0]
    chances = logits_of(subjects[0].model, prompts[:1])[0, -1].softmax(-1)
    shares = torch.bincount(drawn, minlength=128) / 4000
    assert (shares - chances).abs().max() < 4 * math.sqrt(0.25 / 4000)
    assert torch.equal(write(subjects[0], prompts[:1], 6, 1), write(subjects[0], prompts[:1], 6, 1))


def test_the_teacher_stays_on_its_path_and_scores_what_the_student_writes(subjects):
    prompts = tokens(3, 12)
    greedy, student, drawn, _ = finish(measure_generation(subjects, prompts, 8)).subjects
    assert (greedy.name, greedy.sampled, drawn.sampled) == ("teacher", False, True)
    assert greedy.diverged == drawn.diverged == (8, 8, 8)
    assert greedy.likeliest == 1 and drawn.likeliest < 1 and greedy.loss < drawn.loss
    expected, texts = (write(subject, prompts, 8, None) for subject in subjects)
    logits = logits_of(subjects[0].model, torch.cat([prompts, texts], 1))[:, 11:-1]
    assert student.loss == pytest.approx(losses_of(logits, texts).mean().item(), abs=1e-4)
    assert student.diverged == tuple(count_alike_tokens(a, b) for a, b in zip(texts, expected, strict=True))


def test_the_teacher_scores_as_many_texts_at_once_as_memory_allows(subjects, monkeypatch):
    prompts, texts, counts = tokens(5, 12), tokens(5, 8), []
    expected = judge_by_teacher(subjects[0], prompts, texts)

    def read(subject, ids, cache, keep):
        counts.append(len(ids))
        return read_logits(subject, ids, cache, keep)

    monkeypatch.setattr(generation, "read_logits", read)
    monkeypatch.setattr(generation, "logits_at_once", lambda model, kept: 18 // kept)
    assert judge_by_teacher(subjects[0], prompts, texts) == pytest.approx(expected, abs=1e-5)
    assert counts == [2, 2, 1]


def test_without_a_teacher_only_the_text_itself_is_judged(subjects):
    result = finish(measure_generation(subjects[1:], tokens(2, 12), 8)).subjects[0]
    assert result.loss is None and result.likeliest is None and result.diverged is None and 0 <= result.repeated <= 1


def test_variety_and_agreement_count_tokens():
    assert variety([1, 2, 3, 4], 2) == 1 and variety([1, 1, 1, 1], 1) == 0.25 and variety([1, 2, 1, 2], 2) == 2 / 3
    assert variety([1], 4) == 1
    assert count_alike_tokens(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])) == 2
    assert count_alike_tokens(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])) == 0
