"""The command line serves requests, and answers bad ones with a sentence and exit code 2."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from linearizer.__main__ import main
from linearizer.checkpoint import load
from linearizer.plan import Plan
from linearizer.run import Run

SMALL = ["--texts", "2", "--length", "64", "--samples", "128"]
QUICK = ["--recipe", "features", *SMALL, "--steps", "2"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of the demo model, which no test may change."""
    folder = tmp_path_factory.mktemp("run") / "demo"
    assert main(["run", "demo", "--budget", "64", "--out", str(folder), *QUICK]) == 0
    return folder


def said(capsys, *arguments):
    """The exit code, and what was written to standard output and to standard error."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_ends_in_a_checkpoint_that_writes(done):
    student = load(done / "checkpoint")
    ids = torch.tensor([[5, 6, 7]])
    assert student.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4).shape == (1, 7)
    assert {path.name for path in done.iterdir()} >= {"plan.json", "profile.json", "allocation.json", "checkpoint"}
    names = ["queued", "started", "profiled", "allocated", "distilled", "evaluated", "done"]
    assert milestones(Run.open(done)) == names
    progress = {
        event["event"]: (event["done"], event["total"]) for event in Run.open(done).events() if "total" in event
    }
    assert progress == {"profile": (32, 32), "distill": (2, 2), "evaluate": (2, 2), "recall": (3, 3)}


def milestones(run):
    return [event["event"] for event in run.events() if "total" not in event]


def test_json_is_all_there_is_on_standard_output(done, capsys):
    code, out, _ = said(capsys, "inspect", "demo", "--json")
    assert code == 0 and json.loads(out)["supported"] is True
    code, out, _ = said(capsys, "allocate", done, "--budget", "128", "--json")
    assert code == 0 and json.loads(out)["breakeven_tokens"] <= 128
    code, out, _ = said(capsys, "compare", done, "--tokens", "4", "--json")
    sides = json.loads(out)
    assert code == 0 and sides["student"]["tokens"] == sides["teacher"]["tokens"] == 4
    assert sides["student"]["state_bytes"] <= 64 * 4096


def test_the_tables_say_what_was_found(done, capsys):
    evaluation = Run.open(done).evaluation
    assert [one["name"] for one in evaluation] == ["teacher", "student", "window"]
    assert evaluation[2]["state_bytes"] <= evaluation[1]["state_bytes"] <= 64 * 4096
    assert "8 query heads on 4 KV heads of size 32" in said(capsys, "inspect", "demo")[1]
    assert "smaller than the cache from" in said(capsys, "allocate", done)[1]
    assert "remembers" in said(capsys, "compare", done, "--tokens", "3", "--sample")[1]


def test_allocating_again_leaves_a_finished_run_alone(done, capsys):
    before = (done / "allocation.json").read_bytes()
    said(capsys, "allocate", done, "--budget", "256", "--strategy", "fix")
    assert (done / "allocation.json").read_bytes() == before


def test_a_profile_is_taken_up_by_the_run_that_follows(tmp_path, capsys):
    folder = tmp_path / "run"
    assert said(capsys, "profile", "demo", "--out", folder, *QUICK)[0] == 0
    profile = (folder / "profile.json").stat().st_mtime_ns
    assert said(capsys, "allocate", folder, "--features", "32")[0] == 0
    assert Run.open(folder).plan.features == 32
    code, out, _ = said(capsys, "run", "demo", "--features", "32", "--out", folder, "--resume", *QUICK)
    assert code == 0 and "32 KV heads with 32.0 features on average" in out
    assert (folder / "profile.json").stat().st_mtime_ns == profile


def test_a_budget_is_shared_out_by_what_each_head_costs(tmp_path, capsys):
    folder = tmp_path / "run"
    asked = ["--budget", "24", "--target-length", "512"]
    code, out, err = said(capsys, "run", "demo", *asked, "--out", folder, *SMALL)
    assert code == 0, err
    assert "gain: " in out and " KV heads with slots" in out
    run = Run.open(folder)
    held = {head for row in run.allocation.heads for head in row}
    assert (
        len(held) > 3 and any(head.slots for head in held) and run.allocation.state_bytes(run.layers, 512) <= 24 * 4096
    )
    steps = ["queued", "started", "profiled", "tried", "priced", "exchanged", "allocated", "evaluated", "done"]
    assert milestones(run) == steps
    (tried,) = (event for event in run.events() if event["event"] == "tried")
    assert min(tried["sinks"], key=tried["sinks"].get) == str(tried["kept"]) == str(run.allocation.sinks)
    priced = [event for event in run.events() if event["event"] == "price"][-1]
    assert priced["done"] == priced["total"] == 32 * len(run.prices.options)
    code, out, _ = said(capsys, "allocate", folder, "--budget", "200", "--constant")
    assert code == 0 and "softmax" not in out and "8 bits a number" in out
    code, _, err = said(capsys, "allocate", folder, "--budget", "200", "--bits", "16")
    assert code == 2 and "measured with 8 bits" in err
    code, _, err = said(capsys, "run", "demo", "--budget", "3", "--sinks", "2", *SMALL)
    assert code == 2 and "take 4" in err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--budget", "0"], "budget 0 buys nothing"),
        (["--budget", "-5"], "budget -5 buys nothing"),
        (["--budget", "many"], "invalid int value: 'many'"),
        (["--budget", "9" * 30], "buys nothing"),
        (["--budget", "3"], "is too small"),
        (["--budget", "64", "--features", "64"], "not allowed with"),
        (["--window", "-1"], "window -1 cannot be"),
        (["--target-length", "0"], "target length 0 is no length: give at least 1"),
        (["--target-length", "-5"], "target length -5 is no length"),
        (["--window", "99999"], "is too small"),
        (["--feature-map", "magic"], "'magic' is none of prf, performer"),
        (["--loss", "magic"], "loss 'magic' is none of softmax"),
        (["--steps", "-1"], "steps -1 cannot be"),
        (["--batch", "0"], "batch 0 is too few"),
        (["--strategy", "magic"], "no strategy 'magic'; there are fix"),
        (["--text", "magic"], "no source of text"),
        (["--text", "file:absent.txt"], "does not exist"),
        (["--texts", "9999999"], "are needed"),
        (["--samples", "5"], "samples 5"),
        (["--gauge", "magic"], "gauge 'magic'"),
        (["--device", "magic"], "device 'magic' is not to be had here"),
        (["--dtype", "magic"], "magic"),
        (["--resume"], "--resume needs --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused_with_a_sentence_and_leaves_nothing(
    arguments, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, "run", "demo", *QUICK, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err and err.startswith("linearizer: ") and err.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "content, sentence", [(b"", "holds no text"), (bytes(range(256)) * 9, "no text in UTF-8"), (b"few", "are needed")]
)
def test_a_file_that_is_no_text_is_refused(content, sentence, tmp_path, capsys):
    (tmp_path / "text").write_bytes(content)
    code, _, err = said(capsys, "run", "demo", "--text", f"file:{tmp_path / 'text'}", "--out", tmp_path / "run")
    assert code == 2 and sentence in err


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = said(capsys, "run", "demo", "--out", tmp_path)
    assert code == 2 and "holds something else" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    code, _, err = said(capsys, "run", "demo", "--out", tmp_path / "thesis.tex")
    assert code == 2 and (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_cannot_be_written_is_refused(capsys):
    code, _, err = said(capsys, "run", "demo", "--out", "/proc/run")
    assert code == 2 and "cannot be written" in err


def test_a_run_is_not_mixed_with_another(done, capsys):
    code, _, err = said(capsys, "run", "demo", "--budget", "64", "--out", done, *QUICK)
    assert code == 2 and "add --resume" in err
    code, _, err = said(capsys, "run", "demo", "--budget", "65", "--out", done, "--resume", *QUICK)
    assert code == 2 and "budget 65 instead of 64" in err
    assert said(capsys, "run", "demo", "--budget", "64", "--out", done, "--resume", *QUICK)[0] == 0


def test_steps_of_a_folder_that_is_no_run_are_refused(tmp_path, capsys):
    for command in ("allocate", "compare"):
        code, _, err = said(capsys, command, tmp_path)
        assert code == 2 and "holds no run" in err


def spoil(folder, of, value):
    """Copy the demo model with one weight changed, whose name ends in `of`; give that name."""
    from linearizer.hub import find_model

    shutil.copytree(find_model("demo").folder, folder)
    for shard in folder.glob("*.safetensors"):
        weights = load_file(shard)
        for name in [name for name in weights if name.endswith(of)][:1]:
            weights[name][0] = value
            save_file(weights, shard, {"format": "pt"})
            return name


def test_a_teacher_with_nan_weights_is_refused_by_name(tmp_path, capsys):
    name = spoil(tmp_path / "model", "mlp.down_proj.weight", float("nan"))
    code, _, err = said(capsys, "run", tmp_path / "model", "--out", tmp_path / "run")
    assert code == 2 and name in err and "NaN" in err
    assert not (tmp_path / "run").exists()


def test_a_teacher_whose_logits_are_no_numbers_is_refused_before_it_is_measured(tmp_path, capsys):
    spoil(tmp_path / "model", "model.norm.weight", 3e38)
    code, _, err = said(capsys, "run", tmp_path / "model", "--budget", 64, "--out", tmp_path / "run")
    assert code == 1 and "the teacher's logits are not finite" in err
    assert not (tmp_path / "run" / "profile.json").exists()


def test_an_unsupported_model_is_said_on_standard_error(tmp_path, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("falcon", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "falcon")
    code, out, err = said(capsys, "inspect", tmp_path / "falcon")
    assert code == 2 and "supported    no, because" in out and "cannot be linearized, because" in err


def start(*arguments, **how):
    return subprocess.Popen(
        [sys.executable, "-m", "linearizer", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


LONG = ["--recipe", "features", "--texts", "16", "--length", "256", "--samples", "1024", "--steps", "4"]


def test_ctrl_c_stops_with_130_and_the_run_can_be_resumed(tmp_path, capsys):
    folder = tmp_path / "run"
    process = start("run", "demo", "--out", folder, *LONG)
    wait_for((folder / "events.jsonl").exists, process)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"--resume --out {folder}" in err and "Traceback" not in err
    assert said(capsys, "run", "demo", "--out", folder, "--resume", *LONG)[0] == 0
    assert (folder / "checkpoint" / "model.safetensors").exists()


def test_a_killed_run_resumes_to_the_same_student(done, tmp_path, capsys):
    folder = tmp_path / "run"
    process = start("run", "demo", "--budget", "64", "--out", folder, *QUICK)
    wait_for((folder / "profile.json").exists, process)
    process.kill()
    process.communicate()
    (folder / "allocation.json.unfinished").write_text("cut off wh")  # as a kill in the middle of a write leaves it
    code, _, err = said(capsys, "run", "demo", "--budget", "64", "--out", folder, "--resume", *QUICK)
    assert code == 0, err
    weights = "checkpoint/model.safetensors"
    assert (folder / weights).read_bytes() == (done / weights).read_bytes()


def test_two_processes_never_write_one_run(done, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with Run.open(tmp_path / "run").locked():
        process = start("run", "demo", "--budget", "64", "--out", tmp_path / "run", "--resume", *QUICK)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "being written by another process" in err


def test_a_run_that_is_refused_because_another_process_has_it_is_left_alone(tmp_path, capsys):
    run = Run.begin(tmp_path / "run", Plan("demo", budget=64))
    with run.locked():
        code, _, err = said(capsys, "run", "demo", "--budget", "64", "--out", run.folder, "--resume")
    assert code == 2 and "being written by another process" in err
    assert run.plan == Plan("demo", budget=64)


def test_a_full_disk_is_a_sentence_and_keeps_what_was_finished(done, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    shutil.rmtree(folder / "checkpoint")

    def files_of_a_megabyte_at_most():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    process = start(
        "run", "demo", "--budget", "64", "--out", folder, "--resume", *QUICK, preexec_fn=files_of_a_megabyte_at_most
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "cannot be written" in err and "Traceback" not in err
    assert (folder / "profile.json").read_bytes() == (done / "profile.json").read_bytes()
    assert not (folder / "checkpoint").exists() and not (folder / "checkpoint.unfinished").exists()


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path):
    pty = pytest.importorskip("pty")
    for terminal in (True, False):
        reader, writer = pty.openpty() if terminal else os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "linearizer", "run", "demo", "--out", tmp_path / f"{terminal}", *QUICK],
            stdout=subprocess.DEVNULL,
            stderr=writer,
        )
        os.close(writer)
        shown = b""
        try:
            while piece := os.read(reader, 4096):
                shown += piece
        except OSError:
            pass  # a terminal whose writer is gone
        os.close(reader)
        assert process.wait() == 0
        assert (b"/s" in shown and b" left" in shown) == terminal
        assert terminal or shown == b""


def test_the_library_does_what_the_command_does(done, tmp_path):
    import linearizer
    from linearizer import finish, linearize

    run = linearizer.Run.begin(
        tmp_path / "run", Plan.of("features", model="demo", budget=64, texts=2, length=64, samples=128, steps=2)
    )
    allocation = finish(linearize(run))
    assert allocation == linearizer.Run.open(done).allocation
    weights = "checkpoint/model.safetensors"
    assert (run.folder / weights).read_bytes() == (done / weights).read_bytes()
    assert all(getattr(linearizer, name) for name in linearizer.__all__)


def test_help_and_bad_requests_answer_at_once():
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "linearizer", "--help"], check=True, capture_output=True)
    assert time.perf_counter() - begin < 2
