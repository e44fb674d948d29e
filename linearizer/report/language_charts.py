"""Figures of language, recall and hidden pairs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from linearizer.report.chart_style import (
    COUNTS_AXIS,
    FAINT,
    GREY,
    MAP_CELLS,
    MAP_COLOURS,
    new_figure,
    new_grid,
    open_markers,
    subject_line,
)
from linearizer.run.results import Language, Needle, Part, Recall

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def draw_losses(part: Part[Language]) -> Figure:
    """Draw the loss of every subject with its 95% interval."""
    language = part.result
    figure = new_figure(90 + 34 * len(language.subjects), showlegend=False)
    for subject in language.subjects:
        low, high = subject.loss.interval
        mean = subject.loss.mean
        look = subject_line(subject.name, f"%{{x:.3f}} nats, 95%: {low:.3f} to {high:.3f}") | {"mode": "markers+text"}
        bars = {"type": "data", "array": [high - mean], "arrayminus": [mean - low], "color": look["line"]["color"]}
        number = {"text": [f"{mean:.3f}"], "textposition": "top center"}
        figure.add_scatter(x=[mean], y=[look["name"]], error_x=bars, **number, **look)
    figure.update_xaxes(title="loss, nats per token", showgrid=True, gridcolor=FAINT)
    figure.update_yaxes(range=[len(language.subjects) - 0.5, -0.75])
    return figure


def draw_loss_by_position(part: Part[Language]) -> Figure:
    """Draw the loss of every subject by the position of a token, side by side so that no intervals overlap."""
    language, read = part.result, part.read
    assert read is not None, "the part reads texts"
    figure = new_figure(320, scattermode="group", scattergap=0.7)
    ends = [*language.edges[1:], read.length - 1]
    names = [f"{begin}–{end}" for begin, end in zip(language.edges, ends, strict=True)]
    reached: list[float] = []
    for subject in language.subjects:
        means = subject.by_position
        low, high = (
            [abs(end - mean) for end, mean in zip(ends, means, strict=True)]
            for ends in zip(*subject.position_intervals, strict=True)
        )
        bars = {"type": "data", "array": high, "arrayminus": low, "width": 4, "thickness": 1.5}
        figure.add_scatter(x=names, y=means, error_y=bars, **subject_line(subject.name, "%{y:.3f} nats at %{x}"))
        reached += [end for interval in subject.position_intervals for end in interval]
    room = 0.08 * (max(reached) - min(reached))
    figure.update_xaxes(title="position in the text, tokens", type="category")
    figure.update_yaxes(title="loss, nats per token", range=[min(reached) - room, max(reached) + room])
    return figure


def draw_calibration(part: Part[Language]) -> Figure:
    """Draw how often the likeliest token came, by its probability."""
    language = part.result
    figure = new_figure(320)
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "width": 1, "dash": "dot"}, showlegend=False,
        hoverinfo="skip",
    )  # fmt: skip
    for subject in language.subjects:
        bins = subject.bins
        figure.add_scatter(
            x=[own.probability for own in bins],
            y=[own.correct for own in bins],
            customdata=[f"{own.share:.1%}" for own in bins],
            **subject_line(subject.name, "given %{x:.0%}, came %{y:.0%}; %{customdata} of the predictions"),
        )
    figure.update_xaxes(title="probability of the likeliest token", range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title="share of times it came", range=[0, 1.02], tickformat=".0%")
    return figure


def draw_recall(part: Part[Recall]) -> Figure:
    """Draw the loss on a repeated passage by the gap, and the loss when it came first."""
    recall = part.result
    figure = new_figure(300)
    for subject in recall.subjects:
        figure.add_scatter(
            x=recall.gaps, y=subject.second, **subject_line(subject.name, "%{y:.3f} nats after %{x} tokens")
        )
    first = recall.subjects[0]
    level = sum(first.first) / len(first.first)
    figure.add_scatter(
        x=[recall.gaps[0], recall.gaps[-1]],
        y=[level] * 2,
        mode="lines",
        line={"color": GREY, "width": 1, "dash": "longdash"},
        name=f"the first time, {first.name}",
        hovertemplate=f"{level:.3f} nats<extra>the first time</extra>",
    )
    figure.update_xaxes(title="tokens since the passage came first", **COUNTS_AXIS)
    figure.update_yaxes(title="loss, nats per token")
    return figure


def draw_longer_texts(part: Part[Recall]) -> Figure | None:
    """Draw the loss by position in longer texts; open markers lie beyond the teacher's positions."""
    if (longer := part.result.longer) is None:
        return None
    figure = new_figure(300)
    names = [f"{begin}–{end}" for begin, end in pairwise(longer.edges)] + [f"from {longer.edges[-1]}"]
    for name, losses in zip(longer.names, longer.losses, strict=True):
        look = open_markers(subject_line(name, "%{y:.3f} nats at %{x}"), longer.extrapolated)
        figure.add_scatter(x=names, y=losses, **look)
    figure.update_xaxes(title="position in the text, tokens", type="category")
    figure.update_yaxes(title="loss, nats per token")
    return figure


def draw_needle_maps(part: Part[Needle]) -> Figure:
    """Draw a map for every subject, depth down and length across, with the recalled share in every cell."""
    needle = part.result
    names = [subject.name for subject in needle.subjects]
    down = -(-len(names) // 2)
    colours = {"colorscale": [list(stop) for stop in MAP_COLOURS], "cmin": 0, "cmax": 1, "showscale": False}
    spacing = {"horizontal_spacing": 0.08, "vertical_spacing": 0.26 / down}
    figure = new_grid(60 + 230 * down, names, min(2, len(names)), colours, **spacing)
    lengths = [f"{length}{'*' * beyond}" for length, beyond in zip(needle.lengths, needle.extrapolated, strict=True)]
    depths = [f"{depth:.0%}" for depth in needle.depths]
    for place, subject in enumerate(needle.subjects):
        shares = [list(row) for row in zip(*subject.correct, strict=True)]  # [depth][length]
        figure.add_heatmap(
            x=lengths,
            y=depths,
            z=shares,
            text=[["–" if share is None else f"{share:.0%}" for share in row] for row in shares],
            texttemplate="%{text}",
            hovertemplate=f"{names[place]}: %{{text}} recalled<br>depth %{{y}} of %{{x}} tokens<extra></extra>",
            row=place // 2 + 1,
            col=place % 2 + 1,
            coloraxis="coloraxis",
            **MAP_CELLS,
        )
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="length, tokens", row=down)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_yaxes(title="depth, share of the text", col=1)
    return figure
