"""Figures of an evaluation, as data: every subject is there, numbers are in the cells, and guesses are marked."""

import json
from dataclasses import replace

import pytest

from linearizer.report.markup import part_html
from linearizer.report.parts import PART_VIEWS, evaluation_report
from linearizer.run.results import PARTS, Speed, read_part
from tests.support.evaluation_results import NAMES, STORED, TYPED


def drawn(name, part):
    figures = {chart.title: chart.draw(part) for chart in PART_VIEWS[name].charts}
    return {title: figure for title, figure in figures.items() if figure is not None}


def figures(part):
    return {title: json.loads(figure.to_json()) for title, figure in drawn(part, measured_twice(TYPED[part])).items()}


def measured_twice(part):
    """Let the rates of the second length be measured, too, where a part has rates."""
    if not isinstance(part.result, Speed):
        return part
    subjects = (
        replace(one, paces=tuple(replace(one.paces[0], length=pace.length) for pace in one.paces))
        for one in part.result.subjects
    )
    return replace(part, result=replace(part.result, subjects=tuple(subjects)))


def traces(part, title):
    return {trace["name"]: trace for trace in figures(part)[title]["data"] if "name" in trace}


def test_every_part_has_charts_and_tables():
    assert set(PART_VIEWS) == set(PARTS) == set(TYPED)
    assert all(view.tables(TYPED[part]) and figures(part) for part, view in PART_VIEWS.items())
    report = evaluation_report(TYPED)
    assert all(part in report for part in PARTS) and report.endswith("torch 2.13")


@pytest.mark.parametrize("part", PARTS)
def test_every_figure_is_plain_json_on_a_transparent_ground(part):
    for title, figure in figures(part).items():
        assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)" and figure["data"], title
        assert "bdata" not in json.dumps(figure)  # what arrays of numpy become, which not every page can read


@pytest.mark.parametrize(("part", "title"), [
    ("language", "Quality by length"), ("recall", "Recall"), ("speed", "Writing"),
])  # fmt: skip
def test_subjects_differ_by_marker_not_only_by_colour(part, title):
    lines = [trace for trace in figures(part)[title]["data"] if "marker" in trace]
    symbols = [trace["marker"]["symbol"] for trace in lines]
    first = [symbol if isinstance(symbol, str) else symbol[0] for symbol in symbols]
    assert len(set(first)) == len(first) == (len(NAMES) - (part == "speed" or title == "Quality by length"))


def test_gaps_are_those_that_were_measured():
    recall = traces("recall", "Recall")
    assert recall["student"]["x"] == [16, 32] and recall["student"]["y"] == [2.5, 3.0]
    assert recall["the first time, teacher"]["y"] == [4.5, 4.5]


def test_a_map_of_pairs_has_the_share_in_every_cell_depth_down_and_length_across():
    figure = figures("needle")["Pairs hidden in text"]
    assert [note["text"] for note in figure["layout"]["annotations"]] == NAMES
    student = figure["data"][1]
    assert student["x"] == ["160", "320*"] and student["y"] == ["5%", "95%"]
    assert student["text"] == [["25%", "–"], ["100%", "–"]] and student["texttemplate"] == "%{text}"


def test_rates_are_drawn_where_several_lengths_were_measured():
    assert traces("speed", "Writing")["student"]["x"] == [1024, 4096]
    assert drawn("speed", TYPED["speed"]) == {}  # one length was measured, and one point is no chart


def test_quality_is_drawn_by_length_with_intervals_where_there_are_several():
    student = traces("language", "Quality by length")["student"]
    assert student["x"] == [32, 128] and student["y"] == [0.2, 0.2]
    assert student["error_y"]["array"] == pytest.approx([0.2, 0.2])
    result = TYPED["language"].result
    once = replace(TYPED["language"], result=replace(result, lengths=result.lengths[:1]))
    assert "Quality by length" not in drawn("language", once)


def test_what_the_teacher_cannot_do_is_no_chart_and_says_so():
    part = TYPED["needle"]
    rows = ((0.25, 0.5), (None, None))
    poor = replace(
        part, result=replace(part.result, subjects=tuple(replace(one, correct=rows) for one in part.result.subjects))
    )
    assert drawn("needle", poor) == {} and "the teacher itself recalls less than half" in part_html("needle", poor)
    assert "the teacher itself" not in part_html("needle", part)


def test_scores_of_tasks_have_standard_errors_and_markers():
    scores = figures("tasks")["Scores"]["data"]
    assert [trace["x"] for trace in scores] == [["piqa, acc"]] * len(NAMES)
    assert all(trace["error_y"]["array"] == [0.02] for trace in scores)
    assert len({trace["marker"]["symbol"] for trace in scores}) == len(NAMES)


def test_heads_are_shown_before_and_after_training():
    maps = figures("approximation")["Error of every head"]
    assert [note["text"] for note in maps["layout"]["annotations"]] == ["before training", "after training"]
    assert maps["data"][1]["text"] == [["0.10", "0.20"], ["", ""]]  # the second layer is bounded by itself


def test_writing_tells_greedy_from_drawn():
    assert traces("generation", "Where they leave the teacher")["student, drawn"]["x"] == [3, 8]


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
    assert bool(drawn(part, measured_twice(alone))) == (part != "generation")  # whose chart compares with the teacher


def test_words_from_elsewhere_are_no_markup():
    hostile = "<img src=x onerror=alert(1)>"
    language, tasks = TYPED["language"], TYPED["tasks"]
    assert "<img" not in part_html("language", replace(language, read=replace(language.read, text=hostile)))
    subject = tasks.result.subjects[0]
    scored = replace(subject, scores=(replace(subject.scores[0], task=hostile),))
    assert "<img" not in part_html("tasks", replace(tasks, result=replace(tasks.result, subjects=(scored,))))
