"""A run in a job of the Hub is paid by who agreed to it, is followed as any run, and ends in the same student."""

import json
import os
import signal
import threading
from contextlib import suppress

import pytest

from linearizer import pipeline, run_in_job
from linearizer.errors import LinearizerError, RequestError
from linearizer.hub.jobs_api import BUCKET, Account, Hardware
from linearizer.method.checkpoint import load_of_run
from linearizer.pipeline import linearize
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE, HubJob
from linearizer.teacher import streaming
from linearizer.workers import control, hub_jobs, hub_work
from linearizer.workers.hub_jobs import follow_job
from linearizer.workers.job_minutes import guess_minutes
from linearizer.workers.runs import delete_run
from tests.support.runs import (
    QUICK,
    inspection_of,
    log_of,
    process_of,
    wait_for,
    wait_for_event,
    wait_until,
    weights_of,
)

ME, OFFER = "hf_fake_me", HubJob("me", "cpu-basic", 15, 0.01)
PLAN, LONG = (Plan("demo", steps=steps, **QUICK) for steps in (2, 100_000))
EVENT = 'print(\'{"time": 1.0, "event": "%s"}\', flush=True)'
GPUS = (("small", "2 GB"), ("large", "80 GB"))
pytestmark = [  # how the Hub's client sends files
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Cannot enable progress bars"),
]


@pytest.fixture
def begin(hub, tmp_path):
    """Begin runs in jobs; wait at the end of the test until none is running."""
    begun = []

    def run(plan=PLAN, **options):
        options = {"flavor": "cpu-basic", "token": ME, "yes": True, **options}
        begun.append(run_in_job(tmp_path / "runs" / "run", plan, **options))
        return begun[-1]

    yield run
    hub.clear_jobs()
    for run in begun:
        wait_until(lambda run=run: not run.is_locked)


@pytest.fixture
def queued(hub, tmp_path, monkeypatch):
    """A run whose job was agreed to and that nobody follows yet; jobs say nothing and end well."""
    hub.program = "pass"
    monkeypatch.setattr(hub_jobs, "POLL_SECONDS", 0.2)
    run = pipeline.begin(tmp_path / "runs" / "run", PLAN, ME, here=False)
    run.write_product(FILE, OFFER.to_json())
    run.log(EventName.QUEUED, cap=OFFER.cap)
    yield run
    hub.clear_jobs()


def follow(run, token=ME):
    """Follow a run here, as the process that is started for it does."""
    with run.take_lock(), suppress(LinearizerError):
        follow_job(run, token)
    return control.status(run)


def marks(run):
    """List the events of a log that do not depend on the speed of a machine, without times and the job itself."""
    events = [event for event in run.events() if event["event"] not in (EventName.HUB_JOB, EventName.QUEUED)]
    ends = [event for event in events if event.get("done") == event.get("total")]
    return [{key: event.get(key) for key in ("event", "done", "total", "unit", "layer")} for event in ends]


def test_a_job_makes_and_publishes_the_student_that_this_machine_makes(begin, hub, tmp_path):
    hub.fail_next("%2Fcode?recursive", 403, skip=1)  # the job's first request for its code,
    hub.fail_next("%2Frun%2Fbegun.json", 403)  # and for its run
    run = begin(push="student")
    local = pipeline.begin(tmp_path / "local", PLAN)
    finish(linearize(local))
    status = wait_for(run, "done")
    wait_until(lambda: not run.is_locked)
    assert [mark for mark in marks(run) if mark["event"] != "published"] == marks(local)
    assert len({event["time"] for event in run.events()}) >= len(marks(local))
    assert run.allocation == local.allocation and run.evaluation_parts == local.evaluation_parts
    assert run.plan == local.plan and run.begun.settled
    load_of_run(run)  # completes the checkpoint with its teacher's weights, which no job sends back
    assert weights_of(run.checkpoint) == weights_of(local.checkpoint)
    assert status.published["repo_id"] == "me/student" and hub.repos["models", "me/student"].private
    job, bucket = hub.jobs["job0"], hub.buckets[f"me/{BUCKET}"]
    assert (job.stage, job.spec["flavor"], job.spec["timeoutSeconds"]) == ("COMPLETED", "cpu-basic", 15 * 60)
    assert "the code cannot be fetched now: " in json.dumps(job.lines)
    assert bucket["private"] and not [path for path in bucket["files"] if "/teacher-" in path or "hub_job.json" in path]
    assert job.spec["secrets"] == {"HF_TOKEN": ME} and "Traceback" not in log_of(run)
    assert ME not in json.dumps([job.spec["command"], job.spec["environment"], job.lines, hub.requests])
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or ME.encode() not in path.read_bytes()
    hub_jobs.forget_in_bucket(run, ME)
    assert not [path for path in bucket["files"] if run.id in path]


