"""The training of a teacher goes on to the same bits, repeats passages at all distances, and says what it reached."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearizer.model.hub import find_model
from linearizer.model.teacher import load_tokenizer
from tests.benchmarks import teacher
from tests.support.families import tiny_config


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Give the arguments of a training that takes four steps on texts of 32 and 64 tokens."""
    for name, value in {"TOKENS": 64, "PASSAGE": 8, "SAVED_SECONDS": 0, "REPORTED": 2, "SAME": 16}.items():
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
    draw = teacher.batch_of

    def stop(tokens, length, asked, step):
        if step == 2:
            raise KeyboardInterrupt
        return draw(tokens, length, asked, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(teacher, "batch_of", stop)
        teacher.main([*small, "--out", str(tmp_path / "stopped")])
    teacher.main([*small, "--out", str(tmp_path / "stopped")])
    (model, one), (_, other) = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert model.config.rope_parameters["factor"] == 5 and model.config.max_position_embeddings == 160
    capsys.readouterr()
    monkeypatch.setattr(teacher, "RESULTS", tmp_path)
    teacher.main([*small, "--out", str(tmp_path / "whole"), "--report", "--record"])
    assert json.loads(capsys.readouterr().out) == said == json.loads((tmp_path / "teacher-160-4.json").read_text())


def test_texts_are_short_and_then_grow_by_doubling():
    lengths = [teacher.length_at(step, 100, 512, 4096) for step in range(100)]
    assert lengths == [512] * 80 + lengths[80:] == sorted(lengths) and {*lengths[80:]} == {1024, 2048, 4096}
    rates = [teacher.rate_at(step, 1000) for step in range(1000)]
    assert rates[0] < 0.1 and max(rates) == 1 == rates[500] and 0 < rates[-1] < 0.01


def test_passages_come_again_near_and_far():
    generator, gaps = torch.Generator().manual_seed(0), []
    for _ in range(40):
        text = torch.arange(1024)
        teacher.repeat(text, generator)
        gaps += (torch.arange(1024) - text)[text != torch.arange(1024)].tolist()
    assert min(gaps) < 64 and max(gaps) > 800 and all(gap > 0 for gap in gaps)


def test_the_second_part_of_a_text_stands_far_behind_the_first_and_repeats_it():
    generator, distances = torch.Generator().manual_seed(0), []
    for _ in range(40):
        text, place = torch.arange(64), torch.arange(64)
        teacher.take_apart(text, place, 1024, generator)
        assert place.diff().min() == 1 and place[0] == 0 and place[-1] < 1024
        assert (place.diff() > 1).sum() <= 1
        again = text != torch.arange(64)
        distances += (place - place[text])[again].tolist()
    assert len(distances) > 300 and min(distances) < 64 and max(distances) > 800
