"""Where prices mislead, a plain allocation of the same bytes is made, and the log, the terminal and the card say so."""

from dataclasses import replace

import pytest

from linearizer import pipeline
from linearizer.cli.text import describe_run
from linearizer.method.allocate_run import allocate
from linearizer.method.choose import PRICED, SLOTS, WINDOW, WINDOWS, candidates_of
from linearizer.method.decide import decide
from linearizer.method.head_prices import options_to_price
from linearizer.method.texts import TextsOfRun
from linearizer.pipeline import linearize, reallocate
from linearizer.plan.allocation import heads_replaced
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.publish.card import card_of
from linearizer.run.measured import Candidate, Candidates, Prices
from linearizer.teacher.load import load_teacher_of

pytestmark = pytest.mark.usefixtures("judged_briefly")
PLAN = Plan("demo", budget=24, texts=4, length=128, bits=8, sinks=2, dtype="float32")


def priced(folder, kl, bits=8, fewer=()):
    """Begin a run in which every head has the price that `kl` returns for an option."""
    run = pipeline.begin(folder, replace(PLAN, bits=bits))
    options = options_to_price(128, "slots", bits, fewer)
    rows = tuple((tuple(map(kl, options)),) * heads_replaced(layer) for layer in run.layers)
    run.write_product("prices.json", Prices(2, options, rows).to_json())
    return run


@pytest.fixture(scope="module")
def deceived(tmp_path_factory):
    """A run whose prices say that more memory makes every head worse; it stands before judging."""
    run = priced(tmp_path_factory.mktemp("choose") / "run", lambda option: (option.window + option.slots) / 1000)
    steps = linearize(run)
    while next(steps).step != "evaluate":
        pass
    steps.close()
    return run


def test_where_prices_lie_a_plain_allocation_is_kept_and_the_log_says_which_and_why(deceived):
    candidates = deceived.candidates
    measured = {each.name: each.kl for each in candidates.measured}
    assert candidates.lengths == (32, 128, 256) and list(measured) == [PRICED, SLOTS, WINDOW]
    assert candidates.kept.name in (SLOTS, WINDOW)
    assert all(plain < priced for plain, priced in zip(candidates.kept.kl, measured[PRICED], strict=True))
    (checked,) = (event for event in deceived.events() if event["event"] == "checked")
    assert checked["kept"] == candidates.kept.name
    assert {name: tuple(kl) for name, kl in checked["kl"].items()} == measured
    heads = {head for row in deceived.allocation.heads for head in row}
    assert len(heads) == 1 and heads.pop().window > 4  # what prices would have bought is a window of four
    (allocated,) = (event for event in deceived.events() if event["event"] == "allocated")
    assert allocated["strategy"] == deceived.allocation.strategy != "gain"


def test_the_student_that_is_made_is_the_kept_one_and_every_account_says_why(deceived):
    finish(linearize(deceived))
    assert [event["event"] for event in deceived.events()].count("checked") == 1  # it was not chosen anew
    sentence = f"Kept: {deceived.candidates.kept.name}; no other of 3 allocations of the same bytes"
    assert sentence in describe_run(deceived) and sentence in card_of(deceived).write()
    assert f"| {PRICED} |" in card_of(deceived).write()


def test_a_kill_before_the_kept_allocation_was_written_changes_nothing(deceived):
    before, teacher = deceived.allocation, load_teacher_of(deceived.plan)
    (deceived.folder / "allocation.json").unlink()
    assert finish(allocate(deceived, teacher, TextsOfRun.of(deceived, teacher))) == before == deceived.allocation


@pytest.mark.parametrize("bits", [8, 16])
def test_every_candidate_has_the_bits_that_the_plan_asks_for(bits, tmp_path):
    run = priced(tmp_path / "run", lambda head: 0.001 if head.softmax else 1 / (head.window + head.slots), bits, (6, 4))
    candidates = candidates_of(run, decide(run, run.plan, run.layers))
    assert {head.bits for each in candidates.values() for row in each.heads for head in row} == {bits}


def test_an_allocation_names_the_strategy_that_made_it(tmp_path):
    run = priced(tmp_path / "run", lambda head: 1 / (head.window + head.slots))
    plans = [replace(PLAN, strategy=strategy) for strategy in ("gain", "windows")]
    decided = [decide(run, plan, run.layers) for plan in plans]
    named = {name: each.strategy for name, each in candidates_of(run, decided[0]).items()}
    assert [each.strategy for each in decided] == ["gain", "windows"] and named[PRICED] == "gain"
    assert all(named[name] == name for name in named.keys() & {WINDOWS, SLOTS}) and named[WINDOW] == "window"


def test_another_budget_is_compared_anew(tmp_path):
    run = priced(tmp_path / "run", lambda option: 1 / (option.window + option.slots))
    run.write("candidates.json", Candidates((32,), (Candidate(PRICED, (0.1,)),)).to_json())
    reallocate(run, PLAN)
    assert run.candidates is None


def test_the_longest_texts_do_not_decide_alone_and_rounding_decides_nothing():
    lengths = (128, 512, 1024)
    priced = Candidate("by prices", (0.0003, 0.0010, 0.34))
    steady, window = Candidate("equal slots", (0.0005, 0.0749, 0.20)), Candidate("plain window", (0.0001, 0.0012, 0.34))
    assert Candidates(lengths, (priced, steady)).kept == priced
    assert (either := Candidates(lengths, (priced, window))).kept == priced
    assert either.why.endswith("has a smaller mean log KL (a KL below 0.001 counts as 0.001).")
    assert Candidates(lengths, (priced,)).why == "Kept: by prices, the only allocation of these bytes."
