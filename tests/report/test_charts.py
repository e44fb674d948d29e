"""Figures, as data: they say what the products say, and say it without colour too."""

import json

import pytest

from linearizer.report import plotly_charts
from linearizer.report.head_needs import HeadNeed, HeadNeeds
from linearizer.report.needs_chart import draw_needs
from linearizer.run.measured import HeadProfile, LayerProfile, Profile, ProfileSettings

NEEDS = HeadNeeds((HeadNeed(0, 0, 16.0, (12.0, 21.0), price=0.1), HeadNeed(2, 0, price=0.0)), 3, 2.0**-8, 8.0, 128)


def profile_of(scales):
    """Make up a profile with N(λ) = scale · λ^-½."""
    options = ProfileSettings()

    def head(scale):
        counts = tuple(scale * ridge**-0.5 for ridge in options.ridges)
        return HeadProfile(counts)

    return Profile(options, 1000, tuple(LayerProfile(tuple(map(head, row))) for row in scales))


PROFILE = profile_of([(1.0, 2.0), (), (3.0, 4.0)])
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
        "needs": draw_needs(NEEDS),
        "curves": plotly_charts.draw_freedom_curves(PROFILE),
        "losses": plotly_charts.draw_training_losses(STEPS),
    }


@pytest.mark.parametrize("name", everything())
def test_every_figure_is_plain_json_on_a_transparent_ground_and_its_axes_say_their_units(name):
    drawn = everything()[name]
    figure = json.loads(drawn.to_json())
    assert "bdata" not in json.dumps(figure)  # what arrays of numpy become, which not every page can read
    assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)" and figure["data"]
    assert all(axis.title.text for axis in (*drawn.select_xaxes(), *drawn.select_yaxes()))


def test_a_training_has_a_faint_line_for_each_layer_and_a_bold_smoothed_mean():
    *layers, mean = plotly_charts.draw_training_losses(STEPS).data
    assert [line.name for line in layers] == ["layer 0", "layer 2"] and mean.name == "mean"
    assert mean.line.width > max(line.line.width for line in layers)
    assert mean.text[-1] == "mean" and {line.text[-1] for line in layers} == {"layer 0", "layer 2"}
    assert layers[0].y[-1] < mean.y[-1] < layers[1].y[0]


def test_no_two_models_of_an_evaluation_look_alike():
    styles = plotly_charts.SUBJECT_STYLES.values()
    assert len({marker for *_, marker, _ in styles}) == len({dash for *_, dash in styles}) == len(styles)
    for _, colour, *_ in styles:
        assert min(contrast(colour, ground) for ground in ("#ffffff", "#000000")) > 3
