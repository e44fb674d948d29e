"""The command line sees, follows, stops, resumes and deletes runs, whoever started them."""

import json
import os
import signal
import subprocess
import sys

import pytest

from linearizer.pipeline import begin
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.runs import end_runs, log_of, process_of, start_command, wait_for, wait_for_event, wait_until

QUICK = "--recipe features --budget 64 --texts 2 --length 64 --dtype float32".split()
LONG = [*QUICK, "--steps", "100000"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of runs, none of which is at work when the test is over."""
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    yield tmp_path
    end_runs(tmp_path)


def test_a_run_in_the_background_is_followed_to_its_end_and_deleted(root, said):
    code, out, err = said("run", "demo", *QUICK, "--steps", "2", "--detach", "--json")
    run = Run.open(root / "demo-64")
    assert code == 0 and json.loads(out) == {"run": str(run.folder), "state": "queued"}, err
    assert os.getsid(int(process_of(run).name)) != os.getsid(0)  # it outlives who started it
    code, out, err = said("runs", "attach", "demo-64")
    assert (code, err) == (0, "") and "the student is in" in out
    assert log_of(run) == ""
    code, out, _ = said("runs")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["run", "model", "budget", "state", "progress", "disk", "age"]
    assert lines[1][:6] == ["demo-64", "demo", "64", "done", "evaluate", "1/1"]
    code, out, _ = said("runs", "attach", "demo-64", "--json")
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == run.events()
    code, out, _ = said("runs", "delete", "demo-64", "--json")
    assert code == 0 and json.loads(out) == {"deleted": str(run.folder)} and not run.folder.exists()
    assert said("runs") == (0, f"no runs in {root}\n", "")


def test_a_run_in_a_terminal_is_waited_for_and_stopped_from_another_and_whoever_leaves_leaves_it_at_work(root, said):
    worker = start_command("run", "demo", *LONG, "--out", str(root / "mine"))
    wait_until(lambda: any(status.state == "running" for status in control.runs_in(root)))
    second = start_command("run", "demo", *LONG, "--out", str(root / "second"))
    wait_until(lambda: any(status.state == "queued" for status in control.runs_in(root)))
    assert any("waiting for the runs before this one: 1" in line for line in second.stderr)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=180)
    assert second.returncode == 130
    assert [event["event"] for event in Run(root / "second").events()] == ["queued", "stopped"]
    run = Run.open(root / "mine")
    wait_for_event(run, "distill")
    assert said("runs", "stop", root / "mine")[0] == 0
    _, err = worker.communicate(timeout=180)
    assert worker.returncode == 130 and "stopped on request" in err and "Traceback" not in err
    assert control.status(run).state == "stopped"
    code, _, err = said("runs", "attach", "mine")
    assert code == 130 and "is stopped: linearizer runs resume" in err
    code, out, _ = said("runs", "resume", "mine")
    assert code == 0 and f"{run.folder} is queued: linearizer runs attach {run.folder}" in out
    watcher, reached = start_command("runs", "attach", "mine"), len(run.events())
    wait_until(lambda: "distill" in [event["event"] for event in run.events()[reached:]])
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=180)
    assert watcher.returncode == 130 and "which goes on" in err and "Traceback" not in err
    reached = len(run.events())
    wait_until(lambda: len(run.events()) > reached)
    code, out, _ = said("runs", "--json")
    (status,) = (each for each in json.loads(out) if each["name"] == "mine")
    assert (status["state"], status["model"], status["budget"], status["step"]["event"]) == (
        "running", "demo", 64, "distill",
    )  # fmt: skip
    code, out, _ = said("runs", "use", "mine")
    assert code == 0 and "will end its training after this step" in out
    assert wait_for(run, "done").step["event"] == "evaluate"


def test_a_run_that_failed_is_shown_with_its_reason(root, said):
    run = begin(root / "demo-64", Plan("demo", budget=64))
    for event, details in (("queued", {}), ("started", {}), ("failed", {"error": "'model' is not a folder here"})):
        run.log(event, **details)
    code, out, err = said("runs", "attach", "demo-64")
    assert (code, out) == (1, "") and "failed" in err and "is not a folder here" in err
    assert "demo-64: 'model' is not a folder here" in said("runs")[1]


@pytest.mark.parametrize("command", ["allocate", "compare", "evaluate", "push", "runs"])
def test_every_command_takes_a_run_by_its_name_and_suggests_those_that_are_near(root, said, command):
    Run.create(root / "demo-64", Plan("demo", budget=64))
    Run.create(root / "other", Plan("demo", budget=64))

    def asked(name):
        arguments = {"push": ["push", name, "me/x"], "runs": ["runs", "stop", name]}.get(command, [command, name])
        code, out, err = said(*arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1
        return err

    assert "there is no run" not in asked("demo-64") + asked(root / "demo-64")
    assert "there is no run 'deno-64': did you mean demo-64?" in asked("deno-64")
    assert f"there is no run 'x': '{root}' has demo-64, other" in asked("x")
    assert "there is no run 'xxx" in asked("x" * 5000)
    assert "that folder holds no run; " in asked(root)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["stop"], "name the run"),
        (["list", "demo-64"], "list shows all runs, not 'demo-64'"),
        (["magic"], "invalid choice: 'magic'"),
        (["delete", "../.."], "there is no run '../..'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused_with_a_sentence(arguments, sentence, root, said):
    code, out, err = said("runs", *arguments)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_runs_are_listed_without_a_heavy_library(root):
    program = "import sys, linearizer.cli.main as m; m.main(['runs']); print({'torch', 'gradio'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == f"no runs in {root}\nset()\n"
