"""A request to stop ends what yields nothing."""

import signal
import threading
import time
from contextlib import suppress

import pytest

from linearizer.errors import Stopped
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
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
