"""The process of a run keeps a token to itself, and says how it ended: failed with a reason, or crashed."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from linearizer.errors import FolderError, ModelNotAvailable, RequestError
from linearizer.hub.models import find_model
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.plan import Plan
from linearizer.progress import Progress, finish
from linearizer.run.folder import Run
from linearizer.workers import control, device_queue
from linearizer.workers.worker import work_in_foreground
from tests.support.runs import LONG, QUICK, log_of, process_of, wait_for, wait_for_event, wait_until

TOKEN = "hf_fake_visitor"


def test_a_token_reaches_the_run_and_nothing_else(begin, hub, tmp_path):
    hub.add("visitor/private", find_model("demo").folder, private=True)
    plan = Plan("visitor/private", steps=2, **QUICK)
    refused, run = begin("refused", plan, TOKEN), begin("run", plan, TOKEN)
    control.start(refused)
    control.start(run, TOKEN)
    checks, secret = 0, TOKEN.encode()
    while control.state_of(run) in control.LIVE:
        with suppress(FileNotFoundError, ProcessLookupError):
            process = process_of(run)
            assert secret not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            checks += 1
        time.sleep(0.1)
    assert checks and control.status(run).state == "done", log_of(run)
    assert "is not a folder here and not on the Hub, or it is private" in wait_for(refused, "failed").error
    for place in (tmp_path, device_queue.queue_folder(), Path(os.environ["HF_HOME"])):
        assert not [path for path in place.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_a_token_that_cannot_be_one_is_refused_unsaid(begin):
    with pytest.raises(RequestError, match="the token contains characters that no token has") as refusal:
        control.start(begin(), "hf_copied\nwith more")
    assert "hf_copied" not in str(refusal.value)


@pytest.fixture
def torch_that(tmp_path, monkeypatch):
    """Let the processes that are started find another torch, which does what it is told."""

    def put(program):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / "torch.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))

    return put


def test_a_fault_of_our_own_is_named_by_its_kind_and_its_traceback_is_kept(begin, torch_that):
    torch_that("raise ZeroDivisionError('in /home/somebody with hf_secret1')")
    run = begin()
    control.start(run, "hf_secret1")
    result = wait_for(run, "failed")
    assert result.error.startswith("ZeroDivisionError, a fault of Linearizer itself") and "worker.log" in result.error
    assert "somebody" not in result.error
    assert "Traceback" in log_of(run) and "hf_secret1" not in log_of(run)


def test_a_crash_is_told_by_its_last_words_without_folders_or_tokens(begin, torch_that):
    torch_that(
        "import os; os.write(2, b'begun\\nno driver in /home/somebody/lib.so for hf_oauth_a.b-c\\n\\n'); os._exit(9)"
    )
    run = begin()
    control.start(run)
    result = wait_for(run, "lost")
    assert result.error.endswith("its last words: no driver in lib.so for …")


def test_a_run_deleted_under_its_process_is_gone(begin):
    run = begin(plan=LONG)
    control.start(run)
    wait_for_event(run, "distill")
    process = process_of(run)
    wait_until(lambda: shutil.rmtree(run.folder, ignore_errors=True) or not run.folder.exists())  # it still writes
    with pytest.raises(FolderError, match="holds no run"):
        control.status(run)
    wait_until(lambda: not process.exists())
    assert not run.folder.exists() and list(control.follow(run)) == []


def test_a_run_that_is_resumed_outlasts_a_refusal_though_it_has_no_product_yet(tmp_path):
    run = Run.create(tmp_path / "run", EncoderPlan("encoder", 64))

    def steps(error):
        yield Progress("distill", 1, 2, "steps")
        raise error

    with pytest.raises(KeyboardInterrupt):
        finish(work_in_foreground(run, steps(KeyboardInterrupt())))
    with pytest.raises(ModelNotAvailable):
        finish(work_in_foreground(run, steps(ModelNotAvailable("the Hub answers 503: try again later"))))
    assert run.is_encoder_run


@pytest.mark.parametrize(("product", "stays"), [("ways.json", True), ("worker.log", False)])
def test_a_refusal_leaves_no_run_unless_it_has_a_product(product, stays, tmp_path):
    run = Run.create(tmp_path / "run", EncoderPlan("encoder", 64))

    def steps():
        run.write(product, "{}")
        yield Progress("distill", 1, 2, "steps")
        raise FolderError("the disk is full")

    with pytest.raises(FolderError, match="the disk is full"):
        finish(work_in_foreground(run, steps()))
    assert run.folder.exists() == stays and (not stays or run.is_encoder_run)
