"""The two charts of a result show, note and save the numbers that were measured."""

import csv
import io
import re
from dataclasses import replace
from html import unescape

import pytest

from linearizer.amounts import size
from linearizer.page.visitors import example_folder
from linearizer.plan.head_bytes import Head, cache_bytes
from linearizer.report.line_chart import BOTTOM, HEIGHT, TOP
from linearizer.report.quality_charts import bytes_chart, length_chart
from linearizer.run.folder import Run
from tests.support.evaluation_results import TYPED

LANGUAGE = TYPED["language"].result


@pytest.fixture(scope="module")
def example():
    return Run(example_folder())


def saved(figure):
    """Read the table that comes with a chart: its head, and the rows of each line."""
    head, *rows = csv.reader(io.StringIO(unescape(re.search('data-csv="([^"]*)"', figure)[1])))
    names = dict.fromkeys(row[0] for row in rows)
    return head, {name: [tuple(map(float, row[1:])) for row in rows if row[0] == name] for name in names}


def test_quality_by_length_saves_what_was_measured_with_its_intervals(example):
    result = example.results["language"].result
    head, lines = saved(length_chart(result))
    assert head == ["line", "length of the texts, tokens", "KL, nats per token", "95% from", "to"]
    assert lines.keys() == {"student", "window"}
    for name, rows in lines.items():
        at = [next(each.kl for each in length.subjects if each.name == name) for length in result.lengths]
        measured = zip(result.lengths, at, strict=True)
        assert rows == [(length.length, kl.mean, *kl.interval) for length, kl in measured]


def test_each_point_has_its_interval_and_a_note_with_what_was_measured_even_below_the_axis():
    short, long = LANGUAGE.lengths
    exact = replace(short, subjects=tuple(replace(one, kl=replace(one.kl, mean=-1e-9)) for one in short.subjects))
    figure = length_chart(replace(LANGUAGE, lengths=(exact, long)))
    _, lines = saved(figure)
    assert lines["student"][0][1] == -1e-9 and "student: -1e-09 nats" in figure
    assert f'cy="{HEIGHT - BOTTOM:.1f}"' in figure, "an axis of factors has no zero"
    points = sum(map(len, lines.values()))
    assert figure.count('class="lz-bar') == figure.count("<circle") == figure.count("</title></circle>") == points == 4
    assert length_chart(replace(LANGUAGE, lengths=LANGUAGE.lengths[:1])) == ""  # a point is no line


def test_without_a_teacher_the_loss_of_every_subject_is_drawn():
    alone = [replace(each, subjects=tuple(replace(one, kl=None) for one in each.subjects)) for each in LANGUAGE.lengths]
    head, lines = saved(length_chart(replace(LANGUAGE, lengths=tuple(alone))))
    assert head[2] == "loss, nats per token" and lines["teacher"][0] == pytest.approx((32, 3.4, 3.3, 3.6))


def test_quality_by_bytes_marks_the_student_among_its_rivals_and_the_budgets_that_were_priced(example):
    part = example.results["language"]
    figure = bytes_chart(example, example.allocation, part)
    _, lines = saved(figure)
    own, length = example.allocation.state_bytes(example.layers, 0), example.plan.length
    at = part.result.at(length)
    for each in at.subjects[1:]:
        assert lines.pop(each.name) == [(own, each.kl.mean)]
    ((name, predicted),) = lines.items()
    assert name == "predicted" and "what the prices predict, times " in figure
    assert f"texts of {length:,} tokens" in figure
    assert predicted == sorted(predicted, key=lambda point: (point[0], -point[1]))
    assert figure.count('<circle class="lz-unmarked"') == len(predicted)
    assert f"teacher’s cache, {size(cache_bytes(example.layers, length))}" in figure
    assert f" {TOP:.1f}" in figure  # a line to the top


def test_bytes_of_a_state_that_grows_are_those_of_the_texts_that_were_judged_and_no_prices_stand_beside_them(example):
    rows = [tuple(Head(softmax=True) for _ in row) for row in example.allocation.heads[:1]]
    growing = replace(example.allocation, heads=(*rows, *example.allocation.heads[1:]))
    part, length = example.results["language"], example.plan.length
    _, lines = saved(bytes_chart(example, growing, part))
    assert lines.keys() == {"student", "window"} and length < part.read.length
    assert {points[0][0] for points in lines.values()} == {growing.state_bytes(example.layers, length)}