def test_whoever_follows_a_job_keeps_the_terms_that_it_began_with(queued):
    terms = queued.read(FILE)
    with queued.take_lock(), pytest.raises(LinearizerError):
        hub_jobs.resume_in_job(queued, ME, yes=True)  # at the price of today
    assert queued.read(FILE) == terms


def test_a_run_is_attached_to_again_stopped_and_goes_on_in_another_job(begin, hub):
    run = begin(LONG)
    wait_for_event(run, "distill", 2)
    os.kill(int(process_of(run).name), signal.SIGKILL)
    wait_for(run, "lost")
    hub_jobs.resume_in_job(run, ME)  # nothing to agree to: the job goes on
    wait_until(lambda: control.state_of(run) == "running")
    control.stop(run, "enough")
    assert wait_for(run, "stopped").error == "enough" and [*hub.jobs] == ["job0"]
    wait_until(lambda: not run.is_locked)
    lines = run.log_file.read_text().splitlines()
    job = hub.jobs["job0"]
    assert len(lines) == len(set(lines)) and job.stage == "COMPLETED", (job.message, job.lines)
    last = max(event["done"] for event in run.events() if event["event"] == "distill")
    with pytest.raises(
        RequestError, match="needs another job, and a job on cpu-basic costs me .* add --yes to begin it"
    ):
        hub_jobs.resume_in_job(run, ME)
    assert [*hub.jobs] == ["job0"]
    hub_jobs.resume_in_job(run, ME, yes=True)
    wait_for_event(run, "distill", last + 1)
    control.use_now(run)
    wait_for(run, "done")
    steps = [event["done"] for event in run.events() if event["event"] == "distill"]
    assert [*hub.jobs] == ["job0", "job1"] and steps.count(1) == 1
    load_of_run(run)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (
            402,
            "has no credit for it .injected fault.: add some at .*/settings/billing; nothing was begun",
        ),
        (403, "may not do that .injected fault.: sign in again and allow jobs, or use a token with the permission"),
        (503, "cannot be used now, the Hub answered 503: try again later; "),
    ],
)
def test_a_job_that_the_hub_refuses_costs_nothing(queued, hub, status, sentence):
    hub.fail_next("POST /api/jobs/me", status)
    ended = follow(queued)
    assert ended.state == "failed" and not hub.jobs
    with pytest.raises(RequestError, match=f"a job on cpu-basic .*{sentence}"):
        raise RequestError(ended.error)


@pytest.mark.parametrize(
    ("program", "second", "sentence"),
    [
        (
            "print('no space left'); raise SystemExit(3)",
            1,
            "ended before its work .ERROR: .*; its last words: no space left",
        ),
        (
            "import time; time.sleep(60)",
            5e-4,
            "reached its limit of 15 minutes: resume the run, and another job continues",
        ),
        (EVENT % "done", 1, "ended before its work .COMPLETED.: resume the run"),
    ],
)
def test_a_job_that_ends_before_its_work_is_resumable(queued, hub, program, second, sentence):
    hub.program, hub.second = program, second
    ended = follow(queued)
    assert ended.state == "failed"
    with pytest.raises(RequestError, match=f"the job {sentence}"):
        raise RequestError(ended.error)
    hub.program = EVENT % "stopped"
    queued.log(EventName.QUEUED, cap=OFFER.cap)
    again = follow(queued)
    assert (again.state, len(hub.jobs)) == ("stopped", 2), again.error


