"""The command line serves requests, whatever else happens to its process."""

import io
import json
import shutil
import signal
import sys

import pytest
import torch

import linearizer
from linearizer.cli.main import parser
from linearizer.cli.run_commands import begin_run
from linearizer.cli.text import ProgressBar, show_progress
from linearizer.method.checkpoint import load
from linearizer.method.measure_run import measure_teacher
from linearizer.method.texts import TextsOfRun
from linearizer.progress import Progress, finish
from linearizer.run.folder import Run
from linearizer.teacher.load import load_teacher_of
from tests.support.runs import start_command, wait_until, weights_of

SMALL = ["--texts", "2", "--length", "128", "--dtype", "float32"]
QUICK = ["--recipe", "features", *SMALL, "--steps", "2"]  # as of trained_run


@pytest.fixture(scope="module")
def done(trained_run, tmp_path_factory):
    """A copy of a finished run of the demo model."""
    return shutil.copytree(trained_run, tmp_path_factory.mktemp("run") / "demo")


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
    assert progress == {"profile": (32, 32), "distill": (2, 2), "evaluate": (1, 1)}


def milestones(run):
    return [event["event"] for event in run.events() if "total" not in event]


def test_json_is_all_there_is_on_standard_output(done, said):
    code, out, _ = said("inspect", "demo", "--json")
    assert code == 0 and json.loads(out)["supported"] is True
    code, out, _ = said("allocate", done, "--budget", "128", "--json")
    assert code == 0 and json.loads(out)["breakeven_tokens"] <= 128
    code, out, _ = said("compare", done, "--tokens", "4", "--json")
    sides = json.loads(out)
    assert code == 0 and sides["student"]["tokens"] == sides["teacher"]["tokens"] == 4
    assert sides["student"]["state_bytes"] <= 64 * 4096


def test_a_profile_is_taken_up_by_the_run_that_follows(tmp_path, said):
    folder = tmp_path / "run"
    run = begin_run(parser().parse_args(["run", "demo", "--out", str(folder), *QUICK]))
    teacher = load_teacher_of(run.plan)
    finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
    profile = (folder / "profile.json").stat().st_mtime_ns
    assert said("allocate", folder, "--features", "32")[0] == 0
    assert Run.open(folder).plan.features == 32
    code, out, _ = said("run", "demo", "--features", "32", "--out", folder, "--resume", *QUICK)
    assert code == 0 and "32 KV heads with 32.0 features on average" in out
    assert (folder / "profile.json").stat().st_mtime_ns == profile


def test_a_budget_is_shared_out_by_what_each_head_costs(tmp_path, said):
    folder = tmp_path / "run"
    options = ["--budget", "24", "--target-length", "512"]
    code, out, err = said("run", "demo", *options, "--out", folder, *SMALL)
    assert code == 0, err
    assert "gain: " in out and " KV heads with slots" in out
    run = Run.open(folder)
    held = {head for row in run.allocation.heads for head in row}
    assert len(held) > 3 and any(head.slots for head in held)
    assert run.allocation.state_bytes(run.layers, 512) <= 24 * 4096
    steps = ["queued", "started", "profiled", "tried", "priced", "checked", "allocated", "evaluated", "done"]
    assert milestones(run) == steps
    (tried,) = (event for event in run.events() if event["event"] == "tried")
    assert min(tried["sinks"], key=tried["sinks"].get) == str(tried["kept"]) == str(run.allocation.sinks)
    code, out, _ = said("allocate", folder, "--budget", "200")
    assert code == 0 and "softmax" not in out and "8 bits a number" in out and "whatever the length" in out
    code, out, _ = said("allocate", folder, "--budget", "200", "--may-grow")
    assert code == 0 and "softmax" in out and "after 128k tokens" in out
    code, _, err = said("allocate", folder, "--budget", "200", "--bits", "16")
    assert code == 2 and "measured with 8 bits" in err
    code, _, err = said("run", "demo", "--budget", "1", "--sinks", "2", *SMALL)
    assert code == 2 and "take 4" in err


def test_a_run_is_not_mixed_with_another(done, said):
    code, _, err = said("run", "demo", "--budget", "64", "--out", done, *QUICK)
    assert code == 2 and "add --resume" in err
    code, _, err = said("run", "demo", "--budget", "65", "--out", done, "--resume", *QUICK)
    assert code == 2 and "budget 65 instead of 64" in err
    assert said("run", "demo", "--budget", "64", "--out", done, "--resume", *QUICK)[0] == 0


def test_ctrl_c_stops_with_130_and_the_run_can_be_resumed(tmp_path, said):
    folder = tmp_path / "run"
    log = folder / "events.jsonl"
    process = start_command("run", "demo", "--out", folder, *QUICK)
    wait_until(lambda: log.exists() and '"profile"' in log.read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    assert f"--resume --out {folder}" in err and "Traceback" not in err
    assert said("run", "demo", "--out", folder, "--resume", *QUICK)[0] == 0
    assert weights_of(folder / "checkpoint")


def test_ctrl_c_that_python_drops_in_a_destructor_ends_the_work_still(capsys):
    class Freed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def steps():
        for done in range(3):
            seen.append(done)
            held = Freed()
            del held
            yield Progress("profile", done, 3, "batches")

    seen = []
    with pytest.raises(KeyboardInterrupt):
        show_progress(steps())
    assert seen == [0] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_only_there(terminal, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    show_progress(Progress("distill", done, 3, "steps") for done in range(4))
    assert ("3/3 steps" in stream.getvalue() and "/s" in stream.getvalue()) == terminal
    assert terminal or not stream.getvalue()


def test_each_phase_of_a_training_has_its_own_speed(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    bar = ProgressBar(stream)
    for done, now in [(1, 0.0), (11, 100.0), (1, 101.0), (3, 102.0)]:  # the second phase is faster
        bar.show(Progress("distill", done, 11, "steps"), now)
    assert stream.getvalue().rstrip().endswith("3/11 steps  2.0/s  4 s left")


def test_a_reader_that_leaves_early_gets_no_traceback():
    with start_command("run", "demo", "--recipe", "list") as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(180) == 1


def test_the_library_has_what_it_names():
    assert all(getattr(linearizer, name) for name in linearizer.__all__)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--version"])
    assert capsys.readouterr().out == f"linearizer {linearizer.__version__}\n"
