"""Speed and memory are measured as far as memory and time go; longer lengths are marked."""

import pytest
import torch

from linearizer.evaluate import speed
from linearizer.evaluate.speed import crossing, measure_speed, writing_line
from linearizer.evaluate.subjects import Subject
from linearizer.progress import finish
from linearizer.run.results import Pace
from linearizer.student.cache import CACHE
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of


def subjects_of(heads):
    teacher, student = teacher_of("llama").bfloat16(), student_of("llama", heads).bfloat16()
    for layer in student.students():
        layer.float()  # as a student keeps its features
    layers = layers_of(teacher)
    return [Subject("teacher", teacher), Subject("student", student, allocation_of(layers, heads, 2))], layers


@pytest.fixture(autouse=True)
def few_texts_at_once(monkeypatch):
    monkeypatch.setattr(speed, "MAX_BATCH", 4)


@pytest.fixture(scope="module")
def mixed():
    return subjects_of(MIXED)


def test_what_is_remembered_is_what_was_told(mixed):
    subjects, layers = mixed
    result = finish(measure_speed(subjects, layers, [128, 64], 100, seconds=0.05))
    assert result.lengths == (64, 128) and result.beyond == (False, True)
    for course in result.subjects:
        first = course.paces[0]
        assert first.extrapolated is None and first.read_rate > 0 and first.write_rate > 0
        assert first.state_bytes == first.predicted_bytes
        assert all(pace.state_bytes == pace.predicted_bytes for pace in course.batched)
    assert result.breakeven.predicted_bytes == subjects[1].allocation.breakeven_tokens(layers)


def test_what_would_take_too_long_is_marked_and_not_run(mixed):
    subjects, layers = mixed
    result = finish(measure_speed(subjects, layers, [64, 128, 10**9], 256, seconds=1e-9))
    for course in result.subjects:
        assert [pace.extrapolated for pace in course.paces] == [None, "time", "time"]
        assert course.paces[1].read_rate is None and course.paces[1].predicted_bytes > 0
        assert [pace.batch for pace in course.batched] == [1]


def test_a_row_ends_where_memory_does_and_the_others_go_on(mixed):
    subjects, layers = mixed
    honest = subjects[0].model.forward

    def forward(input_ids, **kwargs):
        if kwargs[CACHE].get_seq_length() + input_ids.shape[1] > 80 or len(input_ids) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return honest(input_ids=input_ids, **kwargs)

    subjects[0].model.forward = forward
    try:
        result = finish(measure_speed(subjects, layers, [32, 64, 96], 128, seconds=60))
    finally:
        subjects[0].model.forward = honest
    teacher, student = result.subjects
    assert [pace.extrapolated for pace in teacher.paces] == [None, None, "memory"]
    assert teacher.paces[2].write_rate is None and teacher.paces[2].predicted_bytes > 0
    assert [pace.batch for pace in teacher.batched] == [2, 2]
    assert [pace.extrapolated for pace in student.paces] == [None] * 3


def test_lines_cross_where_the_student_begins_to_win():
    teacher, student = (
        writing_line([Pace(place, 1, None, 1 / y, None, None, 0, 0) for place, y in enumerate(seconds, 1)])
        for seconds in ([2.0, 4.0, 6.0], [5.0, 5.0, 5.0])
    )
    assert teacher == pytest.approx((0, 2)) and student == pytest.approx((5, 0))
    assert crossing(teacher, student) == 3 and crossing(student, teacher) is None
    assert crossing((9.0, 1.0), (1.0, 0.0)) == 0 and crossing((9.0, 1.0), (1.0, 1.0)) == 0
    assert writing_line([Pace(4, 1, None, 0.125, None, None, 0, 0)]) == (8.0, 0.0)
