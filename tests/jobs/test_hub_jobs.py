"""A run in a job of the Hub is paid by who agreed to it, is followed as any run, and ends in the same student."""

import json

import pytest

from linearizer import pipeline, run_in_job
from linearizer.jobs.hub_api import BUCKET
from linearizer.model.checkpoint import load_of_run
from linearizer.pipeline import linearize
from linearizer.progress import finish
from linearizer.run.plan import Plan
from tests.support.runs import QUICK, log_of, wait_for, wait_until, weights_of

ME = "hf_fake_me"
PLAN = Plan("demo", steps=2, **QUICK)
LONG = Plan("demo", steps=100_000, **QUICK)
CAP = "a job on cpu-basic costs me \\$0.01 an hour, and at most \\$0.00 for 15 minutes"


@pytest.fixture
def begin(hub, tmp_path):
    """Begin runs in jobs; when the test is over none is at work any more."""
    begun = []

    def run(plan=PLAN, name="run", token=ME, **how):
        begun.append(run_in_job(tmp_path / "runs" / name, plan, "cpu-basic", token=token, **{"yes": True, **how}))
        return begun[-1]

    yield run
    hub.clear_jobs()
    for run in begun:
        wait_until(lambda run=run: not run.is_locked)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run of the same plan on this machine."""
    run = pipeline.begin(tmp_path_factory.mktemp("local") / "run", PLAN)
    finish(linearize(run))
    return run


def said(run):
    """List what a log says, without times and the job itself."""
    events = [event for event in run.events() if event["event"] not in ("hub job", "queued")]
    return [{key: event.get(key) for key in ("event", "done", "total", "unit", "layer")} for event in events]


def marked(events):
    """Keep the events that do not depend on how fast a machine is."""
    return [event for event in events if event["done"] is None or event["done"] == event["total"]]


def test_a_job_makes_the_student_that_this_machine_makes(begin, hub, local, tmp_path):
    run = begin()
    status = wait_for(run, "done")
    assert marked(said(run)) == marked(said(local))
    assert run.allocation == local.allocation and run.evaluation_parts == local.evaluation_parts
    load_of_run(run)  # completes the checkpoint with its teacher's weights, which no job sends back
    assert weights_of(run.checkpoint) == weights_of(local.checkpoint)
    assert status.published is None and log_of(run) == ""
    job = hub.jobs["job0"]
    assert job.stage == "COMPLETED" and job.spec["secrets"] == {"HF_TOKEN": ME}
    assert job.spec["timeoutSeconds"] == 15 * 60 and job.spec["flavor"] == "cpu-basic"
    assert hub.buckets[f"me/{BUCKET}"]["private"]
    assert not [path for path in hub.buckets[f"me/{BUCKET}"]["files"] if "/teacher-" in path or "hub_job" in path]
    spoken = json.dumps([job.spec["command"], job.spec["environment"], job.lines, hub.requests])
    assert ME not in spoken
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or ME.encode() not in path.read_bytes()
