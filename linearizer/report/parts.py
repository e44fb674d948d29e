"""How each part of an evaluation is shown: its title, its question, its tables and its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from linearizer.report import evaluation_charts as charts
from linearizer.report import tables
from linearizer.report.tables import Table, describe_environment, write_tables
from linearizer.run.results import Part

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Chart:
    """A figure with its title and a sentence that says what it shows."""

    title: str
    text: str
    draw: Callable[[Part[Any]], Figure | None]  # None: the result holds nothing to draw


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
        (
            Chart("Loss", "Next-token loss, lower is better; the bars are 95% intervals.", charts.draw_losses),
            Chart(
                "Loss by position",
                "The loss of a student that forgets grows with the position of a token; the bars are 95% intervals.",
                charts.draw_loss_by_position,
            ),
        ),
    ),
    "recall": PartView(
        "Recall",
        "How far back is a passage remembered?",
        tables.recall_tables,
        (
            Chart("Recall", "Loss on a passage that is repeated after a number of tokens.", charts.draw_recall),
            Chart(
                "Longer texts",
                "Loss beyond the length of the training texts; open markers lie beyond the teacher's positions.",
                charts.draw_longer_texts,
            ),
        ),
    ),
    "needle": PartView(
        "Hidden pairs",
        "Is the value of a key recalled, wherever it stood?",
        tables.needle_tables,
        (
            Chart(
                "Pairs hidden in text",
                "Share of a hidden value recalled when its key is given; * lies beyond the teacher's positions.",
                charts.draw_needle_maps,
            ),
        ),
    ),
    "generation": PartView(
        "Writing",
        "Does the student write as its teacher does?",
        tables.generation_tables,
        (
            Chart(
                "Where they leave the teacher",
                "Tokens before the first that is not the teacher's; a marker for each text.",
                charts.draw_first_differences,
            ),
        ),
    ),
    "approximation": PartView(
        "Approximation",
        "How far is the attention of every head from its teacher's?",
        tables.approximation_tables,
        (
            Chart("Error of every head", "Share of attention that is misplaced.", charts.draw_error_maps),
            Chart(
                "Error by features",
                "The error of heads with this number of features and nothing else; dotted: what the profile predicts.",
                charts.draw_error_curve,
            ),
        ),
    ),
    "speed": PartView(
        "Speed and memory",
        "How fast is the student, and how much memory does it need, on this machine?",
        tables.speed_tables,
        (
            Chart(
                "Writing",
                "Tokens written per second, one text at a time; open markers are extrapolated from shorter texts.",
                partial(charts.draw_rates, of="write_rate"),
            ),
            Chart(
                "Reading",
                "Tokens read per second of a prompt; open markers are extrapolated from shorter texts.",
                partial(charts.draw_rates, of="read_rate"),
            ),
            Chart("Memory", "Bytes of state or cache; open markers are computed from the shape.", charts.draw_memory),
        ),
    ),
    "tasks": PartView(
        "Tasks",
        "How does the student score on public tasks?",
        tables.tasks_tables,
        (Chart("Scores", "The score in every task, with standard errors.", charts.draw_scores),),
    ),
}


def evaluation_report(parts: Mapping[str, Part]) -> str:
    """Write the results of parts as plain text: the tables of each part, then what they were measured with."""
    texts = [f"{name}\n{write_tables(PART_VIEWS[name].tables(part))}" for name, part in parts.items()]
    notes = sorted({note for part in parts.values() for note in describe_environment(part)}, key=str.lower)
    return "\n\n".join([*texts, "\n".join(notes)])
