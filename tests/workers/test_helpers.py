"""Other processes price some of a run's heads: the student has the bits that one process alone makes."""

import os
import re
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from linearizer import pipeline
from linearizer.method import allocate_run
from linearizer.method.head_prices import Share
from linearizer.method.measure_run import measure_teacher
from linearizer.method.texts import TextsOfRun
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.teacher.devices import device_name
from linearizer.teacher.load import load_teacher_of
from linearizer.workers import control, device_queue, helpers
from linearizer.workers.helpers import HelperProcesses, devices_of
from tests.support.runs import FP32, process_of, wait_for, wait_for_event, wait_until, weights_of

PROC = Path("/proc")
SMALL = dict(texts=2, length=32, sinks=2, budget=32, **FP32)
PLAN = Plan("demo", **SMALL)


class InTurn:
    """Helpers that do their shares in this process, before its own."""

    count = 4  # two share the texts, and two the layers of each half

    def __init__(self, run):
        self.run = run

    def beside(self, sinks, steps):
        for number in range(1, self.count):
            pipeline.help_with(self.run, sinks, Share(number, self.count))
        return (yield from steps)


def products(run):
    """What does not depend on how many made it."""
    return [run.read(name) for name in ("profile.json", "allocation.json")], weights_of(run.checkpoint)


def test_what_a_helper_that_dies_has_not_priced_the_run_prices_to_the_same_bits(tmp_path, monkeypatch):
    alone, run = (pipeline.begin(tmp_path / name, PLAN) for name in ("whole", "helped"))
    finish(pipeline.linearize(alone))
    monkeypatch.setenv(helpers.PROCESSES, "2")
    control.start(run)
    wait_until(lambda: helpers_of(run))
    (helper,) = helpers_of(run)
    os.kill(helper, signal.SIGSTOP)
    wait_for_event(run, "price")
    os.kill(helper, signal.SIGKILL)
    wait_for(run, "done")
    assert products(run) == products(alone)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_helpers_end_with_the_process_of_the_run(end, tmp_path, monkeypatch):
    monkeypatch.setenv(helpers.PROCESSES, "2")
    run = pipeline.begin(tmp_path / "run", PLAN)
    control.start(run)
    wait_until(lambda: helpers_of(run))
    os.kill(int(process_of(run).name), end)
    wait_until(lambda: not helpers_of(run))
    wait_until(lambda: not run.is_locked)
    assert control.state_of(run) == ("lost" if end == signal.SIGKILL else "stopped")


def test_a_helper_that_cannot_work_says_why(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(helpers.PROCESSES, "2")
    run = pipeline.begin(tmp_path / "run", PLAN)
    (run.folder / "inspection.json").rename(tmp_path / "inspection.json")
    finish(HelperProcesses(run).beside(2, iter(())))
    out, err = capfd.readouterr()
    assert re.fullmatch("linearizer: helper 1 prices nothing more: .*inspection.json.*\n", err) and not out
    assert not helpers_of(run)


def helpers_of(run):
    """List the processes that help with a run."""
    numbers = []
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"linearizer.workers.helpers" in command and bytes(run.folder) in command:
                numbers.append(int(process.name))
    return numbers


@pytest.mark.parametrize("visible", ["", "2,3", "GPU-a,GPU-b/1", "MIG-GPU-c/1/0, MIG-GPU-c/2/0"])
def test_a_helper_sees_the_device_that_is_its_own_by_the_name_that_it_has_here(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = [name.strip() for name in visible.split(",")] if visible else ["0", "1"]
    for number, name in enumerate(names):
        assert helpers.seen_by(number, device_name(f"cuda:{number}")) == {"CUDA_VISIBLE_DEVICES": name}
    assert helpers.seen_by(1, "cpu") == {}


def test_several_processes_estimate_the_prices_of_one(tmp_path):
    run = pipeline.begin(tmp_path / "run", PLAN)
    teacher = load_teacher_of(run.plan)
    texts = TextsOfRun.of(run, teacher)
    finish(measure_teacher(run, teacher, texts))
    finish(allocate_run.price_heads(run, teacher, texts.priced))
    expected = run.read("prices.json")
    (run.folder / "prices.json").unlink()
    finish(allocate_run.price_heads(run, teacher, texts.priced, InTurn(run)))
    assert run.read("prices.json") == expected


def test_a_run_on_several_devices_waits_for_each(tmp_path):
    devices = (["cuda:0"], ["cuda:1"], ["cuda:0", "cuda:1"], ["cuda:1"])
    tickets = [device_queue.take_ticket(tmp_path, each) for each in devices]
    assert [ticket.count_before() for ticket in tickets] == [0, 0, 2, 2]
    tickets[0].remove()
    assert tickets[2].count_before() == 1
    tickets[1].remove()
    assert (tickets[2].count_before(), tickets[3].count_before()) == (0, 1)
    for ticket in tickets[2:]:
        ticket.remove()


def test_a_cpu_has_one_process_unless_more_are_asked_for_and_there_are_prices_to_measure(tmp_path, monkeypatch):
    run = pipeline.begin(tmp_path / "run", PLAN)
    unpriced = pipeline.begin(tmp_path / "unpriced", replace(PLAN, strategy="common-lambda"))
    assert devices_of(run) == ["cpu"]
    for setting, count in (("3", 3), ("0", 1), ("many", 1)):
        monkeypatch.setenv(helpers.PROCESSES, setting)
        assert devices_of(run) == ["cpu"] * count
        assert devices_of(unpriced) == devices_of(run.evaluating) == ["cpu"]
