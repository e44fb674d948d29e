"""A bad request at the command line is answered with a sentence and exit code 2, and leaves nothing behind."""

import shutil
import socket

import pytest
from safetensors.torch import load_file, save_file

from linearizer.hub.models import find_model

QUICK = ["--recipe", "features", "--texts", "2", "--length", "64", "--steps", "2"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--budget", "many"], "budget 'many' is not allowed: it should be a valid integer"),
        (["--budget", "3"], "is too small"),
        (["--budget", "64", "--features", "64"], "not allowed with"),
        (["--feature-map", "magic"], "'magic' is not allowed: it should be 'clusters', 'mlp'"),
        (["--texts", "9999999"], "are needed"),
        (["--resume"], "--resume needs --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused_with_a_sentence_and_leaves_nothing(arguments, sentence, tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = said("run", "demo", *QUICK, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err and err.startswith("linearizer: ") and err.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_without_a_model_is_refused(said):
    code, _, err = said("run", "--budget", 64)
    assert code == 2 and "name MODEL" in err


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path, said):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = said("run", "demo", "--out", tmp_path)
    assert code == 2 and "holds something else" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    code, _, err = said("run", "demo", "--out", tmp_path / "thesis.tex")
    assert code == 2 and (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_page_is_refused_a_port_that_is_taken_before_gradio_is_asked(said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = said("app", "--port", port)
    assert code == 2 and f"127.0.0.1:{port} cannot be bound (Address already in use" in err


def test_the_page_takes_one_key_and_has_no_product(said, monkeypatch):
    monkeypatch.setenv("LINEARIZER_API_KEY", "one two")
    code, _, err = said("app")
    assert code == 2 and "LINEARIZER_API_KEY has several keys" in err
    code, _, err = said("app", "--json")
    assert code == 2 and "unrecognized arguments: --json" in err


def test_a_teacher_whose_logits_are_no_numbers_is_refused_before_it_is_measured(tmp_path, said):
    shutil.copytree(find_model("demo").folder, tmp_path / "model")
    for shard in (tmp_path / "model").glob("*.safetensors"):
        weights = load_file(shard)
        if "model.norm.weight" in weights:
            weights["model.norm.weight"][0] = 3e38
            save_file(weights, shard, {"format": "pt"})
    code, _, err = said("run", tmp_path / "model", "--budget", 64, "--out", tmp_path / "run")
    assert code == 1 and "the teacher's logits are not finite" in err
    assert not (tmp_path / "run" / "profile.json").exists()
