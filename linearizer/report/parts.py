"""How each part of an evaluation is shown: its title, its question, its tables and its charts.

Numbers and markers of a chart say what its colours say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from linearizer.report import chart_style as style
from linearizer.report import tables
from linearizer.report.chart_style import new_figure, subject_line
from linearizer.report.tables import Table, describe_environment, mark_beyond, write_tables
from linearizer.run import results
from linearizer.run.results import Interval, Part, Score

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DrawPart = Callable[[Part[Any]], "Figure | None"]  # None: the result holds nothing to draw
MAX_NUMBERED_CELLS = 16  # cells side by side up to which numbers can be read in them
LOSS_AXIS = {"title": "loss, nats per token"}


@dataclass(frozen=True)
class Chart:
    """A figure of a part, with its title and a sentence that says what it shows."""

    title: str
    text: str
    draw: DrawPart


def chart(title: str, text: str) -> Callable[[DrawPart], Chart]:
    """Make a chart of a function that draws it."""
    return partial(Chart, title, text)


def interval_bars(means: Sequence[float], intervals: Sequence[Interval]) -> dict[str, object]:
    """Describe error bars that span intervals."""
    above = [high - mean for mean, (_, high) in zip(means, intervals, strict=True)]
    below = [mean - low for mean, (low, _) in zip(means, intervals, strict=True)]
    return {"type": "data", "array": above, "arrayminus": below, "width": 4, "thickness": 1.5}


@chart("Quality by length", "KL to the teacher over texts of each length, lower is better; the bars are 95% intervals.")
def length_chart(part: Part[results.Language]) -> Figure | None:
    """Draw how far every subject is from the teacher, by the length of texts; without a teacher, its loss."""
    lengths = [result.length for result in part.result.lengths]
    if len(lengths) < 2:
        return None
    alone = any(subject.kl is None for subject in part.result.lengths[0].subjects)
    x = {"title": "length of the texts, tokens", "type": "log", "tickvals": lengths}
    y = LOSS_AXIS if alone else {"title": "kl, nats per token", **style.LOG_AXIS}
    figure = new_figure(300, {**x, "ticktext": [f"{length:,}" for length in lengths]}, y)
    for subjects in zip(*(result.subjects for result in part.result.lengths), strict=True):
        name, near = subjects[0].name, [subject.loss if alone else subject.kl for subject in subjects]
        if alone or name != "teacher":  # whose kl is zero, which this axis has not
            means = [each.mean for each in near if each is not None]
            bars = interval_bars(means, [each.interval for each in near if each is not None])
            look = subject_line(name, "%{y:.2g} nats over %{x} tokens")
            figure.add_scatter(x=lengths, y=means, error_y=bars, **look)
    return figure


@chart("Recall", "Loss on a passage that is repeated after a number of tokens.")
def recall_chart(part: Part[results.Recall]) -> Figure:
    recall = part.result
    figure = new_figure(300, {"title": "tokens since the passage came first", **style.COUNTS_AXIS}, LOSS_AXIS)
    for subject in recall.subjects:
        look = subject_line(subject.name, "%{y:.3f} nats after %{x} tokens")
        figure.add_scatter(x=recall.gaps, y=subject.second, **look)
    first = recall.subjects[0]
    level = sum(first.first) / len(first.first)
    look = {"name": f"the first time, {first.name}", "hovertemplate": f"{level:.3f} nats<extra>the first time</extra>"}
    ends, line = [recall.gaps[0], recall.gaps[-1]], {"color": style.GREY, "width": 1, "dash": "longdash"}
    return figure.add_scatter(x=ends, y=[level] * 2, mode="lines", line=line, **look)


@chart("Pairs hidden in text", "Share of a hidden value recalled by its key; * lies beyond the teacher's positions.")
def needle_chart(part: Part[results.Needle]) -> Figure | None:
    needle = part.result
    if tables.teacher_recalls_little(needle):
        return None
    grids = {subject.name: list(zip(*subject.correct, strict=True)) for subject in needle.subjects}  # [depth][length]
    down = -(-len(grids) // 2)
    colours = {"colorscale": [list(stop) for stop in style.MAP_COLOURS], "cmin": 0, "cmax": 1, "showscale": False}
    spacing = {"horizontal_spacing": 0.08, "vertical_spacing": 0.26 / down}
    figure = style.new_grid(60 + 230 * down, list(grids), min(2, len(grids)), colours, **spacing)
    lengths, depths = mark_beyond(needle.lengths, needle.extrapolated), [f"{depth:.0%}" for depth in needle.depths]
    axes = {"x": lengths, "y": depths, "texttemplate": "%{text}"}
    add_maps(figure, grids, ".0%", "–", "%{text} recalled<br>depth %{y} of %{x} tokens", axes)
    figure.update_xaxes(type="category").update_xaxes(title="length, tokens", row=down)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure.update_yaxes(title="depth, share of the text", col=1)


def add_maps(
    figure: Figure,
    tables: Mapping[str, Sequence[Sequence[float | None]]],
    form: str,
    missing: str,
    hover: str,
    how: Mapping[str, object],
) -> None:
    """Add a map for every table, two in a row, with its numbers as text."""
    for place, (name, table) in enumerate(tables.items()):
        figure.add_heatmap(
            z=[list(row) for row in table],
            text=[[missing if value is None else f"{value:{form}}" for value in row] for row in table],
            hovertemplate=f"{hover}<extra>{name}</extra>",
            row=place // 2 + 1,
            col=place % 2 + 1,
            coloraxis="coloraxis",
            **how,
            **style.MAP_CELLS,
        )


@chart("Where they leave the teacher", "Tokens before the first that is not the teacher's; a marker for each text.")
def difference_chart(part: Part[results.Generation]) -> Figure | None:
    compared = [(subject, subject.diverged) for subject in part.result.subjects if subject.diverged is not None]
    if not compared:
        return None
    longest = part.result.new_tokens
    x = {"title": "tokens before the first difference", "range": [-0.02 * longest, 1.03 * longest]}
    figure = new_figure(80 + 34 * len(compared), x, {"autorange": "reversed"}, showlegend=False)
    for subject, diverged in compared:
        name = f"{subject.name}, {'drawn' if subject.sampled else 'greedy'}"
        line = subject_line(subject.name, "after %{x} tokens") | {"mode": "markers", "name": name}
        figure.add_scatter(x=diverged, y=[name] * len(diverged), **line)
    return figure


@chart("Error of every head", "Share of attention that is misplaced.")
def error_chart(part: Part[results.Approximation]) -> Figure:
    named = {subject.name: subject.rows for subject in part.result.subjects}
    shown = [named[name] for name in ("untrained", "student") if name in named]
    titles = ["before training", "after training"] if len(shown) > 1 else [""]
    layers, heads = len(shown[0]), max((len(row) for row in shown[0]), default=1)
    tables = [[[*row, *[None] * (heads - len(row))] for row in table] for table in shown]
    colours = {"colorscale": style.WORSE_COLOURS, "cmin": 0, "colorbar": {"thickness": 10, "outlinewidth": 0}}
    height = max(240, min(26 * layers + 110, 760))
    figure = style.new_grid(height, titles, len(shown), colours, horizontal_spacing=0.05)
    readable = heads * len(shown) <= MAX_NUMBERED_CELLS and layers <= 48
    hover, how = "layer %{y}, KV head %{x}<br>%{z:.3f} misplaced", {"texttemplate": "%{text}" if readable else ""}
    add_maps(figure, dict(zip(titles, tables, strict=True)), ".2f", "", hover, how)
    figure.update_layout(plot_bgcolor=style.MAP_GROUND).update_xaxes(title="KV head", dtick=max(1, heads // 8))
    figure.update_yaxes(dtick=max(1, layers // 24), autorange="reversed", showgrid=False)
    return figure.update_yaxes(title="layer", col=1)


def draw_rates(part: Part[results.Speed], of: str) -> Figure | None:
    """Draw a rate of every subject over the lengths of text at which it was measured, where these are several."""
    x, y = (
        {"title": "length of the text, tokens", **style.COUNTS_AXIS},
        {"title": "tokens per second", **style.LOG_AXIS},
    )
    figure, lengths = new_figure(300, x, y), set[int]()
    for subject in part.result.subjects:
        points = {pace.length: rate for pace in subject.paces if (rate := getattr(pace, of)) is not None}
        line = subject_line(subject.name, "%{y:.3g} tokens/s at %{x} tokens")
        figure.add_scatter(x=[*points], y=[*points.values()], **line)
        lengths |= points.keys()
    return figure if len(lengths) > 1 else None


writing_chart = Chart("Writing", "Tokens written per second, one text at a time.", partial(draw_rates, of="write_rate"))
reading_chart = Chart("Reading", "Tokens read per second of a prompt.", partial(draw_rates, of="read_rate"))


@chart("Scores", "The score in every task, with standard errors.")
def score_chart(part: Part[results.Tasks]) -> Figure:
    y = {"title": "score, as the task defines it", "rangemode": "tozero"}
    figure = new_figure(340, y=y, scattermode="group", scattergap=0.5)
    for subject in part.result.subjects:
        first: dict[str, Score] = {}
        for score in subject.scores:
            if score.task not in first or score.metric == "acc":
                first[score.task] = score
        names = [f"{score.task}, {score.metric}" for score in first.values()]
        values = [score.value for score in first.values()]
        errors = {"type": "data", "array": [score.error or 0.0 for score in first.values()], "color": style.GREY}
        look = subject_line(subject.name, "%{x}: %{y:.3f}") | {"mode": "markers"}
        figure.add_scatter(x=names, y=values, error_y=errors, **look)
    return figure


@dataclass(frozen=True)
class PartView:
    """How one part of an evaluation is shown."""

    title: str
    question: str
    tables: Callable[[Part[Any]], list[Table]]
    charts: tuple[Chart, ...]


PART_VIEWS = {
    "language": PartView(
        "Language",
        "How well is the next token predicted?",
        tables.language_tables,
        (length_chart,),
    ),
    "recall": PartView("Recall", "How far back is a passage remembered?", tables.recall_tables, (recall_chart,)),
    "needle": PartView(
        "Hidden pairs",
        "Is the value of a key recalled, wherever it stood?",
        tables.needle_tables,
        (needle_chart,),
    ),
    "generation": PartView(
        "Writing", "Does the student write as its teacher does?", tables.generation_tables, (difference_chart,)
    ),
    "approximation": PartView(
        "Approximation",
        "How far is the attention of every head from its teacher's?",
        tables.approximation_tables,
        (error_chart,),
    ),
    "speed": PartView(
        "Speed and memory",
        "How fast is the student, and how much memory does it need, on this machine?",
        tables.speed_tables,
        (writing_chart, reading_chart),
    ),
    "tasks": PartView("Tasks", "How does the student score on public tasks?", tables.tasks_tables, (score_chart,)),
}


def evaluation_report(parts: Mapping[str, Part]) -> str:
    """Write the results of parts as plain text: the tables of each part, then what they were measured with."""
    texts = [f"{name}\n{write_tables(PART_VIEWS[name].tables(part))}" for name, part in parts.items()]
    notes = sorted({note for part in parts.values() for note in describe_environment(part)}, key=str.lower)
    return "\n\n".join([*texts, "\n".join(notes)])
