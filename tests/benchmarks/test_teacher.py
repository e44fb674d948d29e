"""The training of a teacher goes on to the same bits, repeats passages at all distances, and says what it reached."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearizer.hub.models import find_model
from linearizer.teacher.load import load_tokenizer
from tests.benchmarks import teacher
from tests.support.families import tiny_config


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Give the arguments of a training that takes four steps on texts of 160 tokens."""
    for name, value in {"PASSAGE": 8, "SAVED_SECONDS": 0, "REPORTED": 2, "SAME": 16}.items():
        monkeypatch.setattr(teacher, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=4096))
    model.save_pretrained(tmp_path / "begin")
    load_tokenizer(find_model("demo")).save_pretrained(tmp_path / "begin")
    asked = ["--model", str(tmp_path / "begin"), "--text", "builtin", "--held", "builtin"]
    return [*asked, "--trained", "32", "--length", "160", "--steps", "4"]


def weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return model, model.state_dict()


def test_a_training_that_was_stopped_ends_in_the_same_weights(small, tmp_path, monkeypatch, capsys):
    teacher.main([*small, "--out", str(tmp_path / "whole")])
    said = json.loads(capsys.readouterr().out)
    assert said["copied"].keys() == {"128"} and said["loss from"].keys() == {"0", "64", "128"}
    assert said["loss of the same tokens, in all"].keys() == {"160", "80", "40"}
    draw = teacher.draw_text

    def stop(documents, asked, step):
        if step == 2:
            raise KeyboardInterrupt
        return draw(documents, asked, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(teacher, "draw_text", stop)
        teacher.main([*small, "--out", str(tmp_path / "stopped")])
    teacher.main([*small, "--out", str(tmp_path / "stopped")])
    (model, one), (_, other) = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert model.config.rope_parameters["factor"] == 5 and model.config.max_position_embeddings == 160
    capsys.readouterr()
    monkeypatch.setattr(teacher, "RESULTS", tmp_path)
    teacher.main([*small, "--out", str(tmp_path / "whole"), "--report", "--record"])
    assert json.loads(capsys.readouterr().out) == said == json.loads((tmp_path / "teacher-160-4.json").read_text())


def test_the_rate_rises_and_falls_to_nothing():
    rates = [teacher.rate_at(step, 1000) for step in range(1000)]
    top = rates.index(max(rates))
    assert rates[0] < 0.1 < 0.9 < rates[top] and rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True) and 0 < rates[-1] < 0.01


def test_every_place_of_a_document_is_drawn_and_no_text_crosses_its_end():
    documents = [torch.arange(100, 110), torch.arange(200, 204), torch.arange(300, 306)]
    drawn = [teacher.draw_text(documents, Namespace(seed=0, length=4, steps=800), step)[0] for step in range(800)]
    plain = {tuple(text.tolist()) for text in drawn if (text.diff() == 1).all()}
    assert plain == {tuple(range(first, first + 4)) for first in (*range(100, 107), 200, 300, 301, 302)}
    assert 300 < sum(not (text.diff() == 1).all() for text in drawn) < 700
    again = teacher.draw_text(documents, Namespace(seed=0, length=4, steps=800), 7)[0]
    assert torch.equal(again, drawn[7])


def test_documents_that_are_too_short_are_named(tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(SystemExit, match=r"no document of file:.*short.txt has 4096 tokens"):
        teacher.documents_of(f"file:{tmp_path / 'short.txt'}", load_tokenizer(find_model("demo")), 4096)


def test_passages_come_again_near_and_far():
    generator, gaps = torch.Generator().manual_seed(0), []
    for _ in range(40):
        text = torch.arange(1024)
        teacher.repeat(text, 2, generator)
        gaps += (torch.arange(1024) - text)[text != torch.arange(1024)].tolist()
    assert min(gaps) < 64 and max(gaps) > 800 and all(gap > 0 for gap in gaps)
