"""Work on a run is stopped within every step, resumed to the same bits, and refused where the disk is too small."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from linearizer import pipeline
from linearizer.cli.text import describe_run
from linearizer.errors import FolderError, RequestError, Stopped
from linearizer.evaluate.subjects import assembled
from linearizer.hub.models import find_model
from linearizer.method import allocate_run
from linearizer.method.checkpoint import load_of_run
from linearizer.method.head_prices import options_to_price
from linearizer.pipeline import linearize, reallocate
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import USUAL_LENGTH, Plan
from linearizer.progress import finish
from linearizer.run.files import UNFINISHED, remove
from linearizer.run.measured import Candidate, Candidates
from linearizer.run.training_end import Trained, read_training
from linearizer.run.weight_digests import DIGESTS, read_digests
from linearizer.teacher.devices import choose_dtype
from linearizer.train.training_state import NEWEST
from linearizer.workers import control
from tests.support import runs
from tests.support.hub import Handler
from tests.support.runs import inspection_of, weights_of

pytestmark = pytest.mark.usefixtures("judged_briefly")
QUICK = {**runs.QUICK, "length": 48}
LONG = Plan("demo", steps=100_000, **QUICK)


@pytest.fixture
def begin(tmp_path):
    """Begin runs that the test itself works on."""
    return lambda name="run", plan=LONG: pipeline.begin(tmp_path / name, plan)


@pytest.mark.parametrize("strategy", ["common-lambda", "gain"])
def test_a_run_stops_within_every_step_and_resumes_to_the_same_bits(strategy, begin, monkeypatch):
    monkeypatch.setattr(allocate_run, "options_to_price", lambda *offered: options_to_price(*offered)[::3])
    plan = Plan("demo", target_length=64, steps=4, **{**QUICK, "budget": 24, "strategy": strategy})
    plan = replace(plan, bits=8 if strategy == "gain" else None)
    unstopped, run = begin("whole", plan), begin("run", plan)
    finish(linearize(unstopped))
    steps = ["profile", "price" if strategy == "gain" else "distill", "evaluate"]
    for name in steps:
        with pytest.raises(Stopped):
            for progress in linearize(run):
                if progress.step == name and not run.has_request("stop"):
                    assert control.status(run).state == "running"
                    control.stop(run)
                    assert control.status(run).state == "stopping"
                    reached = progress.done
        result = control.status(run)
        assert (result.state, result.step["event"], result.step["done"]) == ("stopped", name, reached)
        assert not run.has_request("stop") and not run.is_locked
    finish(linearize(run))
    assert weights_of(run.checkpoint) == weights_of(unstopped.checkpoint)
    assert control.status(run).state == "done"


def test_a_download_is_stopped_at_once(begin, hub, monkeypatch):
    hub.add("org/slow", find_model("demo").folder)
    served, ended = Handler.file, threading.Event()

    def slow(self, repo, revision, path):
        if path.endswith(".safetensors") and self.command == "GET" and "Range" not in self.headers:
            ended.wait(600)
        served(self, repo, revision, path)

    monkeypatch.setattr(Handler, "file", slow)
    run = begin(plan=Plan("org/slow", **QUICK))
    threading.Timer(1, run.make_request, ["stop"]).start()
    begun = time.monotonic()
    with pytest.raises(Stopped):
        finish(linearize(run))
    assert time.monotonic() - begun < 60 and control.status(run).state == "stopped"
    ended.set()


def test_training_ends_early_where_that_is_asked_and_stays_so(begin):
    run = begin(plan=LONG)
    with pytest.raises(RequestError, match="is stopped: only a running run"):
        control.use_now(run)
    steps = linearize(run)
    assert next(steps).step == "profile"
    with pytest.raises(RequestError, match="is not training"):
        control.use_now(run)
    reached = 0
    while (progress := next(steps)).step != "evaluate":
        if progress.step == "distill" and progress.done == 3:
            control.use_now(run)
        reached = progress.done
    steps.close()
    assert reached == 3 and not run.has_request("use")
    assert control.status(run).state == "stopped"
    assert {progress.step for progress in linearize(run)} == {"evaluate"}
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [3, 3]
    assert control.status(run).state == "done"


def test_training_that_ends_early_trains_with_no_later_loss(begin):
    run = begin(plan=replace(LONG, loss="softmax+direct", steps=8))
    steps = linearize(run)
    while next(steps).step != "distill":
        pass
    control.use_now(run)
    assert "distill" not in {progress.step for progress in steps}
    ends = [(event["phase"], event["steps"]) for event in run.events() if event["event"] == "distilled"]
    assert ends == [(0, 1), (1, 0)] and read_training(run).asked == 8 and not run.has_request("use")


def test_a_damaged_state_of_a_training_that_had_ended_costs_no_step(begin):
    run = begin(plan=replace(LONG, steps=26, batch=1))  # its states are of steps 25 and 26
    stop_at(run, "evaluate", 1)
    (run.folder / "state" / "training" / "0" / NEWEST).write_bytes(b"")
    assert [progress.done for progress in linearize(run) if progress.step == "distill"] == [26]
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [26, 26]


def stop_at(run, step, done):
    """Work on a run until a step is so far, and stop."""
    steps = linearize(run)
    while (progress := next(steps)).step != step or progress.done < done:
        pass
    steps.close()


def test_a_training_that_was_done_does_not_end_the_one_of_another_budget_early(begin):
    run, smaller = begin(plan=Plan("demo", steps=4, **QUICK)), Plan("demo", steps=4, **{**QUICK, "budget": 48})
    stop_at(run, "evaluate", 1)
    assert read_training(run) == Trained(4, 4)
    reallocate(run, smaller)
    assert read_training(run) == Trained(0, 0)
    stop_at(run, "distill", 2)
    assert [progress.done for progress in linearize(run) if progress.step == "distill"] == [3, 4]
    assert read_training(run) == Trained(4, 4) and run.done


def test_an_allocation_that_cannot_be_written_leaves_none_of_another_plan(begin):
    run = begin(plan=Plan("demo", budget=64, strategy="window"))
    run.write("inspection.json", inspection_of([Layer(4, 2, 16, 16)], max_positions=128).to_json())
    reallocate(run, run.plan)
    (fault := run.folder / f"allocation.json{UNFINISHED}").mkdir()
    with pytest.raises(FolderError, match="allocation.json' cannot be written"):
        reallocate(run, replace(run.plan, budget=48))
    fault.rmdir()
    assert run.plan.budget == 48 and run.allocation is None


def test_what_was_measured_of_one_allocation_is_not_said_of_another(begin):
    run = begin(plan=Plan("demo", budget=64, strategy="window"))
    run.write("inspection.json", inspection_of([Layer(4, 2, 16, 16)], max_positions=128).to_json())
    reallocate(run, run.plan)
    run.write("candidates.json", Candidates((128,), (Candidate("plain window", (0.25,)),)).to_json())
    for budget, said in ((64, True), (48, False), (64, False)):
        reallocate(run, replace(run.plan, budget=budget))
        assert ("Kept: plain window" in describe_run(run)) == said


def test_a_run_killed_when_all_but_the_last_was_done_is_done_at_once(begin):
    run = begin(plan=Plan("demo", steps=0, **QUICK))
    finish(linearize(run))
    weights = weights_of(run.checkpoint)
    lines = run.log_file.read_text().splitlines(keepends=True)
    assert '"done"' in lines.pop()
    run.log_file.write_text("".join(lines))
    (run.checkpoint / "README.md").unlink()
    digests = read_digests(run)
    (run.folder / DIGESTS).unlink()
    assert control.status(run).state == "lost"
    assert list(linearize(run)) == []
    assert digests and read_digests(run) == digests
    assert control.status(run).state == "done" and (run.checkpoint / "README.md").exists()
    assert weights_of(run.checkpoint) == weights
    (run.folder / "allocation.json").unlink()
    with pytest.raises(FolderError, match=r"has lost its allocation\.json: start a new run"):
        run.require_allocation()


def test_digests_of_a_checkpoint_that_was_removed_do_not_condemn_the_next(begin):
    """Also where the work ends between the new checkpoint and its digests."""
    run = begin(plan=Plan("demo", steps=0, **QUICK))
    finish(linearize(run))
    remove(run.checkpoint)
    reallocate(run, replace(run.plan, budget=48))
    (fault := run.folder / f"{DIGESTS}{UNFINISHED}").mkdir()  # they cannot be written
    with pytest.raises(FolderError, match=f"{DIGESTS}' cannot be written"):
        finish(linearize(run))
    fault.rmdir()
    assert run.checkpoint.is_dir() and not run.done
    finish(linearize(run))
    assert run.done and load_of_run(run)


def test_what_the_disk_has_no_room_for_is_refused_before_anything_is_loaded(begin, hub, tmp_path):
    with pytest.raises(FolderError, match=r" free, and \S+ TB are needed: make room"):
        begin(plan=Plan("demo", budget=64, text="self", texts=10**12))
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.checks, "check_disks", refuse)
    with pytest.raises(RequestError, match="no room"):
        pipeline.begin(tmp_path / "new", LONG)
    assert not (tmp_path / "new").exists()


def refuse(*_):
    raise RequestError("there is no room")


def test_the_type_to_compute_in_is_decided_where_a_run_begins_and_the_same_words_resume_it(begin):
    plan = Plan("demo", budget=64)
    run = begin(plan=plan)
    assert run.plan.dtype == choose_dtype("auto", torch.bfloat16, "cpu")
    assert pipeline.begin(run.folder, plan, resume=True).plan == run.plan
    assert pipeline.begin(run.folder, run.plan, resume=True) == run
    with pytest.raises(RequestError, match="another plan"):
        pipeline.begin(run.folder, replace(plan, dtype="float16"), resume=True)


def test_the_revision_is_pinned_when_a_run_begins_and_the_same_words_resume_it(tmp_path, hub):
    commit = hub.add("org/moving", find_model("demo").folder)
    for options in ("org/moving", "org/moving@main"):
        plan = Plan(options, budget=64, **{"texts": 2})
        run = pipeline.begin(tmp_path / options, plan)
        assert run.plan.model == f"org/moving@{commit}" and run.inspection.revision == commit
        hub.requests.clear()
        assert pipeline.begin(run.folder, plan, resume=True).plan == run.plan
        assert pipeline.begin(run.folder, run.plan, resume=True) == run and not hub.requests
        with pytest.raises(RequestError, match=r"another plan \(budget 65 instead of 64\)"):
            pipeline.begin(run.folder, replace(plan, budget=65), resume=True)
    assert not [line for line in hub.requests if "safetensors" in line]


WORDS = "the state of the student takes as many bytes as its teacher's cache "  # 15 tokens or so


def test_defaults_shrink_to_a_short_text_and_what_was_asked_for_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(WORDS * 24)
    plan = Plan("demo", budget=16, text=f"file:{short}", dtype="float32", recipe="swa", steps=8)
    run = pipeline.begin(str(tmp_path / "fits"), plan)
    assert run.plan.texts == 2 and 32 <= run.plan.length < 512 and run.plan.length % 8 == 0
    assert pipeline.begin(run.folder, plan, resume=True) == run
    finish(linearize(run))
    assert "language" in run.results
    with assembled(run) as setup:  # fewer texts were trained on than 8 steps ask for
        assert len(setup.windows(None, run.plan.length, 8, 0)) == run.evaluation_file["made_with"]["judged"]
    with pytest.raises(RequestError, match="name a longer text, or ask for fewer or shorter texts"):
        pipeline.begin(tmp_path / "asked", replace(plan, length=USUAL_LENGTH))
    assert not (tmp_path / "asked").exists()
