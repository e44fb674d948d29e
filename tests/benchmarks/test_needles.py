"""Numbers are asked for in one reading of a text, as if each were alone; RULER's tasks are as they are defined."""

import random
import re
from collections import Counter
from pydoc_data.topics import topics

import pytest

from linearizer.evaluate.recall import DEPTHS
from linearizer.evaluate.subjects import Subject, read_last
from linearizer.teacher.logits import losses_of
from tests.benchmarks import needles, ruler
from tests.benchmarks.real_judging import hide_number
from tests.support.models import student_of, tokens

SMALL = "--model demo --texts builtin --budget 16 --length 256 --count 1 --run texts=2 length=64".split()


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
    assert [line.split()[0] for line in first[2:]] == [*needles.ROWS, needles.TWICE]
    assert all("/5 " in line and line.count("/1 ") == len(DEPTHS) for line in first[2:])
    needles.main([*command, "--rows", "teacher", "student"])
    assert capsys.readouterr().out.splitlines()[1:] == first[1:4], "a run is not made again"
    assert len([*(tmp_path / "needles").iterdir()]) == 1, "a teacher is asked once"
    ruler.main([*command, "--length", "1024", "--rows", "student", "--tasks", "niah_single_2", "vt"])
    assert re.fullmatch(r"student( +\d+%){2}", capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def sources():
    return ruler.Sources.of(" ".join(topics.values()))


@pytest.mark.parametrize("name", ruler.TASKS)
def test_a_task_fills_its_length_and_its_answers_stand_in_the_text_alone(name, sources, tokenizer):
    length = 4096 if name == "cwe" else 1024  # its list has 330 words at least, and the demo model short tokens
    ids, answers = ruler.lay_out(name, sources, tokenizer, length, 0)
    task, text = ruler.TASKS[name], tokenizer.decode(ids[0])
    assert 0.9 * length < ids.shape[1] + task.tokens <= length
    assert ids.equal(ruler.lay_out(name, sources, tokenizer, length, 0)[0]), "a seed draws the same"
    assert answers != ruler.lay_out(name, sources, tokenizer, length, 1)[1]
    body = text[: text.rindex(text.rstrip().rpartition("\n")[2])]
    assert ruler.score(body, answers) == 1 and len(answers) == len(set(answers))


def test_tasks_hide_and_count_as_they_are_defined(sources):
    def make(name, units=60):
        return ruler.TASKS[name].make(sources, random.Random(0), units)

    many = make("niah_multikey_1")
    assert many.text.count("One of the hidden") == 4 and len(many.answers) == 1
    assert make("niah_multikey_2").text.count("One of the hidden") == 61
    assert len(make("niah_multivalue").answers) == len(make("niah_multiquery").answers) == 4
    *_, (value, last) = re.findall(r"VAR (\w{5}) = (\w{5})", text := make("vt").text)
    assert make("vt").answers[-2:] == [last, value] and text.count("VAR") == 10, "an example goes before"
    words = Counter(re.findall(r"\d+\. (\w+)", make("cwe").text))
    assert {word for word, count in words.items() if count >= 30} == {*make("cwe").answers}
    coded = Counter(re.findall(r"\b[a-z]{6}\b", make("fwe", 1000).text.split("\n\n")[1]))
    assert [word for word, _ in coded.most_common(3)] == make("fwe", 1000).answers


def test_answers_are_scored_by_the_strings_that_stand_in_what_is_written():
    assert ruler.score("They are ABC and def", ["abc", "DEF", "xyz", "q"]) == 0.5
