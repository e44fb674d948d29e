"""Figures of writing, head errors, speed and tasks; numbers, patterns and markers say what colours say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from linearizer.amounts import size
from linearizer.report.chart_style import (
    COUNTS_AXIS,
    GREY,
    LOG_AXIS,
    MAP_CELLS,
    MAP_COLOURS,
    bar_numbers,
    new_figure,
    new_grid,
    open_markers,
    subject_bars,
    subject_line,
)
from linearizer.run.results import Approximation, Generation, Part, Score, Speed, Tasks

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_NUMBERED_CELLS = 16  # cells or bars side by side up to which numbers can be read at them


def draw_first_differences(part: Part[Generation]) -> Figure | None:
    """Draw after how many tokens every text differs from the teacher's."""
    generation = part.result
    compared = [(subject, subject.diverged) for subject in generation.subjects if subject.diverged is not None]
    if not compared:
        return None
    longest = generation.new_tokens
    figure = new_figure(80 + 34 * len(compared), showlegend=False)
    for subject, diverged in compared:
        name = f"{subject.name}, {'drawn' if subject.sampled else 'greedy'}"
        line = subject_line(subject.name, "after %{x} tokens") | {"mode": "markers", "name": name}
        figure.add_scatter(x=diverged, y=[name] * len(diverged), **line)
    figure.update_xaxes(title="tokens before the first difference", range=[-0.02 * longest, 1.03 * longest])
    figure.update_yaxes(autorange="reversed")
    return figure


def draw_written_shares(part: Part[Generation], sampled: bool) -> Figure:
    """Draw shares of the tokens that every subject wrote, as bars with their numbers."""
    generation = part.result
    figure = new_figure(300, barmode="group", scattermode="group", bargap=0.2)
    for subject in generation.subjects:
        if subject.sampled != sampled:
            continue
        shares = {"repeated": subject.repeated, "different": subject.distinct[0], "pairs": subject.distinct[1]}
        if subject.likeliest is not None:
            shares["chosen"] = subject.likeliest
        values = list(shares.values())
        figure.add_bar(**subject_bars(subject.name, list(shares), values, ".0%"))
        figure.add_scatter(**bar_numbers(subject.name, list(shares), values, values))
    figure.update_yaxes(title="share of tokens", range=[0, 1.12], tickformat=".0%")
    return figure


