"""Need, price and purchase of heads: numbers, the sentence about them, and the picture."""

import csv
import io
import re

import pytest

from linearizer.page.visitors import example_folder
from linearizer.plan import head_bytes
from linearizer.plan.plan import Plan
from linearizer.report.head_needs import HeadNeed, HeadNeeds, Measuring, correlate, needs_of, needs_table, ranks
from linearizer.report.needs_chart import draw_needs
from linearizer.report.tables import write_tables
from linearizer.run.folder import Run
from linearizer.run.measured import Curve

EXAMPLE = Run(example_folder())
HEADS = sum(layer.kv_heads for layer in EXAMPLE.layers)
SHAPE = {"layers": 8, "ridge": 2.0**-8, "share": 64.0, "length": 512}


@pytest.fixture(scope="module")
def needs():
    return needs_of(EXAMPLE, EXAMPLE.allocation)


def made_up(prices, option=EXAMPLE.prices.options[0]):
    heads = [HeadNeed(place, 0, float(place + 1), price=price) for place, price in enumerate(prices)]
    return HeadNeeds(tuple(heads), **SHAPE, option=option)


def test_heads_need_hold_and_cost_what_the_run_measured_and_bought(needs):
    assert len(needs.heads) == sum(map(len, EXAMPLE.allocation.heads)) == HEADS
    tokens = sum(head.tokens * head_bytes.token_bytes(EXAMPLE.layers[head.layer]) for head in needs.heads)
    assert tokens == pytest.approx(EXAMPLE.allocation.state_bytes(EXAMPLE.layers, needs.length))
    at = EXAMPLE.prices.options.index(needs.option)
    head = needs.heads[-1]
    assert head.price == EXAMPLE.prices.kl[-1][-1][at]
    profile = EXAMPLE.profile
    assert head.freedoms == profile.settings.at_reference(profile.layers[-1].heads[-1].freedoms)
    assert 0 < head.interval[0] < head.freedoms < head.interval[1]


def test_at_the_ridge_of_a_budget_heads_need_as_much_as_they_hold_on_average(needs):
    assert sum(head.at_budget for head in needs.heads) / HEADS == pytest.approx(needs.share, rel=1e-3)
    assert needs.budget_ridge < needs.ridge  # the budget is more than the degrees of freedom at the paper's λ
    measured = EXAMPLE.profile.layers[0].heads[0]
    curve = Curve.through(measured.freedoms, EXAMPLE.profile.settings.ridges)
    assert curve.at(20.0) > needs.heads[0].at_budget > needs.heads[0].freedoms


def test_correlation_of_ranks_agrees_with_known_values_and_its_interval_narrows():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    first, second = [1.0, 2, 3, 4, 5, 6, 7, 8], [1.0, 2, 3, 5, 4, 7, 8, 6]
    rho, low, high = correlate(first, second)
    assert rho == pytest.approx(1 - 6 * 8 / (8 * 63))  # Spearman's formula without ties
    assert -1 < low < rho < high < 1
    repeated = correlate(ranks(first * 4), ranks(second * 4))
    assert repeated[0] == pytest.approx(rho, abs=0.02) and repeated[1] > low
    assert correlate(ranks([1.0] * 8), second) == (0.0, -1.0, 1.0)  # all alike: nothing is known


def test_the_sentence_says_whether_need_and_price_agree_and_names_heads_that_differ():
    assert "agree in this model: rank correlation 1.00" in made_up([float(n) for n in range(12)]).agreement
    assert "contradict each other" in made_up([-float(n) for n in range(12)]).agreement
    mixed = made_up([11.0, *map(float, range(11))]).agreement
    assert "layer 0, KV head 0 (need 12, price 1)" in mixed and "layer 5" not in mixed
    assert made_up([1.0, 2.0]).agreement == ""  # too few to say


def test_the_picture_has_a_bar_for_every_head_that_grows_with_what_it_holds(needs):
    need, price, exact, older = draw_needs(needs).data
    assert need.visible is None and price.visible is False
    assert sum(cell is not None for row in need.z for cell in row) == len(exact.y) == HEADS
    tops = [low + high for low, high in zip(exact.y, older.y, strict=True)]
    for colours in (need, price):  # at round numbers, the ends among them
        assert colours.zmin <= colours.colorbar.tickvals[0] and colours.colorbar.tickvals[-1] <= colours.zmax
        assert all(re.fullmatch(r"[125]0*|0\.0*[125]|([25]·)?10[⁻⁰-⁹¹²³]+", name) for name in colours.colorbar.ticktext)
    order = sorted(range(HEADS), key=lambda at: needs.heads[at].tokens)
    assert [tops[at] for at in order] == sorted(tops) and max(tops) < 1
    assert "degrees of freedom at λ = 2⁻⁸" in need.text[2][7] and "tokens of cache" in need.text[2][7]


def test_its_numbers_are_a_tidy_table(needs):
    rows = [*csv.DictReader(io.StringIO(draw_needs(needs).layout.meta["csv"]))]
    assert len(rows) == HEADS and "<" not in "".join(rows[0])
    for row, head in zip(rows, needs.heads, strict=True):
        assert (int(row["layer"]), int(row["head"])) == (head.layer, head.head)
        assert float(row["KL in nats"]) == pytest.approx(head.price, rel=1e-5)


def test_it_fills_while_heads_are_measured(tmp_path):
    run = Run.create(tmp_path / "run", Plan.of(model="demo", budget=64))
    run.write_product("inspection.json", EXAMPLE.inspection.to_json())
    measuring = Measuring()
    for done, number in enumerate((5.0, 7.0), 1):
        measuring.add({"event": "profile", "done": done, "layer": 0, "freedoms": number})
    measuring.add({"event": "price", "done": 1, "layer": 3, "kl_of_heads": [0.1, 0.2, 0.3]})
    needs = needs_of(run, measuring=measuring)
    assert [head.freedoms for head in needs.heads[:3]] == [5.0, 7.0, None]
    assert [head.price for head in needs.heads[8:11]] == [None, 0.1, 0.2] and measuring.count == 3
    assert sum(cell is not None for row in draw_needs(needs).data[0].z for cell in row) == 2


def test_a_table_for_terminals_and_cards_says_the_same(needs):
    text = write_tables([needs_table(needs)])
    assert "N(λ) at 2⁻⁸" in text and "rank correlation" in text and re.search(r"\d \(\d+–\d+\)", text)
    assert len([line for line in text.splitlines() if line[:1].isdigit()]) == len(EXAMPLE.layers)