@pytest.mark.parametrize("machine", [True, False])
def test_a_job_that_does_not_stop_or_has_no_machine_is_cancelled_and_its_own_end_is_told(
    queued, hub, monkeypatch, machine
):
    hub.program, hub.no_machine = "import time; print('begun', flush=True); time.sleep(60)", not machine
    monkeypatch.setattr(hub_jobs, "STOP_SECONDS", 0.2)
    follower = threading.Thread(target=follow, args=[queued])
    follower.start()
    wait_until(lambda: hub.jobs and hub.jobs["job0"].stage == ("RUNNING" if machine else "SCHEDULING"))
    queued.make_request("stop")
    follower.join()
    assert hub.jobs["job0"].stage == "CANCELED" and control.state_of(queued) == "stopped"


def test_a_job_whose_beginning_was_not_noted_is_followed_and_no_other_begun(queued, hub):
    hub.program = EVENT % "stopped"
    account = Account(ME)
    account.make_bucket()
    hub.no_machine = True
    account.begin_job("image", ["true"], "cpu-basic", 15, queued.id)
    threading.Timer(0.5, hub.jobs["job0"].work).start()
    assert follow(queued).state == "stopped" and [*hub.jobs] == ["job0"]


def test_what_was_not_agreed_to_begins_no_job(queued, hub):
    queued.log(EventName.QUEUED)
    assert "resume it and agree to that" in follow(queued).error and not hub.jobs
    assert "jobs of 'me' cannot be used, 'ann' is signed in: name 'ann', or" in follow(queued, "hf_fake_ann").error
    assert "nobody is signed in, so no job can be begun" in follow(queued, None).error
    hub.buckets[f"me/{BUCKET}"] = {"private": False, "files": {}}
    queued.log(EventName.QUEUED, cap=OFFER.cap)
    assert "is public, and runs are only sent to a private one" in follow(queued).error and not hub.jobs


def test_an_organisation_pays_where_its_member_names_it(begin, hub):
    hub.organisations["me"] = {"team": "write", "others": "read"}
    with pytest.raises(RequestError, match=r"costs team \$0.01 an hour"):
        begin(owner="team", yes=False)
    with pytest.raises(RequestError, match=r"name 'me' or one of its organisations \(team\), or sign in as 'others'"):
        begin(owner="others")
    hub.program = EVENT % "stopped"
    run = begin(owner="team")
    wait_for(run, "stopped")
    (job,) = hub.jobs.values()
    assert job.owner == "team" and set(hub.buckets) == {f"team/{BUCKET}"}


def test_what_can_be_refused_is_refused_before_anything_is_sent(begin, hub, tmp_path):
    for options, sentence in (
        ({"yes": False}, r"a job on cpu-basic costs me \$0.01 an hour, and at most \$0.01 for 15 minutes: add --yes"),
        ({"flavor": "h1000"}, r"no hardware 'h1000': choose from .*l4x1 \(\$0.80 an hour\)"),
        ({"flavor": "tiny"}, "tiny has a disk of 1 GB, and 12 GB are needed"),
        ({"minutes": 9999}, "a job of 9999 minutes is not allowed: ask for 1 to 420"),
        (
            {"plan": Plan("demo", device="cuda", **QUICK)},
            r"cpu-basic has no device 'cuda' \(no GPU\): leave --device out",
        ),
        ({"plan": Plan("demo", device="cuda:x", **QUICK), "flavor": "l4x1"}, "l4x1 has no device 'cuda:x'"),
        ({"token": "hf_read_me", "push": "mine"}, "the token of 'me' may only read"),
        ({"owner": "theirs"}, "jobs of 'theirs' cannot be used, 'me' is signed in: name 'me', or sign in as 'theirs'"),
        ({"push": "ann/hers"}, "'ann' is not an owner that 'me' may publish for"),
        ({"plan": Plan(str(tmp_path), **QUICK)}, "the model .* is on this machine, which a job cannot read"),
    ):
        with pytest.raises(RequestError, match=sentence):
            begin(**options)
    hub.hardware.clear()
    with pytest.raises(RequestError, match="choose from nothing now; nothing was begun"):
        begin()
    assert not hub.jobs and not hub.buckets and not (tmp_path / "runs" / "run" / "plan.json").exists()