def draw_error_maps(part: Part[Approximation]) -> Figure:
    """Draw the errors of the student, beside the errors of the untrained student."""
    named = {subject.name: subject for subject in part.result.subjects}
    shown = [named[name] for name in ("untrained", "student") if name in named]
    names = ["before training", "after training"] if len(shown) > 1 else [""]
    layers, heads = len(shown[0].rows), max((len(row) for row in shown[0].rows), default=1)
    scale = [[1 - at, colour] for at, colour in reversed(MAP_COLOURS)]  # light cells are small errors
    colours = {"colorscale": scale, "cmin": 0, "showscale": False}
    figure = new_grid(max(240, min(26 * layers + 110, 760)), names, len(shown), colours, horizontal_spacing=0.05)
    for place, subject in enumerate(shown):
        table = [[*row, *[None] * (heads - len(row))] for row in subject.rows]
        readable = heads * len(shown) <= MAX_NUMBERED_CELLS and layers <= 48
        figure.add_heatmap(
            z=table,
            text=[["" if error is None else f"{error:.2f}" for error in row] for row in table],
            texttemplate="%{text}" if readable else "",
            hovertemplate="layer %{y}, KV head %{x}<br>%{z:.3f} misplaced<extra>" + names[place] + "</extra>",
            row=1,
            col=place + 1,
            coloraxis="coloraxis",
            **MAP_CELLS,
        )
    figure.update_layout(plot_bgcolor="rgba(128,138,150,0.10)")
    figure.update_xaxes(title="KV head", dtick=max(1, heads // 8))
    figure.update_yaxes(dtick=max(1, layers // 24), autorange="reversed", showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    return figure


def draw_error_curve(part: Part[Approximation]) -> Figure | None:
    """Draw the error over the number of features, and what the degrees of freedom predict."""
    if (curve := part.result.curve) is None:
        return None
    figure = new_figure(320)
    for name, errors in zip(curve.names, curve.rows, strict=True):
        line = subject_line("student" if name == "trained" else name, "%{y:.3f} misplaced with %{x} features")
        figure.add_scatter(x=curve.features, y=errors, **line | {"name": name})
    predicted = subject_line("teacher", "λ = %{y:.2g} at %{x} features") | {"name": "λ where N(λ) is that many"}
    figure.add_scatter(x=curve.features, y=curve.predicted, **predicted)
    figure.update_xaxes(title="features per KV head", **COUNTS_AXIS)
    figure.update_yaxes(title="share of attention misplaced", **LOG_AXIS)
    return figure


def draw_rates(part: Part[Speed], of: str) -> Figure:
    """Draw a rate over the length of the text; open markers are extrapolated."""
    speed = part.result
    known = {pace.length for subject in speed.subjects for pace in subject.paces if getattr(pace, of) is not None}
    figure = new_lengths_figure(sorted(known) or speed.lengths)
    for subject in speed.subjects:
        paces = [pace for pace in subject.paces if getattr(pace, of) is not None]
        reasons = [f", extrapolated for lack of {pace.extrapolated}" if pace.extrapolated else "" for pace in paces]
        line = subject_line(subject.name, "%{y:.3g} tokens/s at %{x} tokens%{customdata}")
        line = open_markers(line, list(map(bool, reasons)))
        own = [getattr(pace, of) for pace in paces]
        figure.add_scatter(x=[pace.length for pace in paces], y=own, customdata=reasons, **line)
    figure.update_yaxes(title="tokens per second", **LOG_AXIS)
    return figure


def draw_memory(part: Part[Speed]) -> Figure:
    """Draw the bytes of state or cache over the length of the text; open markers are computed from the shape."""
    speed = part.result
    figure = new_lengths_figure(speed.lengths)
    for subject in speed.subjects:
        measured = [None if pace.extrapolated else pace.state_bytes for pace in subject.paces]
        sizes = [
            pace.predicted_bytes if known is None else known
            for pace, known in zip(subject.paces, measured, strict=True)
        ]
        computed = [known is None for known in measured]
        labels = [size(bytes) + ", by its shape" * mark for bytes, mark in zip(sizes, computed, strict=True)]
        line = open_markers(subject_line(subject.name, "%{customdata} at %{x} tokens"), computed)
        figure.add_scatter(x=[pace.length for pace in subject.paces], y=sizes, customdata=labels, **line)
    figure.update_yaxes(title="state or cache, bytes", **COUNTS_AXIS)
    return figure


def new_lengths_figure(lengths: Sequence[int]) -> Figure:
    """Create a figure over lengths of text."""
    figure = new_figure(300)
    ends = [math.log10(lengths[0] / 1.15), math.log10(lengths[-1] * 1.15)]
    figure.update_xaxes(title="length of the text, tokens", range=ends, **COUNTS_AXIS)
    return figure


def draw_scores(part: Part[Tasks]) -> Figure:
    """Draw the first metric of every task as bars: accuracy where a task has it."""
    tasks = part.result
    figure = new_figure(340, barmode="group", scattermode="group", bargap=0.25)
    for subject in tasks.subjects:
        first: dict[str, Score] = {}
        for score in subject.scores:
            if score.task not in first or score.metric == "acc":
                first[score.task] = score
        names = [f"{score.task}, {score.metric}" for score in first.values()]
        values = [score.value for score in first.values()]
        errors = [score.error or 0.0 for score in first.values()]
        figure.add_bar(
            error_y={"type": "data", "array": errors, "color": GREY}, **subject_bars(subject.name, names, values, ".3f")
        )
        heights = [value + error for value, error in zip(values, errors, strict=True)]
        if len(names) * len(tasks.subjects) <= MAX_NUMBERED_CELLS:
            figure.add_scatter(**bar_numbers(subject.name, names, values, heights))
    figure.update_yaxes(title="score, as the task defines it", rangemode="tozero")
    return figure
