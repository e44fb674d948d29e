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
    for name, value in {"TOKENS": 64, "SHORTEST": 32, "PASSAGE": 8, "SAVED_SECONDS": 0, "REPORTED": 2}.items():
        monkeypatch.setattr(teacher, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=4096))
    model.save_pretrained(tmp_path / "begin")
    load_tokenizer(find_model("demo")).save_pretrained(tmp_path / "begin")
    asked = ["--model", str(tmp_path / "begin"), "--text", "builtin", "--held", "builtin"]
    return [*asked, "--length", "160", "--steps", "4"]


def weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return model, model.state_dict()


def test_a_training_that_was_stopped_ends_in_the_same_weights(small, tmp_path, monkeypatch, capsys):
    teacher.main([*small, "--out", str(tmp_path / "whole")])
    said = json.loads(capsys.readouterr().out)
    assert said["copied"].keys() == {"128"} and said["loss from"].keys() == {"0", "64", "128"}
    draw = teacher.batch_of

    def stop(tokens, length, seed, step):
        if step == 2:
            raise KeyboardInterrupt
        return draw(tokens, length, seed, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(teacher, "batch_of", stop)
        teacher.main([*small, "--out", str(tmp_path / "stopped")])
    teacher.main([*small, "--out", str(tmp_path / "stopped")])
    (model, one), (_, other) = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert model.config.rope_parameters["rope_theta"] == 100_000 and model.config.max_position_embeddings == 160
    capsys.readouterr()
    teacher.main([*small, "--out", str(tmp_path / "whole"), "--report"])
    assert json.loads(capsys.readouterr().out) == said


def test_texts_grow_by_doubling_and_stay_at_the_longest():
    lengths = [teacher.length_at(step, 100, 4096) for step in range(100)]
    assert lengths[0] == 1024 and lengths[30] == 2048 and lengths[60:] == [4096] * 40 and lengths == sorted(lengths)
    rates = [teacher.rate_at(step, 1000) for step in range(1000)]
    assert rates[0] < 0.1 and max(rates) == 1 == rates[500] and 0 < rates[-1] < 0.01


def test_passages_come_again_near_and_far():
    generator, gaps = torch.Generator().manual_seed(0), []
    for _ in range(40):
        text = torch.arange(1024)
        teacher.repeat(text, generator)
        gaps += (torch.arange(1024) - text)[text != torch.arange(1024)].tolist()
    assert min(gaps) < 64 and max(gaps) > 800 and all(gap > 0 for gap in gaps)
