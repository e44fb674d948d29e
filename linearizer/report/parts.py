"""How each part of an evaluation is shown: its title, its question, its tables and its chart.

Numbers and markers of a chart show what its colours show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linearizer.report import tables
from linearizer.report.plotly_charts import COUNTS_AXIS, GREY, LOG_AXIS, add_subject, new_figure
from linearizer.report.tables import Table, describe_environment, mean_of, write_tables
from linearizer.run import results
from linearizer.run.results import Part

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DrawPart = Callable[[Part[Any]], "Figure | None"]  # None: the result holds nothing to draw
LOSS_AXIS = {"title": "loss, nats per token"}
LENGTH_AXIS = {"title": "length of the text, tokens", **COUNTS_AXIS}


def no_chart(part: Part[Any]) -> None:
    """Draw nothing: the part is shown as tables alone."""


def recall_chart(part: Part[results.Recall]) -> Figure:
    recall = part.result
    figure = new_figure(300, {"title": "tokens since the passage came first", **COUNTS_AXIS}, LOSS_AXIS)
    for subject in recall.subjects:
        add_subject(figure, subject.name, recall.gaps, subject.second, "%{y:.3f} nats after %{x} tokens")
    first = recall.subjects[0]
    level = sum(first.first) / len(first.first)
    look = {"name": f"the first time, {first.name}", "hovertemplate": f"{level:.3f} nats<extra>the first time</extra>"}
    ends, line = [recall.gaps[0], recall.gaps[-1]], {"color": GREY, "width": 1, "dash": "longdash"}
    return figure.add_scatter(x=ends, y=[level] * 2, mode="lines", line=line, **look)


def needle_chart(part: Part[results.Needle]) -> Figure | None:
    needle = part.result
    if tables.teacher_recalls_little(needle) or len(needle.lengths) < 2:
        return None
    figure = new_figure(300, LENGTH_AXIS, {"title": "recalled", "range": [-0.05, 1.05], "tickformat": ".0%"})
    for subject in needle.subjects:
        means = [mean_of(row) for row in subject.correct]
        add_subject(figure, subject.name, needle.lengths, means, "%{y:.0%} recalled of %{x} tokens")
    return figure


def writing_chart(part: Part[results.Speed]) -> Figure | None:
    """Draw the speed of writing over the lengths of text, if all were measured at several."""
    figure, fewest = new_figure(300, LENGTH_AXIS, {"title": "tokens per second", **LOG_AXIS}), 2
    for subject in part.result.subjects:
        points = {pace.length: pace.write_rate for pace in subject.paces if pace.write_rate is not None}
        add_subject(figure, subject.name, [*points], [*points.values()], "%{y:.3g} tokens/s at %{x} tokens")
        fewest = min(fewest, len(points))
    return figure if fewest > 1 else None


@dataclass(frozen=True)
class PartView:
    """How one part of an evaluation is shown; `shows` describes its chart."""

    title: str
    question: str
    tables: Callable[[Part[Any]], list[Table]]
    draw: DrawPart = no_chart
    shows: str = ""

    @property
    def about(self) -> str:
        return f"{self.question} {self.shows}".strip()


PART_VIEWS = {
    "language": PartView("Language", "How well is the next token predicted?", tables.language_tables),
    "recall": PartView(
        "Recall",
        "How far back is a passage remembered?",
        tables.recall_tables,
        recall_chart,
        "Loss on a passage that is repeated after a number of tokens.",
    ),
    "needle": PartView(
        "Hidden pairs",
        "Is the value of a key recalled, wherever it stood?",
        tables.needle_tables,
        needle_chart,
        "The share that is recalled, over all places in the text.",
    ),
    "generation": PartView("Writing", "Does the student write as its teacher does?", tables.generation_tables),
    "speed": PartView(
        "Speed and memory",
        "How fast is the student, and how much memory does it need, on this machine?",
        tables.speed_tables,
        writing_chart,
        "Tokens written per second, one text at a time.",
    ),
    "tasks": PartView("Tasks", "How does the student score on tasks?", tables.tasks_tables),
}


def evaluation_report(parts: Mapping[str, Part]) -> str:
    """Write the results of parts as plain text: the tables of each part, then the software and devices."""
    texts = [f"{name}\n{write_tables(PART_VIEWS[name].tables(part))}" for name, part in parts.items()]
    notes = sorted({note for part in parts.values() for note in describe_environment(part)}, key=str.lower)
    return "\n\n".join([*texts, "\n".join(notes)])
