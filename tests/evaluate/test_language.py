"""Predictions are scored as their definitions say, all on the same tokens, with their spread over documents."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from scipy import stats

from linearizer.evaluate.evaluate_run import passage_tokens
from linearizer.evaluate.language import (
    Units,
    calibration_error,
    compare_at,
    measure_language,
    owners_of,
    read_scores,
    student_t,
)
from linearizer.evaluate.recall import RepeatReader, measure_recall
from linearizer.evaluate.subjects import Subject, read_together
from linearizer.method.checkpoint import make_layer_students
from linearizer.plan.allocation import window_control
from linearizer.plan.head_bytes import Head, cache_bytes
from linearizer.progress import finish
from linearizer.teacher import logits
from linearizer.teacher.logits import drawn_places, kl_of, logits_of, losses_of
from linearizer.workers.forecast import JUDGED_SHARE
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of, tokens


@pytest.fixture(scope="module")
def subjects():
    """A teacher, its student, and a plain window of the student's bytes."""
    teacher, student = teacher_of("llama"), student_of("llama")
    layers = layers_of(teacher)
    allocation = allocation_of(layers, MIXED, 2)
    control = window_control(allocation, layers, 40)
    return [
        Subject("teacher", teacher),
        Subject("student", student, allocation),
        Subject("window", student, control, make_layer_students(student, layers, control)),
    ], layers


def measured(subjects, ids, documents=None):
    result, layers = subjects
    documents = torch.zeros_like(ids) if documents is None else documents
    return finish(measure_language(result, ids, documents, layers))


def test_loss_divergence_and_agreement_are_those_of_the_logits(subjects):
    ids = tokens(4, 40)
    result = measured(subjects, ids)
    teacher, student = (logits_of(subject.model, ids) for subject in subjects[0][:2])
    scores = result.subjects[1]
    assert scores.loss.mean == pytest.approx(losses_of(student[:, :-1], ids[:, 1:]).mean().item(), abs=1e-5)
    assert scores.kl.mean == pytest.approx(kl_of(teacher, student)[:, :-1].mean().item(), abs=1e-5)
    agreement = (teacher.argmax(-1) == student.argmax(-1))[:, :-1].float().mean().item()
    assert scores.agreement.mean == pytest.approx(agreement, abs=1e-6)
    kl = kl_of(teacher, student)[:, :-1].double().flatten().sort().values
    assert [scores.tail.kl_99, scores.tail.kl_999] == pytest.approx([kl[153].item(), kl[154].item()], abs=1e-5)
    actual, expected = ((-losses_of(x[:, :-1], ids[:, 1:])).exp() for x in (student, teacher))
    assert scores.tail.probability_change == pytest.approx((actual - expected).square().mean().sqrt().item(), abs=1e-6)
    first = result.subjects[0]  # a teacher is its own equal
    assert scores.excess.mean == pytest.approx(scores.loss.mean - first.loss.mean, abs=1e-6)
    assert first.kl.mean == pytest.approx(0, abs=1e-9) and first.excess.interval == (0, 0)
    assert first.tail.kl_999 == pytest.approx(0, abs=1e-9) and first.tail.probability_change == 0
    assert first.agreement.mean == 1 and first.state_bytes == cache_bytes(subjects[1], 40)
    assert measured(subjects, ids) == result, "the same call gives the same numbers"


def test_the_beginning_of_a_text_is_scored_as_a_text_that_ends_there(subjects):
    all_subjects, layers = subjects
    ids = tokens(4, 40)
    chosen = [all_subjects[0], all_subjects[1], Subject("window", *fixed_window(all_subjects[1].model, layers))]
    reader = RepeatReader(chosen, 20, 5)
    documents = torch.zeros_like(ids)
    language = finish(measure_language(chosen, ids, documents, layers, reader.read, (10, 20, 40)))
    assert [result.length for result in language.lengths] == [10, 20, 40]
    for result in language.lengths:
        short = measured((chosen, layers), ids[:, : result.length])
        for subject, alone in zip(result.subjects, short.subjects, strict=True):
            for name in ("loss", "kl", "agreement"):
                of_beginning, of_text = getattr(subject, name), getattr(alone, name)
                assert of_beginning.mean == pytest.approx(of_text.mean, abs=1e-5), (result.length, subject.name, name)
                assert of_beginning.interval == pytest.approx(of_text.interval, abs=1e-5)
    again = finish(measure_recall(chosen, ids[:, :20], 5))
    for subject, expected in zip(reader.result().subjects, again.subjects, strict=True):
        assert subject.second == pytest.approx(expected.second, abs=1e-4)


