"""Figures, as data: they say what the products say, and say it without colour too."""

import json

import pytest
from plotly.colors import sample_colorscale

from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.report import plotly_charts
from linearizer.run.measured import HeadProfile, LayerProfile, Prices, Profile, ProfileSettings

LAYERS = (Layer(4, 2, 32, 32), Layer(4, 2, 32, 32, native_window=64), Layer(4, 2, 32, 32))
MIXED = Allocation("gain", 4, ((Head(28, 32), Head(softmax=True)), (), (Head(8, 0), Head(16, 16))))
FIX = Allocation("fix", 4, ((Head(28, 32), Head(28, 32)), (), (Head(28, 32), Head(28, 32))))


def profile_of(scales):
    """Make up a profile with N(λ) = scale · λ^-½."""
    options = ProfileSettings()

    def head(scale):
        counts = tuple(scale * ridge**-0.5 for ridge in options.ridges)
        return HeadProfile(counts)

    return Profile(options, 1000, tuple(LayerProfile(tuple(map(head, row))) for row in scales))


PROFILE = profile_of([(1.0, 2.0), (), (3.0, 4.0)])
PRICES = Prices(4, (Head(window=8), Head(window=32)), (((0.5, 0.1), (0.6, 0.2)), (), ((0.3, 0.0), (0.4, 0.2))))
STEPS = [{"event": "distill", "done": n, "kl": 1 / n, "layers": {"0": 1 / n, "2": 2 / n}} for n in range(1, 1001)]


def contrast(first, second):
    """The contrast of two colours as WCAG 2 defines it: text must have at least 4.5."""

    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(light(colour) + 0.05 for colour in (first, second))
    return high / low


def everything():
    return {
        "map": plotly_charts.draw_freedom_map(PROFILE, LAYERS),
        "prices": plotly_charts.draw_price_map(PRICES, LAYERS, PRICES.options[0]),
        "bars": plotly_charts.draw_allocation(MIXED, LAYERS, FIX),
        "losses": plotly_charts.draw_training_losses(STEPS),
    }


@pytest.mark.parametrize("name", everything())
def test_every_figure_is_plain_json_on_a_transparent_ground_and_its_axes_say_their_units(name):
    drawn = everything()[name]
    figure = json.loads(drawn.to_json())
    assert "bdata" not in json.dumps(figure)  # what arrays of numpy become, which not every page can read
    assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)" and figure["data"]
    assert all(axis.title.text for axis in (*drawn.select_xaxes(), *drawn.select_yaxes()))


def test_the_map_shows_every_head_and_leaves_open_what_is_not_measured():
    drawn = plotly_charts.draw_freedom_map(PROFILE, LAYERS).data[0]
    assert [tuple(row) for row in drawn.text] == [("16", "32"), ("", ""), ("48", "64")]
    assert drawn.colorbar.title.text == "degrees of freedom" and drawn.coloraxis is None  # its own scale of colours


def test_bars_add_up_to_the_bytes_of_each_head():
    bars = {trace.name: trace for trace in plotly_charts.draw_allocation(MIXED, LAYERS, FIX).data}
    for place, (row, head) in enumerate([(0, 0), (0, 1), (2, 0), (2, 1)]):
        held = MIXED.heads[row][head]
        if not held.softmax:
            tokens = bars["exact tokens"].y[place] + bars["features"].y[place]
            assert tokens * head_bytes.token_bytes(LAYERS[row]) == head_bytes.head_bytes(held, LAYERS[row], 4, 0)
    assert bars["whole cache, grows"].y[1] > 0
    assert bars["whole cache, grows"].y[0] == 0
    fix = bars["the same for every head"].y
    assert fix[0] * head_bytes.token_bytes(LAYERS[0]) == head_bytes.head_bytes(FIX.heads[0][0], LAYERS[0], 4, 0)


def test_heads_are_compared_by_what_an_equal_share_of_the_budget_buys():
    for budget, window in ((40, 32), (20, 8), (1, 8)):  # beside 4 sinks
        option = plotly_charts.priced_alike(PRICES, LAYERS, budget)
        assert option == Head(window=window)
    drawn = plotly_charts.draw_price_map(PRICES, LAYERS, Head(window=32))
    assert [tuple(row) for row in drawn.data[0].text] == [("100", "200"), ("", ""), ("≤0.001", "200")]
    assert "each alone holds<br>32 tokens" in drawn.layout.xaxis.title.text


def test_no_two_models_of_an_evaluation_look_alike():
    styles = plotly_charts.SUBJECT_STYLES.values()
    assert {f"cache, {bits} bits" for bits in (2, 3, 4)} < plotly_charts.SUBJECT_STYLES.keys()
    assert len({marker for *_, marker, _ in styles}) == len({dash for *_, dash in styles}) == len(styles)
    for _, colour, *_ in styles:
        assert min(contrast(colour, ground) for ground in ("#ffffff", "#000000")) > 3


def test_numbers_can_be_read_on_every_colour_of_a_map():
    scale = [list(stop) for stop in plotly_charts.MAP_COLOURS]
    for colour in sample_colorscale(scale, [place / 20 for place in range(21)], colortype="tuple"):
        hexadecimal = "#" + "".join(f"{round(255 * part):02x}" for part in colour)
        assert contrast(hexadecimal, plotly_charts.MAP_INK) >= 4.5
