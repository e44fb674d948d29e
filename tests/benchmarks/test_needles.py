"""Numbers are asked for in one reading of a text, with the answers of a reading for each number alone."""

import pytest

from linearizer.evaluate.recall import DEPTHS
from linearizer.evaluate.subjects import Subject, read_last
from linearizer.teacher.logits import losses_of
from tests.benchmarks import needles
from tests.benchmarks.real_judging import hide_number
from tests.support.models import student_of, tokens

SMALL = "--model demo --budget 16 --length 256 --count 1 --run texts=2 length=64".split()


def test_numbers_of_a_text_are_asked_for_as_if_each_were_alone(tokenizer):
    text, student = tokens(1, 200), Subject("student", student_of("llama", vocab_size=len(tokenizer)))
    asked = needles.ask_in_text(student, text, tokenizer, 3)
    for place, depth in enumerate(DEPTHS):
        hidden = hide_number(text, depth, tokenizer, 30 + place)
        (logits,) = read_last(student, hidden.ids, [hidden.value])
        alone = losses_of(logits[None], hidden.ids[:, -hidden.value :]).mean().item()
        assert asked[place].tolist() == pytest.approx([0, alone], rel=1e-4)


def test_the_command_makes_a_student_and_says_what_each_row_finds(tmp_path, capsys):
    command = [str(tmp_path / "run"), *SMALL, "--work", str(tmp_path)]
    needles.main(command)
    first = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in first[2:]] == [*needles.ROWS]
    assert all("/5 " in line and line.count("/1 ") == len(DEPTHS) for line in first[2:])
    needles.main([*command, "--rows", "teacher", "student"])
    assert capsys.readouterr().out.splitlines()[1:] == first[1:4], "a run is not made again"
    assert len([*(tmp_path / "needles").iterdir()]) == 1, "a teacher is asked once"
