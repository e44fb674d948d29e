"""Short work goes before long work, which pauses for it, and no run waits for it for ever."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.results import Request
from linearizer.workers import control, device_queue
from linearizer.workers.device_queue import OVERTAKEN, take_ticket
from linearizer.workers.forecast import SHORT_SECONDS, Speeds, evaluation_seconds
from linearizer.workers.worker import goes_first
from tests.support.runs import LONG, PLAN, beginning, inspection_of, wait_for, wait_for_event, wait_until

SHORT = {"parts": ["language", "speed"], "texts": 2, "lengths": [64], "seconds": 0.2, "short": True}


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_QUEUE", str(tmp_path / "queue"))
    return tmp_path


def test_an_evaluation_of_seconds_is_done_at_once_while_a_run_of_hours_pauses(queue, quick_run):
    done = Run(shutil.copytree(quick_run, queue / "runs" / "done"))
    making = beginning(queue / "runs")
    run = next(making)(plan=LONG)
    control.start(run)
    wait_for_event(run, "distill")
    control.evaluate(done, SHORT)
    wait_for(done.evaluating, "done")
    events = [event for event in done.events() if event.get("job")]
    begun, ended = (next(e["time"] for e in events if e["event"] == name) for name in ("started", "done"))
    steps = [event["time"] for event in run.events() if event["event"] == "distill"]
    assert not [time for time in steps if begun < time < ended], "nothing is measured while the run works, too"
    assert control.state_of(run) == "running"
    wait_until(lambda: run.events()[-1]["time"] > ended and run.events()[-1]["event"] == "distill")
    assert [event["seconds"] for event in run.events() if event["event"] == "waited"] > [ended - begun - 1]
    ticket = take_ticket(queue / "other", ["cpu"], short=True)
    wait_until(ticket.begin_work)
    control.stop(run)  # in its pause, too
    wait_for(run, "stopped")
    assert control.status(run).saved is not None
    ticket.remove()
    making.close()
    assert not list(device_queue.queue_folder().iterdir())


def test_a_run_at_work_keeps_its_devices_until_it_pauses(queue):
    long, short, gpu = (take_ticket(queue / name, [name]) for name in ("cpu", "cpu ", "cuda:0"))
    short.remove()
    assert long.begin_work() and gpu.begin_work()
    short = take_ticket(queue / "short", ["cpu"], short=True)
    assert long.count_before() == 1 and gpu.count_before() == 0 and not short.begin_work()
    long.pause()
    assert short.begin_work() and not long.begin_work()
    short.remove()
    assert long.begin_work()


def test_a_run_is_overtaken_by_so_many_and_no_more(queue):
    long = take_ticket(queue / "long", ["cpu"])
    short = [take_ticket(queue / f"short {n}", ["cpu"], short=True) for n in range(OVERTAKEN + 5)]
    assert long.count_before() == OVERTAKEN - 1
    assert short[-1].count_before() == len(short), "the last waits for the run, too"
    for ticket in (*short, long):
        ticket.remove()


def test_short_is_what_reads_little_and_tasks_are_never():
    inspection = inspection_of([Layer(4, 2, 32, 32)] * 4, parameters=10**7, weight_bytes=2 * 10**7)
    plan, speeds = Plan("demo", budget=64, texts=2, length=256, device="cpu"), Speeds(1e10, 1e10, 1e6, 1e10, 1e9)
    few, many, tasks = Request(texts=2, seconds=1.0), Request(texts=200), Request(tasks=("long-text",))
    seconds = [evaluation_seconds(each, plan, inspection, speeds) for each in (few, many, tasks)]
    assert seconds[0] < SHORT_SECONDS < seconds[1] < seconds[2]
    large = replace(inspection, parameters=10**10, weight_bytes=2 * 10**10)
    assert evaluation_seconds(few, plan, large, speeds) > SHORT_SECONDS


def test_a_run_of_seconds_goes_before_a_run_of_hours(queue):
    making = beginning(queue / "runs")
    begin = next(making)
    long, short = begin("long", LONG), begin("short", PLAN)
    assert not goes_first(short, None), "there is nothing to go before"
    ticket = take_ticket(long.folder, ["cpu"])
    assert goes_first(short, None) and not goes_first(long, None)
    ticket.remove()
    making.close()


def test_tickets_that_are_taken_at_once_stay_until_they_are_removed(queue):
    def take(number):
        for _ in range(30):
            ticket = take_ticket(queue / str(number), ["cpu"])
            assert os.path.samestat(ticket.path.stat(), os.fstat(ticket.lock.fd)), "others may not see it"
            ticket.remove()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(take, range(8)))
    finally:
        sys.setswitchinterval(before)


def test_a_queue_that_was_deleted_is_made_again(queue):
    first, second = take_ticket(queue / "first", ["cpu"]), take_ticket(queue / "second", ["cpu"])
    shutil.rmtree(device_queue.queue_folder())
    assert first.begin_work() and not second.begin_work()
    first.remove()
    assert second.begin_work()
    second.remove()


def test_a_run_may_wait_in_a_folder_whose_name_is_no_text(queue):
    folder = queue / os.fsdecode(b"caf\xe9")
    first, second = take_ticket(folder, ["cpu"]), take_ticket(queue / "second", ["cpu"])
    assert device_queue.runs_before(queue / "second") == [folder]
    for ticket in (first, second):
        ticket.remove()
