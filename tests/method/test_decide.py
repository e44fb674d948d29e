"""Another budget is shared out from what a run has measured, or is refused in a sentence that says what to do."""

import pytest

from linearizer.cli.main import main
from linearizer.errors import BudgetError, RequestError
from linearizer.method.decide import check_budget, decide
from linearizer.method.head_prices import options_to_price
from linearizer.pipeline import inspect
from linearizer.plan.head_bytes import WITHOUT_ATTENTION, Layer, cache_bytes
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.measured import Prices
from linearizer.student.update_rules import UPDATE_RULES


@pytest.fixture(scope="module")
def inspection():
    return inspect("demo")


@pytest.fixture
def priced(tmp_path, inspection):
    """A run whose heads were priced with one sink, with slots or what is named."""

    def begin(far="slots", recipe="best", fewer=()):
        run = Run.create(tmp_path / f"{recipe}-{far}", Plan.of(recipe, model="demo", budget=32))
        run.write("inspection.json", inspection.to_json())
        if run.plan.strategy_spec.decided_by == "prices":
            offered = options_to_price(64, far, 8, fewer)
            sizes = [option.window + option.slots or 1000 for option in offered]
            rows = [[[1 / size for size in sizes]] * 4] * 8
            run.write("prices.json", Prices(1, offered, rows).to_json())
        return run

    return begin


def refusal(capsys, run, *options):
    """The message of a request that is refused; the run does not change."""
    before = run.plan
    assert main(["allocate", str(run.folder), *options]) == 2
    assert run.plan == before and not run.has_file("allocation.json")
    return capsys.readouterr().err


def test_prices_are_shared_out_as_they_were_measured(priced):
    run = priced()
    for options in (["--budget", "64"], ["--sinks", "1"], ["--bits", "8"], ["--strategy", "windows"]):
        assert main(["allocate", str(run.folder), *options]) == 0
    assert run.allocation.sinks == 1 and {head.slots for row in run.allocation.heads for head in row} == {0}


def test_bits_that_are_asked_for_leave_out_fewer(priced):
    run = priced(fewer=(6, 4))
    bits = []
    for options in ([], ["--bits", "8"]):
        assert main(["allocate", str(run.folder), *options]) == 0
        bits.append({head.bits for row in run.allocation.heads for head in row})
    assert min(bits[0]) < 8 and bits[1] == {8}


def test_bits_in_which_a_key_does_not_fill_bytes_are_refused():
    layers = (Layer(4, 4, 20, 16),)
    check_budget(Plan("demo", budget=64, bits=6), layers)
    with pytest.raises(RequestError, match="of 20 numbers does not fill bytes at 5 bits a number: ask for 8 or 16"):
        check_budget(Plan("demo", budget=64, bits=5), layers)


def test_what_the_prices_do_not_tell_of_is_refused(priced, capsys):
    run = priced()
    assert "measured with sinks 1, not 0: start a new run" in refusal(capsys, run, "--sinks", "0")
    assert "measured with 8 bits a number, not 16: start a new run" in refusal(capsys, run, "--bits", "16")
    assert "the strategy gain-features is no longer offered" in refusal(capsys, run, "--strategy", "gain-features")
    assert "measured without slots" in refusal(capsys, priced(far=""), "--budget", "64")


@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "window", "--budget", "2", "--sinks", "4"],
        ["--budget", "1"],
        ["--strategy", "windows", "--budget", "1"],
    ],
    ids=" ".join,
)
def test_a_budget_that_a_run_would_refuse_is_refused(options, priced, tmp_path, capsys):
    message = refusal(capsys, priced(), *options)
    assert "is too small" in message
    assert main(["run", "demo", "--out", str(tmp_path / "new"), *options]) == 2
    assert capsys.readouterr().err == message


def test_what_only_a_new_run_measures_is_said(priced, capsys):
    run, alike = priced(), priced(recipe="swa")
    message = refusal(capsys, alike, "--strategy", "gain", "--may-grow")
    assert "resuming it measures none: start a new run with --strategy gain" in message
    (run.folder / "prices.json").unlink()
    assert "has no prices yet: `linearizer run --resume` measures them" in refusal(capsys, run)
    assert "has no profile yet" in refusal(capsys, run, "--strategy", "fix")
    run.checkpoint.mkdir()
    assert "start a new run with --strategy gain" in refusal(capsys, run)


@pytest.mark.parametrize("budget", [16, 32, 64, 128])
def test_a_memory_takes_what_a_window_leaves_of_the_budget(budget, inspection):
    for memory in UPDATE_RULES:
        plan = Plan.of("gdn", model="demo", budget=budget, feature_map=memory)
        allocation = decide(None, plan, inspection.layers)
        (head,) = {head for row in allocation.heads for head in row}
        spent, paid = allocation.state_bytes(inspection.layers, 512), cache_bytes(inspection.layers, budget)
        assert head.memory == memory and head.window >= plan.resolved_window and head.features
        assert paid - 2 * paid / budget < spent <= paid
        assert head.features <= UPDATE_RULES[memory].most_rows(inspection.layers[0].key_dim)


@pytest.mark.parametrize("recipe", ["swa", "gdn"])
def test_layers_without_attention_hold_nothing_where_all_heads_hold_the_same(recipe, inspection):
    plan, softmax = Plan.of(recipe, model="demo", budget=32), inspection.layers[0]
    allocation = decide(None, plan, (WITHOUT_ATTENTION, softmax))
    assert [len(heads) for heads in allocation.heads] == [0, softmax.kv_heads]
    assert allocation.heads[1] == decide(None, plan, (softmax,)).heads[0]


def test_a_memory_that_cannot_be_is_refused(inspection):
    with pytest.raises(
        BudgetError, match="no room for a row of mom beside a window of 60 and 4 sinks: ask for at least"
    ):
        decide(None, Plan.of("mom", model="demo", budget=64, window=60), inspection.layers)
    with pytest.raises(RequestError, match="shares out features, of which gdn has none: ask for --strategy memory"):
        Plan.of("features", model="demo", budget=64, feature_map="gdn")
    with pytest.raises(RequestError, match="needs a memory, and feature map 'mlp' is none"):
        Plan.of("gdn", model="demo", budget=64, feature_map="mlp")
    for loss in ("softmax", "softmax+direct"):
        with pytest.raises(RequestError, match="gdn has no rows of attention, which the loss .* ask for --loss output"):
            Plan.of("gdn", model="demo", budget=64, loss=loss)