@contextmanager
def tokens_read(model):
    """Count the tokens that a model reads while the context lasts."""
    counted = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _, args: counted.append(args[0].numel()))
    yield counted
    hook.remove()


def fixed_window(model, layers):
    """A plain window of six tokens in place of the heads of a student."""
    allocation = allocation_of(layers, [Head(window=6)], 2)
    return model, allocation, make_layer_students(model, layers, allocation)


def test_student_and_window_are_compared_by_the_same_texts_and_few_texts_say_little(subjects):
    all_subjects, layers = subjects
    chosen = [all_subjects[0], all_subjects[1], Subject("window", *fixed_window(all_subjects[1].model, layers))]

    def compared(ids):
        return finish(measure_language(chosen, ids, torch.zeros_like(ids), layers, lengths=(ids.shape[1],))).lengths[0]

    def difference(result):
        named = {each.name: each for each in result.subjects}
        return named["student"].kl.mean - named["window"].kl.mean

    result = compared(tokens(8, 40))
    named = {each.name: each.kl.interval for each in result.subjects}
    low, high = result.difference.interval
    assert result.difference.mean == pytest.approx(difference(result)) and low < difference(result) < high
    assert high - low < sum(b - a for a, b in (named["student"], named["window"]))
    assert (result.drawn, result.count, result.window, result.strained) == ("texts", 8, 8, False)
    two_texts = compared(ids := tokens(2, 40)).difference
    first, second = (compared(text) for text in ids.split(1))
    assert first.difference is second.difference is None
    assert two_texts.interval[1] - two_texts.interval[0] > 8 * abs(difference(first) - difference(second))
    expected = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 30: 2.042}
    assert {freedoms: student_t(freedoms) for freedoms in expected} == pytest.approx(expected, rel=0.02)
    chosen[2] = Subject("window", all_subjects[1].model, all_subjects[1].allocation)  # a student beside itself
    assert (equal := compared(ids).difference).mean == 0 and equal.interval == (0, 0)


def test_positions_that_the_teacher_is_sure_of_and_the_student_misses_are_counted(subjects):
    all_subjects, layers = subjects
    ids = tokens(4, 40)
    scores = read_scores(all_subjects, ids)
    sure = (torch.arange(39) % 4 == 0).expand(4, -1)
    teacher = scores[0]._replace(loss=torch.where(sure, 0.09, 0.11).double())
    student = scores[1]._replace(loss=torch.where(torch.arange(39) < 16, 1.1, 0.9).expand(4, -1).double())
    scored = list(zip(all_subjects, (teacher, student, scores[2]), strict=True))
    rows = compare_at(21, 1, scored, torch.zeros_like(ids), torch.arange(39)).subjects
    assert [rows[0].catastrophic, rows[1].catastrophic] == [0, 4 / 20]
    alone = compare_at(21, 1, scored[1:], torch.zeros_like(ids), torch.arange(39)).subjects
    assert [row.catastrophic for row in alone] == [None, None]


def test_where_the_state_grows_each_length_has_a_window_of_its_own(subjects):
    trio, layers = subjects
    control = window_control(trio[1].allocation, layers, 10)
    window = Subject("window", trio[1].model, control, make_layer_students(trio[1].model, layers, control))
    ids = tokens(3, 40)
    arguments = (trio, ids, torch.zeros_like(ids), layers, read_together, (10, 40), {10: window})
    result = finish(measure_language(*arguments))
    assert len(result.subjects) == 3 and [each.window for each in result.lengths] == [
        window.allocation.longest_exact,
        trio[2].allocation.longest_exact,
    ]
    short = measured(([trio[0], trio[1], window], layers), ids[:, :10]).subjects[2]
    assert result.lengths[0].subjects[2].kl.mean == pytest.approx(short.kl.mean, abs=1e-5)


