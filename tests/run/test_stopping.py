"""A request to stop ends what yields nothing."""

import shutil
import signal
import threading
import time
from contextlib import suppress

import pytest

from linearizer.errors import FolderError, Stopped
from linearizer.plan.plan import Plan
from linearizer.progress import Progress, finish
from linearizer.run import stopping
from linearizer.run.folder import Run
from linearizer.run.stopping import interruptible


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])  # a shell's background jobs ignore it
def test_a_request_to_stop_interrupts_work_whatever_becomes_of_ctrl_c(tmp_path, handler):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, handler)
    try:
        run.make_request("stop", "because")
        with pytest.raises(Stopped, match="because"), interruptible(run):
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
    assert signal.getsignal(signal.SIGUSR1) == before[signal.SIGUSR1]


def test_a_signal_that_comes_as_the_work_ends_strikes_nothing_after_it(tmp_path):
    """At any moment: signals are sent without a pause while blocks of work begin and end."""
    run, over, before = Run.create(tmp_path / "run", Plan("demo", budget=64)), threading.Event(), signal.SIG_IGN
    main, usual = threading.get_ident(), signal.signal(signal.SIGUSR1, before)

    def send():
        while not over.wait(1e-4):
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(100):
            with suppress(KeyboardInterrupt), interruptible(run):
                pass
            assert signal.getsignal(signal.SIGUSR1) == before
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, usual)


def test_a_step_that_yields_nothing_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "YIELD_SECONDS", 0.3)
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))

    def steps():
        yield Progress("price", 1, 3, "layers", {"part": "first"})
        run.make_request("stop")
        time.sleep(60)
        yield Progress("price", 2, 3, "layers")

    with pytest.raises(Stopped):
        finish(stopping.log_progress(run, steps()))
    assert [(event["event"], event["done"], event["part"]) for event in run.events()] == [("price", 1, "first")]


def test_a_step_that_yields_in_time_ends_by_itself_when_it_is_to_stop(tmp_path):
    run, saved = Run.create(tmp_path / "run", Plan("demo", budget=64)), []

    def steps():
        try:
            for done in range(9):
                run.make_request("stop")
                time.sleep(2 * stopping.STOP_POLL_SECONDS)
                yield Progress("distill", done, 9, "steps")
        except GeneratorExit:
            saved.append(done)
            raise

    with pytest.raises(Stopped):
        finish(stopping.log_progress(run, steps()))
    assert saved == [0]


def test_the_first_error_is_said_where_none_can_be_logged(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    run.log_file.mkdir()  # as on a full disk
    with pytest.raises(FolderError, match="no room for the profile"), stopping.log_end(run):
        raise FolderError("no room for the profile")
    shutil.rmtree(run.folder)
    with pytest.raises(FolderError, match="was deleted during the run"), stopping.log_end(run):
        raise FolderError("a file of it cannot be written")
