"""The texts of a run are read once, and each step gets those that it may read."""

import torch

from linearizer.method.texts import TextsOfRun, choose_learnt, join_texts, min_texts, texts_to_learn, with_repeats
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.teacher import load
from linearizer.teacher.load import load_teacher_of
from tests.support.models import tokens


def test_no_step_reads_what_a_later_step_decides_or_judges_by(tmp_path, monkeypatch):
    plan, calls, read = Plan.of("features", model="demo", budget=64, texts=3, length=64, steps=2), [], load.read_texts
    run, teacher = Run.create(tmp_path / "run", plan), load_teacher_of(plan)
    monkeypatch.setattr(load, "read_texts", lambda *given, **named: calls.append(given) or read(*given, **named))
    texts = TextsOfRun.of(run, teacher, judged=2)
    assert TextsOfRun.of(run, teacher, judged=2).judged.equal(texts.judged) and len(calls) == 1
    assert texts.learnt.shape == (4, 64) and texts.judged.shape == (2, 64)
    (pair, odd), compared = texts.profiled, texts.compared[0]
    assert torch.equal(torch.cat([pair.flatten(), odd.flatten()]), texts.learnt[:3].flatten())
    assert torch.equal(compared, texts.learnt[1:3].flatten()), "the first text has the prices"
    earlier = torch.cat([texts.learnt, texts.priced])
    assert not (texts.judged[:, None] == earlier).all(-1).any()


def test_adapters_learn_from_texts_that_students_are_not_compared_on():
    plan, texts = Plan.of("distilled", model="demo", budget=8, texts=2, length=64, steps=3), tokens(6, 64)
    assert torch.equal(choose_learnt(texts[: texts_to_learn(plan)], plan), texts[[0, 3, 4]])


def test_texts_are_joined_in_pairs_with_one_start_token_and_none_is_lost():
    windows = tokens(3, 40)
    windows[:, 0] = 1  # the start token
    pair, odd = join_texts(windows, Plan("demo", budget=64, texts=3, length=40, sinks=2), 1, None)
    assert torch.equal(pair[0], torch.cat([windows[0], windows[1, 1:]])) and torch.equal(odd, windows[2:])
    (alone,) = join_texts(windows, Plan("demo", budget=64, texts=3, length=40, sinks=2), 1, positions=64)
    assert torch.equal(alone, windows)


def test_repeats_are_in_the_second_half_of_the_texts_and_the_same_for_a_seed():
    windows = torch.arange(4 * 64).view(4, 64)
    written = []

    def write_number(number):
        written.append([1000 + int(digit) for digit in str(number)])
        return written[-1]

    changed = with_repeats(windows, 8, 1, write_number)
    assert torch.equal(changed[:2], windows[:2]) and torch.equal(changed[:, 0], windows[:, 0])
    for text in changed[2:].tolist():
        assert len(set(text)) < 64
        begins = [text[place : place + 6] for place in range(0, 64, 8)]
        assert any(begins.count(number) == 2 for number in written)
    assert torch.equal(changed, with_repeats(windows, 8, 1, write_number))


def test_a_run_has_texts_for_a_batch_and_one_to_judge_by():
    assert min_texts(Plan.of("features", model="demo", budget=64, texts=2, batch=20)) == 21