def test_a_teacher_that_predicts_worse_than_a_window_is_strained_from_there_on(subjects):
    all_subjects, layers = subjects
    ids = tokens(4, 40)
    scores = dict(zip(("teacher", "student", "window"), read_scores(all_subjects, ids), strict=True))
    is_late = torch.arange(39) >= 19

    def strain(loss):
        teacher = scores["teacher"]._replace(loss=scores["window"].loss + loss * is_late)
        scored = [(subject, scores[subject.name]) for subject in all_subjects[1:]]
        scored = [(all_subjects[0], teacher), *scored]
        given = scored, torch.zeros_like(ids), torch.arange(39)
        return [compare_at(at, before, *given).strained for before, at in ((1, 20), (20, 40))]

    assert strain(0.2) == [False, True] and strain(-0.2) == strain(0.01) == [False, False]


def test_texts_read_in_pieces_are_scored_as_in_one(subjects, monkeypatch):
    ids = tokens(2, 40)
    expected = read_scores(subjects[0], ids)
    monkeypatch.setattr(logits, "MAX_LOGITS", 2 * 9 * 128)  # nine tokens at a time
    assert len(list(read_together(subjects[0], ids, torch.arange(39)))) == 5
    for before, after in zip(expected, read_scores(subjects[0], ids), strict=True):
        for earlier, later in zip(before, after, strict=True):
            assert torch.allclose(earlier, later, atol=1e-4)


@contextmanager
def logits_computed(model):
    """Count the rows of logits that a model computes while the context lasts."""
    counted = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: counted.append(args[0][..., 0]))
    yield counted
    hook.remove()


