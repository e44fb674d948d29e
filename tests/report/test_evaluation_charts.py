"""Figures of an evaluation, as data: every subject is there, numbers are in the cells, and guesses are marked."""

import json
import re
from dataclasses import replace

import pytest

from linearizer.report.markup import part_html
from linearizer.report.parts import PART_VIEWS, evaluation_report
from linearizer.report.quality_charts import length_chart
from linearizer.run.results import PARTS, Estimate, Speed, read_part
from tests.support.evaluation_results import STORED, TYPED

DRAWN = [part for part in PARTS if part not in ("language", "generation", "tasks")]  # the others are tables alone


def drawn(name, part):
    return PART_VIEWS[name].draw(part)


def figure_of(part):
    figure = drawn(part, measured_twice(TYPED[part]))
    return figure and json.loads(figure.to_json())


def measured_twice(part):
    """Let the rates of the second length be measured, too, where a part has rates."""
    if not isinstance(part.result, Speed):
        return part
    subjects = (
        replace(one, paces=tuple(replace(one.paces[0], length=pace.length) for pace in one.paces))
        for one in part.result.subjects
    )
    return replace(part, result=replace(part.result, subjects=tuple(subjects)))


def traces(part):
    return {trace["name"]: trace for trace in figure_of(part)["data"] if "name" in trace}


def test_every_part_has_tables():
    assert set(PART_VIEWS) == set(PARTS) == set(TYPED)
    assert all(view.tables(TYPED[part]) for part, view in PART_VIEWS.items())
    report = evaluation_report(TYPED)
    assert all(part in report for part in PARTS) and report.endswith("torch 2.13")


def test_the_mean_of_a_single_text_is_shown_without_an_interval():
    part, alone = TYPED["language"], Estimate(0.3, (0.3, 0.3))
    lengths = [
        replace(at, subjects=tuple(replace(one, loss=alone, kl=alone, agreement=alone) for one in at.subjects))
        for at in part.result.lengths
    ]
    part = replace(part, result=replace(part.result, lengths=tuple(lengths)))
    own, by_length, *_ = PART_VIEWS["language"].tables(part)
    assert own.rows[2][2:6] == ("0.300", "–", "0.3000", "30.0%") and by_length.rows[2][1:] == ("0.3000", "0.3000")
    assert "student: 0.3 nats over 128 tokens" in length_chart(part.result)


def test_tables_say_in_words_what_never_is_and_whether_a_student_repeats_itself():
    speed, writing = TYPED["speed"], TYPED["generation"]
    never = replace(speed.result, breakeven=replace(speed.result.breakeven, writing=None))
    assert "; never measurably writes faster" in evaluation_report({"speed": replace(speed, result=never)})
    told = []
    for share in (0.1, 0.5, 0.9):
        shares = {"teacher": 0.5, "student": share}
        subjects = [replace(one, repeated=shares.get(one.name, 0.0)) for one in writing.result.subjects]
        result = replace(writing.result, subjects=tuple(subjects))
        told += re.findall(r"repeats itself (\w+)", evaluation_report({"generation": replace(writing, result=result)}))
    assert told == ["less", "as", "more"]


def test_gaps_are_those_that_were_measured():
    recall = traces("recall")
    assert recall["student"]["x"] == [16, 32] and recall["student"]["y"] == [2.5, 3.0]
    assert recall["the first time, teacher"]["y"] == [4.5, 4.5]


def test_hidden_pairs_are_drawn_by_length_over_the_depths_that_fit():
    student = traces("needle")["student"]
    assert student["x"] == [160, 320] and student["y"] == [0.625, None]


def test_rates_are_drawn_where_several_lengths_were_measured():
    assert traces("speed")["student"]["x"] == [1024, 4096]
    assert drawn("speed", TYPED["speed"]) is None  # one length was measured, and one point is no chart


def test_what_the_teacher_cannot_do_is_no_chart_and_says_so():
    part = TYPED["needle"]
    rows = ((0.25, 0.5), (None, None))
    poor = replace(
        part, result=replace(part.result, subjects=tuple(replace(one, correct=rows) for one in part.result.subjects))
    )
    assert "student, 160" not in part_html("needle", poor) and "student, 160" in part_html("needle", part)
    assert drawn("needle", poor) is None and "the teacher itself recalls less than half" in part_html("needle", poor)
    assert "the teacher itself" not in part_html("needle", part)


@pytest.mark.parametrize("part", PARTS)
def test_a_student_measured_alone_can_be_shown(part):
    result = json.loads(json.dumps(STORED[part]))
    result["subjects"] = [subject for subject in result["subjects"] if subject["name"] == "student"]
    if part == "language":
        result["subjects"][0].update(excess=None, kl=None, agreement=None)
    if part == "generation":
        result["subjects"] = [
            {**subject, "diverged": None, "loss": None, "likeliest": None} for subject in result["subjects"]
        ]
    if part == "speed":
        result["breakeven"] = None
    alone = read_part(part, result)
    assert "student" in part_html(part, alone)
    assert bool(drawn(part, measured_twice(alone))) == (part in DRAWN)


def test_words_from_elsewhere_are_no_markup():
    hostile = "<img src=x onerror=alert(1)>"
    language, tasks = TYPED["language"], TYPED["tasks"]
    assert "<img" not in part_html("language", replace(language, read=replace(language.read, text=hostile)))
    subject = tasks.result.subjects[0]
    scored = replace(subject, scores=(replace(subject.scores[0], task=hostile),))
    assert "<img" not in part_html("tasks", replace(tasks, result=replace(tasks.result, subjects=(scored,))))
