"""`linearizer evaluate` measures a finished run part by part, and answers bad requests with a sentence."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from linearizer import pipeline
from linearizer.cli.main import main
from linearizer.evaluate import evaluate_run
from linearizer.evaluate.language import read_scores
from linearizer.evaluate.subjects import assembled
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.results import read_part
from linearizer.teacher import text
from linearizer.teacher.text import read_texts
from linearizer.workers import control as jobs
from tests.support.evaluation_results import STORED, TYPED

QUICK = ["--budget", "32", "--texts", "2", "--length", "64", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny GPT-2: it learns 192 positions."""
    return save_gpt2(tmp_path_factory.mktemp("model") / "gpt2", 192)


def save_gpt2(folder, positions):
    torch.manual_seed(0)
    shape = {"vocab_size": 4096, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions}
    config = GPT2Config(**shape, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_model("demo").folder).save_pretrained(folder)
    return folder


def make_run(model, folder, *options):
    assert main(["run", str(model), *QUICK, *options, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    """A finished run of it, which no test may change."""
    trained = "--recipe", "features", "--feature-map", "mlp", "--steps", "2"
    return make_run(model, tmp_path_factory.mktemp("run") / "run", *trained)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, model):
    """A finished run that needed no training, which no test may change."""
    return make_run(model, tmp_path_factory.mktemp("untrained") / "run")


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run."""
    shutil.copytree(finished, tmp_path / "run")
    return Run.open(tmp_path / "run")


def refused(said, *arguments):
    """The sentence by which a request is refused."""
    code, out, err = said("evaluate", *arguments)
    assert (code, out) == (2, "") and err.startswith("linearizer: ") and err.count("\n") == 1
    return err


def judged_losses(run):
    """Of teacher, student and window, when the student was made."""
    return [subject["loss"]["mean"] for subject in run.evaluation_parts["language"]["subjects"]]


def examined(run):
    return [event["part"] for event in run.events() if event["event"] == "examined"]


def test_all_are_measured_and_named_with_what_they_were_measured_with(run, said):
    command = ("evaluate", run.folder, "--parts", "language,recall", "--texts", "3")
    code, out, err = said(*command, "--json")
    assert code == 0, err
    assert json.loads(out) == run.evaluation_parts
    language = run.evaluation_parts["language"]
    names = [subject["name"] for subject in language["subjects"]]
    assert names == ["teacher", "student", "window"]
    assert (language["text"], language["texts"], language["length"], language["seed"]) == ("builtin", 3, 64, 0)
    tools = language["asked"]["made_with"]
    assert tools["versions"]["torch"] == torch.__version__ and tools["device"].startswith("cpu") and tools["teacher"]
    assert {"text", "learnt", "judged", "seed", "versions", "device"} <= run.evaluation_file["made_with"].keys()
    out = said(*command)[1]  # stored for the same request
    assert examined(run) == ["language", "recall"] and run.evaluation_parts["language"] == language
    assert all(word in out for word in (*names, "calibration", "seed 0", "torch", "95%"))
    said(*command, "--again")
    assert examined(run)[2:] == ["language", "recall"] and run.evaluation_parts["language"] == language
    assert run.done and jobs.status(run).state == "done"


def test_the_text_is_not_what_the_student_was_trained_on(finished):
    run = Run.open(finished)
    learnt = max(run.evaluation_file["made_with"]["learnt"], run.plan.texts)
    with assembled(run) as setup:
        texts = read_texts("builtin", setup.tokenizer, 64, learnt + 2)
        assert torch.equal(setup.windows(None, 64, 2, 0), texts[learnt:])
        assert torch.equal(setup.windows(None, 32, 4, 0).flatten(), texts[learnt:].flatten())
        sampled = setup.windows("self", 32, 2, 0)
        assert sampled.shape == (2, 32) and not torch.equal(sampled, setup.windows("self", 32, 2, 1))


@pytest.mark.parametrize("source", [None, "dataset:org/other"])
def test_texts_of_the_hub_are_read_with_the_token_that_was_given(source, run, monkeypatch):
    monkeypatch.setattr(Run, "plan", replace(run.plan, text="dataset:org/own"))
    tokens = []

    def read_column(name, kind, kind_name, token):
        tokens.append(token)
        return iter(["Some words. " * 400] * 4)

    monkeypatch.setattr(text, "read_column", read_column)
    with assembled(run, "hf_of_a_visitor") as setup:
        assert setup.windows(source, 32, 2, 0).shape == (2, 32)
        assert "hf_of_a_visitor" not in repr(setup)
    assert tokens == ["hf_of_a_visitor"]


def test_the_teacher_writes_text_where_its_weights_are_in_its_student_too(untrained):
    with assembled(Run.open(untrained)) as setup:
        shared = replace(setup, teacher=setup.control)
        assert torch.equal(shared.windows("self", 32, 2, 0), setup.windows("self", 32, 2, 0))


def test_a_run_is_judged_on_text_that_nothing_was_measured_on_and_not_again_as_it_was_asked(untrained, tmp_path):
    run = Run(shutil.copytree(untrained, tmp_path / "run"))
    with assembled(run) as setup:
        texts = read_texts("builtin", setup.tokenizer, 64, run.plan.texts + 8)[run.plan.texts :]
        assert torch.equal(setup.windows(None, 64, 8, 0), texts)
        assert [subject.name for subject in setup.subjects(64)] == ["teacher", "student", "window"]
        assert setup.control is setup.student
        joined, _ = evaluate_run.texts_to_judge(setup, evaluate_run.JUDGING)
        losses = [scores.loss.mean().item() for scores in read_scores(setup.subjects(64), joined)]
        short_losses = [scores.loss.mean().item() for scores in read_scores(setup.subjects(64), texts[::2, :16])]
    assert judged_losses(run) == pytest.approx(losses, abs=1e-5)
    lengths = run.results["language"].result.lengths
    assert [result.length for result in lengths] == [16, 64, 128]  # a quarter of a text, a text and two
    assert [subject.loss.mean for subject in lengths[0].subjects] == pytest.approx(short_losses, abs=1e-5)
    judged = run.evaluation_parts
    assert set(judged) == set(evaluate_run.JUDGING.parts)
    finish(pipeline.evaluate_run(run, replace(evaluate_run.JUDGING, parts=("language", "recall"))))
    assert examined(run) == [] and run.evaluation_parts == judged
    finish(pipeline.evaluate_run(run, evaluate_run.Request(("recall",), texts=2)))
    assert examined(run) == ["recall"] and run.evaluation_parts["language"] == judged["language"]


def test_requests_and_results_of_former_versions_are_read():
    assert evaluate_run.Request.of({"short": False, "texts": 3}) == evaluate_run.Request(texts=3)
    language = STORED["language"]
    former = {**language, "asked": {**language["asked"], "short": True}}
    assert read_part("language", former) == TYPED["language"]


def test_a_text_of_the_same_name_in_another_folder_is_another_text(run, tmp_path, monkeypatch, said):
    losses = set()
    for word in ("first", "second"):
        (tmp_path / word).mkdir()
        (tmp_path / word / "text.txt").write_text(f"The {word} text. " * 100)
        monkeypatch.chdir(tmp_path / word)
        assert said("evaluate", run.folder, "--parts", "generation", "--text", "file:text.txt", "--texts", "1")[0] == 0
        losses.add(run.results["generation"].result.subjects[0].loss)
    assert len(losses) == 2


def test_texts_follow_each_other_in_pairs_where_positions_reach_and_there_are_enough(finished):
    with assembled(Run.open(finished)) as setup:
        texts = setup.windows(None, 64, 8, 0)

        def taken(**options):
            windows, length = evaluate_run.texts_to_judge(setup, evaluate_run.Request(**options))
            return (*windows.shape, length)

        joined, _ = evaluate_run.texts_to_judge(setup, evaluate_run.Request())
        assert torch.equal(joined.flatten(), texts.flatten())
        assert taken() == (4, 128, 64)
        assert taken(texts=7) == (7, 64, 64)  # four pairs would take eight
        assert taken(length=64) == (8, 64, 64)
        assert taken(text="self", texts=8) == (8, 64, 64)


def test_a_folder_without_a_run_or_a_student_and_a_text_too_short_are_refused(run, tmp_path, said):
    assert "holds no run" in refused(said, tmp_path)
    assert "has no student yet" in refused(said, Run.create(tmp_path / "begun", Plan("demo", budget=64)).folder)
    (tmp_path / "short.txt").write_text("A few words.")
    err = refused(said, run.folder, "--text", f"file:{tmp_path / 'short.txt'}", "--parts", "language")
    assert "and 64 are needed (1 texts of 64)" in err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--parts", "langage"], "parts[0] 'langage' is not allowed: it should be 'language', 'recall'"),
        (["--length", "3"], "length 3 is not allowed: it should be greater than or equal to 16"),
        (["--lengths", "64,few"], "lengths[1] 'few' is not allowed: it should be a valid integer"),
        (["--parts", "recall,needle", "--lengths", "100"], "4 pairs do not fit into a text of 100 tokens"),
        (["--lengths", "160,200"], "has learned 192 positions; ask for at most 192"),
        (["--parts", "tasks"], "no task was named: add --tasks"),
        (["--tasks", "colours", "--task-folder", "absent"], "'absent' is not a folder"),
        (["--seconds", "0"], "seconds 0.0 is not allowed: it should be greater than 0"),
        (["--length", "193"], "has learned 192 positions; ask for at most 192"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(arguments, sentence, run, said):
    before = run.evaluation_parts
    assert sentence in refused(said, run.folder, *arguments)
    assert run.evaluation_parts == before


def test_a_student_whose_teacher_is_gone_is_measured_alone(run, model, tmp_path, said):
    hidden = model.with_name("hidden")
    model.rename(hidden)
    try:
        code, out, err = said("evaluate", run.folder, "--parts", "language,recall", "--texts", "2")
    finally:
        hidden.rename(model)
    assert code == 0, err
    assert "the student was measured alone: " in out
    language = run.evaluation_parts["language"]
    assert [subject["name"] for subject in language["subjects"]] == ["student", "window"]
    assert language["subjects"][0]["kl"] is None and "–" in out


def test_every_part_is_measured_told_and_plotted_as_it_is(run, said):
    small = ["--texts", "2", "--lengths", "160,192", "--seconds", "0.2"]
    code, out, err = said("evaluate", run.folder, *small)
    assert code == 0, err
    parts = run.evaluation_parts
    assert list(parts) == [part for part in evaluate_run.PART_MEASURES if part != "tasks"]
    for word in ("recalled, at depth", "leaves the teacher", "reads tokens/s", "takes fewer bytes"):
        assert word in out
    assert parts["needle"]["lengths"] == [160, 192] and len(parts["needle"]["subjects"][0]["correct"][0]) == 5
    assert [subject["name"] for subject in parts["speed"]["subjects"]] == ["teacher", "student", "window"]
    assert json.loads(json.dumps(parts)) == parts


def test_a_teacher_too_short_for_pairs_is_measured_in_all_else(tmp_path, said, capsys):
    make_run(save_gpt2(tmp_path / "model", 96), tmp_path / "run", "--recipe", "swa")
    judged = Run.open(tmp_path / "run").results["language"].result.lengths
    assert [result.length for result in judged] == [16, 64]  # 128 tokens are more than its positions
    assert "longer than 64 tokens: not judged" in capsys.readouterr().out
    code, out, err = said("evaluate", tmp_path / "run", "--texts", "1", "--seconds", "0.1")
    assert code == 0, err
    assert "recalled, at depth" not in out and "reads tokens/s" in out
    assert "4 pairs do not fit" in refused(said, tmp_path / "run", "--parts", "needle")