def test_long_texts_are_judged_at_drawn_places_and_logits_are_computed_there_alone(subjects, monkeypatch):
    monkeypatch.setattr(logits, "FEWEST_PLACES", 13)
    ids, reader = tokens(3, 80), RepeatReader(subjects[0], 40, 10)
    places = drawn_places(79)
    assert len(places) == 14 and (places // 6).tolist() == [*range(14)], "one of every six"
    expected = read_scores(subjects[0], ids)
    with logits_computed(subjects[0][0].model) as counted:
        language = finish(measure_language(*subjects[:1], ids, ids, subjects[1], reader.read, (40, 80)))
    at_end = int(((places >= 30) & (places < 40)).sum())
    assert sum(x.numel() for x in counted) == 3 * (len(places) + at_end * (1 + len(reader.gaps)))
    for subject, scores in zip(language.subjects, expected, strict=True):
        assert subject.kl.mean == pytest.approx(scores.kl[:, places].mean().item(), abs=1e-5)
    for subject, scores in zip(language.at(40).subjects, expected, strict=True):
        assert subject.loss.mean == pytest.approx(scores.loss[:, places[places < 39]].mean().item(), abs=1e-5)
    alone = finish(measure_recall(subjects[0], ids[:, :40], 10, (), places[places < 40]))
    for subject, again in zip(reader.result().subjects, alone.subjects, strict=True):
        assert (*subject.first, *subject.second) == pytest.approx((*again.first, *again.second), abs=1e-4)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_window_control_takes_no_more_bytes_than_the_student_in_as_many_bits(subjects, bits):
    layers = subjects[1]
    for length in (8, 40, 400):
        allocation = allocation_of(layers, [replace(head, bits=bits) for head in MIXED], 2)
        control = window_control(allocation, layers, length)
        assert control.bits == bits
        size, largest = (each.state_bytes(layers, length) for each in (control, allocation))
        assert largest - sum(layer.kv_heads * 64 for layer in layers) < size <= largest
    tiny = window_control(allocation_of(layers, [Head(window=1)], 0), layers, 8)
    assert tiny.heads[0][0].window == 1 and tiny.sinks == 0


def test_intervals_hold_the_mean_and_vanish_where_all_texts_are_alike(subjects):
    for result in measured(subjects, tokens(8, 40)).subjects:
        assert result.loss.interval[0] < result.loss.mean < result.loss.interval[1]
    for result in measured(subjects, tokens(1, 40).expand(8, 40)).subjects:
        assert result.loss.interval == pytest.approx((result.loss.mean, result.loss.mean))


def test_intervals_of_ranges_are_over_the_documents_that_reach_there():
    owners = torch.tensor([[0] * 10 + [1] * 10, [2] * 20])
    scores, units = owners.double(), Units(owners)
    assert units.estimate(scores, slice(0, 10)).interval == pytest.approx((1 - student_t(1), 1 + student_t(1)))
    assert units.estimate(scores).mean == scores.mean().item()
    alone = Units(owners[1:] * 0)
    assert alone.estimate(scores[1:]).interval == (2, 2) and alone.estimate_difference(scores[1:]) is None


@pytest.mark.parametrize("sizes", [[5] * 4, [1, 1, 2, 3, 5, 8, 13, 21]])
def test_intervals_over_few_documents_hold_the_mean_95_times_of_100(sizes):
    generator, held = torch.Generator().manual_seed(0), 0
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[None]
    units = Units(owners)
    for means in torch.randn(2000, len(sizes), generator=generator, dtype=torch.float64):
        low, high = units.estimate(means[owners]).interval
        held += low < 0 < high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_an_interval_over_equal_documents_is_that_of_a_mean_of_their_means():
    means = torch.tensor([0.2, 0.5, 0.1, 0.9, 0.3], dtype=torch.float64)
    expected = stats.t.interval(0.95, 4, loc=means.mean().item(), scale=stats.sem(means.numpy()))
    estimate = Units(torch.arange(5)[:, None].expand(5, 7)).estimate(means[:, None].expand(5, 7))
    assert estimate.interval == pytest.approx(expected, abs=0.001)


def test_documents_are_the_units_where_there_are_enough():
    documents = torch.arange(40).view(2, 20) // 4  # ten documents in two texts
    predicted = documents[:, 1:]
    assert owners_of(predicted)[0] == "documents" and int(owners_of(predicted)[1].max()) == 9
    unit, owners = owners_of(predicted // 4)
    assert unit == "texts" and owners.tolist() == [[0] * 19, [1] * 19]


def test_calibration_compares_what_was_said_with_what_came():
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(100_000, generator=generator, dtype=torch.float64)
    honest = (torch.rand(100_000, generator=generator, dtype=torch.float64) < probability).double()
    assert calibration_error(probability, honest) < 0.005
    assert calibration_error(torch.ones(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)) == 1


def test_passages_are_read_on_from_one_place_while_language_is_measured(subjects, monkeypatch):
    result, layers = subjects
    ids, reader = tokens(3, 40), RepeatReader(result, 40, 5)
    with tokens_read(result[0].model) as counted:
        language = finish(measure_language(result, ids, torch.zeros_like(ids), layers, read=reader.read))
    assert sum(counted) == 3 * (35 + 5 * (1 + len(reader.gaps)))  # each text, and what each gap ends in
    alone = measured(subjects, ids)
    for subject, expected in zip(language.subjects, alone.subjects, strict=True):
        assert (subject.loss.mean, subject.kl.mean) == pytest.approx((expected.loss.mean, expected.kl.mean), abs=1e-5)
    read_anew = finish(measure_recall(result, ids, 5))
    monkeypatch.setattr("linearizer.evaluate.subjects.MAX_BRANCH_BYTES", 1)  # a gap at a time
    for separate in (read_anew, finish(measure_recall(result, ids, 5))):
        for subject, expected in zip(reader.result().subjects, separate.subjects, strict=True):
            assert subject.second == pytest.approx(expected.second, abs=1e-4)
            assert subject.first == pytest.approx(expected.first, abs=1e-4)


def test_a_forecast_of_judging_counts_the_tokens_that_it_reads(subjects):
    result, layers = subjects
    ids, reader = tokens(2, 128), RepeatReader(result, 64, passage_tokens(64))  # four texts of 64 tokens, in pairs
    with tokens_read(result[0].model) as counted:
        finish(measure_language(result, ids, torch.zeros_like(ids), layers, reader.read, (16, 64, 128)))
    assert sum(counted) / (4 * 64) == pytest.approx(JUDGED_SHARE, abs=0.05)
