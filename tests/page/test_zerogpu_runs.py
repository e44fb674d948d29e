"""On ZeroGPU the device is lent for a step of a run at a time; elsewhere nothing is lent and nothing changes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from gradio_client.exceptions import AppError

from linearizer import pipeline
from linearizer.page import zerogpu
from linearizer.pipeline import linearize
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.page_server import SPACE, client_of, serving
from tests.support.runs import FP32, QUICK, find_process, wait_for, wait_until, weights_of

HERE = Path(__file__).parents[2]
ANN = "ann's secret, long enough"
TRAINED = Plan("demo", steps=6, **QUICK)
PRICED = Plan("demo", budget=64, strategy="windows", texts=2, length=64, **FP32)
OPTIONS = {**{name: value for name, value in QUICK.items() if name != "budget"}, "steps": 6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing interrupted."""
    made = {}
    for name, plan in (("trained", TRAINED), ("priced", PRICED)):
        made[name] = pipeline.begin(tmp_path_factory.mktemp("whole") / name, plan)
        finish(linearize(made[name]))
    return made


def student(run):
    return weights_of(run.checkpoint)


@pytest.mark.parametrize("name", ["trained", "priced"])
def test_steps_end_in_the_same_bits_as_one_piece(whole, name, tmp_path):
    run = pipeline.begin(tmp_path / "run", whole[name].plan)
    zerogpu.start(run)
    while control.state_of(run) in control.LIVE:
        time.sleep(0.05)
    assert control.state_of(run) == "done", control.status(run)
    assert student(run) == student(whole[name]) and run.evaluation_parts == whole[name].evaluation_parts
    events = [event["event"] for event in run.events()]
    assert events.count("queued") == 1 and events.count("started") >= 3
    wait_until(lambda: not run.is_locked)


def test_without_the_package_that_lends_it_is_said_what_to_install(tmp_path):
    (tmp_path / "spaces.py").write_text("raise ModuleNotFoundError('none here', name='spaces')")
    known = {**os.environ, "SPACES_ZERO_GPU": "true", "PYTHONPATH": f"{tmp_path}:{HERE}"}
    ran = subprocess.run([sys.executable, "app.py"], cwd=HERE, env=known, capture_output=True, text=True)
    assert ran.returncode == 2 and "pip install spaces, or unset SPACES_ZERO_GPU" in ran.stderr
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("linearizer: ")


@contextmanager
def lending(root, seconds):
    """Serve a Space on a stand-in for ZeroGPU that lends so many seconds at a time."""
    (root / "left").write_text("10000")
    known = {
        "SPACES_ZERO_GPU": "true",
        "LINEARIZER_SLICE": str(seconds),
        "STAND_IN_LENT": str(root / "lent"),
        "STAND_IN_LEFT": str(root / "left"),
        "PYTHONPATH": f"{HERE / 'tests' / 'support' / 'zerogpu'}:{HERE}",
    }
    with serving(root / "runs", **SPACE, **known) as (url, _, log):
        yield client_of(url), root, log


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    with lending(tmp_path_factory.mktemp("space"), 100) as result:
        yield result


def run_of(root, name):
    return Run(next(root.glob(f"runs/*/{name}")))


def tracebacks(log):
    """Count what a server wrote of faults; one, that Gradio misses the package that reloads Spaces, is none of ours."""
    text = log.read_text()
    return text.count("Traceback") - text.count("required to run hot-reloading in Spaces")


def begin(client, root, **options):
    return run_of(root, client.predict("demo", 64, "Quick", {**OPTIONS, **options}, ANN, api_name="/start_run"))