def test_a_damaged_run_of_a_job_is_deleted(hub, tmp_path):
    for damaged in (FILE, "plan.json", "begun.json"):
        run = Run.create(tmp_path / "run", PLAN)
        run.write_product(FILE, OFFER.to_json())
        run.write(damaged, "{broken")
        delete_run(run, ME)
        assert not run.folder.exists()


def test_an_exchange_with_the_bucket_that_fails_is_tried_again(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub_work, "ASK_SECONDS", 0.01)
    (account := Account(ME)).make_bucket()
    run, ended = Run(tmp_path / "run"), threading.Event()
    run.folder.write_text("")  # the Hub's client raises ValueError where a folder is none
    thread = threading.Thread(target=hub_work.exchange, args=(run, account, "place", ended))
    thread.start()
    wait_until(lambda: "the bucket cannot be reached" in capsys.readouterr().err)
    run.folder.unlink()
    run.folder.mkdir()
    run.log("started")
    wait_until(lambda: account.list_files("place") == ["place/events.jsonl"])
    ended.set()
    thread.join()


def test_a_price_for_a_unit_that_nobody_knows_is_refused(begin, hub):
    hub.unit = "fortnight"
    sentence = "the price of 'cpu-basic' per 'fortnight', which is not one of second, minute, hour: .*nothing was begun"
    with pytest.raises(RequestError, match=sentence):
        begin()
    assert not hub.jobs


def test_the_time_of_a_job_depends_on_its_hardware_and_not_on_this_machine(monkeypatch):
    layers, seconds = [Layer(32, 8, 64, 64)] * 16, []
    model = inspection_of(layers, parameters=10**9, weight_bytes=2 * 10**9)
    small, large = (Hardware(name, name, "30 GB", "1 TB", "1 GPU", 1.0, 1, memory) for name, memory in GPUS)
    for free in (2**30, 2**40):  # bytes of this machine's memory
        monkeypatch.setattr(streaming, "free_bytes", lambda device, free=free: free)
        seconds.append([guess_minutes(Plan("demo", budget=64), model, each) for each in (small, large)])
    assert seconds[0] == seconds[1]
    assert seconds[0][0] > seconds[0][1]  # the weights are read block by block, again and again
    plain = Hardware("cpu", "CPU", "64 GB", "1 TB", "", 1.0)
    assert guess_minutes(Plan("demo", budget=64), model, plain) > seconds[0][1]


def test_the_command_line_lists_hardware_and_asks_before_it_costs(hub, said, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", ME)
    code, out, _ = said("run", "--job", "list")
    assert code == 0 and "l4x1" in out and "$0.80 an hour, 1 L4 with 24 GB, 30 GB memory" in out
    code, _, err = said("run", "demo", "--job", "l4x1", "--job-minutes", "30", "--out", tmp_path / "run")
    assert code == 2 and "costs me $0.80 an hour, and at most $0.40 for 30 minutes: add --yes to begin it" in err
    code, _, err = said("run", "demo", "--push", "me/mine")
    assert code == 2 and "--push is for a job of the Hub" in err
    assert not hub.jobs and not (tmp_path / "run").exists()
