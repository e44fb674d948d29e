"""Several ranks work on a run: they make the student that one process alone makes, layer by layer to the bit."""

import json
import multiprocessing
import subprocess
import sys

import pytest
import torch

from linearizer import pipeline
from linearizer.errors import RankEnded
from linearizer.hub.weight_files import read_tensors
from linearizer.method.recorder import SAMPLES
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.events import newest_events
from linearizer.teacher.devices import visible_name
from linearizer.teacher.ranks import Ranks
from linearizer.workers import control, device_queue
from linearizer.workers.launch import launched, started
from tests.support.runs import FP32, QUICK, wait_for_event, wait_until, weights_of

PRICED = Plan.of("best", model="demo", steps=2, lora=2, texts=6, length=32, budget=16, **FP32)
TRAINED = Plan("demo", steps=5, **QUICK)
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STATE = "state/training/0/training.safetensors"
PRODUCTS = "profile.json", "prices.json", "candidates.json", "allocation.json"


def made_alone(folder, plan):
    """Make the student of a plan in this process alone."""
    run = pipeline.begin(folder, plan)
    finish(pipeline.linearize(run))
    return run


def products(run):
    return [run.read(name) for name in PRODUCTS if run.has_file(name)]


def tried(run):
    """The numbers of sinks that a run has tried, and the kl of each."""
    return [event["sinks"] for event in run.events() if event["event"] == "tried"]


def test_a_run_whose_rank_is_killed_ends_with_a_sentence_and_three_ranks_resume_it_to_the_same_products(tmp_path):
    alone, run = made_alone(tmp_path / "alone", PRICED), pipeline.begin(tmp_path / "run", PRICED)
    with pytest.raises(RankEnded, match="has ended.*resume"), started(run, 2) as ranks:
        for progress in pipeline.linearize(run, ranks=ranks):
            for process in multiprocessing.active_children() if progress.step == "price" else ():
                process.kill()
    assert control.state_of(run) == "failed" and "resume" in control.status(run).error
    with started(run, 3) as ranks:
        finish(pipeline.linearize(run, ranks=ranks))
    assert products(run) == products(alone) and tried(run) == tried(alone) != []
    assert (run.folder / SAMPLES).read_bytes() == (alone.folder / SAMPLES).read_bytes()
    moments, expected = (
        {name: x for name, x in read_tensors(each.folder / STATE)[0].items() if name.endswith("exp_avg")}
        for each in (run, alone)
    )
    most = max(x.abs().max() for x in expected.values())  # of gradients, whose sums ranks add up
    torch.testing.assert_close(moments, expected, rtol=0, atol=1e-3 * most.item())
    losses = [each.results["language"].result.subjects[1].loss.mean for each in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_a_launched_run_that_is_stopped_at_a_step_goes_on_from_it_alone_to_the_same_bits(tmp_path):
    alone, run = made_alone(tmp_path / "alone", TRAINED), pipeline.begin(tmp_path / "run", TRAINED)
    command = [*LAUNCHER, "-m", "linearizer", "run", "demo", "--resume", "--out", str(run.folder)]
    command += ["--plan", str(run.folder / "plan.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        wait_until(lambda: launcher.poll() is not None or any(newest_events(run.log_file)))
        wait_for_event(run, "distill", 1)
        control.stop(run)
        error = launcher.stderr.read()
    status = control.status(run)
    assert status.state == "stopped" and 0 < status.step["done"] < TRAINED.steps, error
    tensors, facts = read_tensors(run.folder / STATE)
    assert json.loads(facts)["step"] == status.step["done"]
    finish(pipeline.linearize(run))
    assert (products(run), weights_of(run.checkpoint)) == (products(alone), weights_of(alone.checkpoint))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_of_ranks_are_all_items_in_their_order_and_differ_by_one_at_most(count):
    for items in ([], [0], [*range(7)], [*range(12)]):
        shares = [Ranks(number, count).share(items) for number in range(count)]
        assert sum(shares, []) == items and bool(shares[0]) == bool(items)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_launcher_numbers_ranks_and_a_cluster_alone_does_not(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched("WORLD_SIZE") == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert launched("WORLD_SIZE") == 2


@pytest.mark.parametrize("visible", ["", "2,3", "GPU-a,GPU-b/1", "MIG-GPU-c/1/0, MIG-GPU-c/2/0"])
def test_the_gpu_of_a_rank_has_the_name_by_which_it_is_seen(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = [name.strip() for name in visible.split(",")] if visible else ["0", "1"]
    assert [visible_name(number) for number in range(len(names))] == names


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