def test_a_space_lends_the_device_for_a_step_at_a_time_to_the_visitor_who_asked(space, whole):
    client, root, log = space
    run = begin(client, root)
    states = set()
    while (state := control.state_of(run)) in control.LIVE:
        states.add(state)
        assert find_process(run) is None
        time.sleep(0.05)
    assert state == "done", (control.status(run), log.read_text())
    assert states <= {"queued", "running"}
    assert student(run) == student(whole["trained"])
    lent = [line.split() for line in (root / "lent").read_text().splitlines()]
    events = [event["event"] for event in run.events()]
    assert len(lent) == events.count("started") >= 3 and {seconds for _, seconds in lent} == {"100"}
    both = client.predict(run.folder.name, "Once", 8, 0, False, ANN, api_name="/compare_models")
    assert both["teacher"]["tokens"] == both["student"]["tokens"] == 8
    with pytest.raises(AppError, match="not one of your runs"):  # a sentence, though it was raised in another process
        client.predict("x", "Once", 8, 0, False, ANN, api_name="/compare_models")
    assert not tracebacks(log)


def test_where_nothing_is_lent_any_more_the_run_stops_says_so_and_goes_on_later(space, whole):
    client, root, log = space
    (root / "left").write_text("150")
    run = begin(client, root)
    result = wait_for(run, "stopped")
    assert "ZeroGPU lends no device (ZeroGPU quota exceeded: You have exceeded your free" in result.error
    assert "(100s requested vs. 50s left)" in result.error and result.error.endswith("is kept: resume it later")
    wait_until(lambda: not run.is_locked)
    (root / "left").write_text("10000")
    client.predict(run.folder.name, ANN, api_name="/resume_run")
    wait_for(run, "done", seconds=200)
    assert student(run) == student(whole["trained"])
    assert [event["event"] for event in run.events()].count("profiled") == 1
    assert not tracebacks(log)


def test_a_step_that_takes_longer_than_the_device_is_lent_is_a_sentence(tmp_path):
    with lending(tmp_path, 1) as (client, root, _):
        run = begin(client, root, texts=32, length=1024)
        result = wait_for(run, "failed")
    assert "takes longer than the 1 seconds for which ZeroGPU lends its device: resume the run" in result.error
    wait_until(lambda: not run.is_locked)
    assert run.profile is None


def test_a_device_that_is_taken_back_too_early_costs_only_what_was_not_saved(space):
    client, root, log = space
    run = begin(client, root, steps=300)  # saved at 25, 50, …
    wait_until(lambda: any(event["event"] == "distill" and event["done"] > 30 for event in run.events()), 200)
    os.kill(int((root / "lent").read_text().split()[-2]), signal.SIGKILL)
    assert "the step 'distill' takes longer" in wait_for(run, "failed").error
    wait_until(lambda: not run.is_locked)
    before = len(run.events())
    client.predict(run.folder.name, ANN, api_name="/resume_run")
    wait_until(lambda: any(event["event"] == "distill" for event in run.events()[before:]), 200)
    assert next(event["done"] for event in run.events()[before:] if event["event"] == "distill") > 25
    client.predict(run.folder.name, ANN, api_name="/stop_run")
    wait_for(run, "stopped")
    wait_until(lambda: not run.is_locked)
    assert not tracebacks(log)


def test_of_an_evaluation_each_part_is_a_step(space, whole):
    client, root, log = space
    folder = next(root.glob("runs/*")) / "evaluated"
    shutil.copytree(whole["trained"].folder, folder)
    run, parts = Run(folder), ["language", "recall", "generation"]
    before = len((root / "lent").read_text().splitlines())
    client.predict("evaluated", parts, {"texts": 2}, ANN, api_name="/evaluate_run")
    while (state := control.state_of(run.evaluating)) in control.LIVE:
        assert find_process(run) is None
        time.sleep(0.05)
    assert state == "done", (control.status(run.evaluating), log.read_text())
    events = [event for event in run.events() if run.evaluating.owns_event(event)]
    assert [event["part"] for event in events if event["event"] == "examined"] == parts
    lent = len((root / "lent").read_text().splitlines()) - before
    assert lent == [event["event"] for event in events].count("started") >= 3
    assert set(run.evaluation_parts) == set(parts) and run.done
    assert not tracebacks(log)
