"""The command line serves requests, whatever else happens to its process."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from linearizer.cli.main import main, parser
from linearizer.cli.run_commands import begin_run
from linearizer.cli.text import show_progress
from linearizer.method.checkpoint import load
from linearizer.method.measure_run import measure_teacher
from linearizer.plan.plan import Plan
from linearizer.progress import Progress, finish
from linearizer.run.folder import Run
from linearizer.teacher.load import load_teacher_of
from tests.support.runs import weights_of

SMALL = ["--texts", "2", "--length", "64", "--dtype", "float32"]
QUICK = ["--recipe", "features", *SMALL, "--steps", "2"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of the demo model, which no test may change."""
    folder = tmp_path_factory.mktemp("run") / "demo"
    assert main(["run", "demo", "--budget", "64", "--out", str(folder), *QUICK]) == 0
    return folder


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
    finish(measure_teacher(run, load_teacher_of(run.plan)))
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
    assert (
        len(held) > 3 and any(head.slots for head in held) and run.allocation.state_bytes(run.layers, 512) <= 24 * 4096
    )
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


def test_ctrl_c_stops_with_130_and_the_run_can_be_resumed(tmp_path, said):
    folder = tmp_path / "run"
    log = folder / "events.jsonl"
    process = start("run", "demo", "--out", folder, *QUICK)
    wait_for(lambda: log.exists() and '"profile"' in log.read_text(), process)
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


def read_to_end(reader, shown):
    """Gather what is written to a terminal or a pipe until its other end is closed."""
    with suppress(OSError):  # a terminal whose writer is gone
        while piece := os.read(reader, 4096):
            shown += piece


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path, monkeypatch):
    pty = pytest.importorskip("pty")
    for terminal in (True, False):
        reader, writer = pty.openpty() if terminal else os.pipe()
        shown = bytearray()
        reading = threading.Thread(target=read_to_end, args=(reader, shown))
        reading.start()
        with open(writer, "w") as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            assert main(["run", "demo", "--out", str(tmp_path / f"{terminal}"), *QUICK]) == 0
        reading.join()
        os.close(reader)
        assert (b"/s" in shown and b" left" in shown) == terminal
        assert terminal or not shown


def test_the_library_does_what_the_command_does(done, tmp_path):
    import linearizer
    from linearizer import finish, linearize

    run = linearizer.begin(
        tmp_path / "run", Plan.of("features", model="demo", budget=64, texts=2, length=64, steps=2, dtype="float32")
    )
    allocation = finish(linearize(run))
    assert allocation == linearizer.Run.open(done).allocation
    assert weights_of(run.checkpoint) == weights_of(done / "checkpoint")
    assert all(getattr(linearizer, name) for name in linearizer.__all__)


def test_help_and_bad_requests_answer_at_once():
    begin = seconds_of_children()
    subprocess.run([sys.executable, "-m", "linearizer", "--help"], check=True, capture_output=True)
    assert seconds_of_children() - begin < 2


def seconds_of_children():
    """What processes that ended have computed, however long they waited for a busy machine."""
    taken = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken.ru_utime + taken.ru_stime
