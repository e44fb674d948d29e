"""How each part of an evaluation is shown: its title, its question, its tables and its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from linearizer.report import evaluation_charts, language_charts, tables
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


EXTRAPOLATED = "Open markers are extrapolated from shorter texts."
SHARES = (
    "Shares of tokens in repeated runs of four; of different tokens; of different pairs; and of tokens that the "
    "teacher would choose."
)
PART_VIEWS = {
    "language": PartView(
        "Language",
        "How well is the next token predicted?",
        tables.language_tables,
        (
            Chart("Loss", "Next-token loss, lower is better; the bars are 95% intervals.", language_charts.draw_losses),
            Chart(
                "Loss by position",
                "The loss of a student that forgets grows with the position of a token; the bars are 95% intervals.",
                language_charts.draw_loss_by_position,
            ),
            Chart(
                "Calibration",
                "How often the likeliest token came, by its probability; on the dotted line both agree.",
                language_charts.draw_calibration,
            ),
        ),
    ),
    "recall": PartView(
        "Recall",
        "How far back is a passage remembered?",
        tables.recall_tables,
        (
            Chart(
                "Recall",
                "Loss on a passage that is repeated after a number of tokens; low where the passage is remembered.",
                language_charts.draw_recall,
            ),
            Chart(
                "Longer texts",
                "Loss beyond the length of the training texts; open markers lie beyond the teacher's positions.",
                language_charts.draw_longer_texts,
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
                "Share of a hidden value that is recalled when its key is given, by depth and length of the text; * "
                "marks lengths beyond the teacher's positions.",
                language_charts.draw_needle_maps,
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
                evaluation_charts.draw_first_differences,
            ),
            Chart(
                "What they write: the likeliest tokens",
                SHARES,
                partial(evaluation_charts.draw_written_shares, sampled=False),
            ),
            Chart(
                "What they write: drawn tokens", SHARES, partial(evaluation_charts.draw_written_shares, sampled=True)
            ),
        ),
    ),
    "approximation": PartView(
        "Approximation",
        "How far is the attention of every head from its teacher's?",
        tables.approximation_tables,
        (
            Chart(
                "Error of every head",
                "Share of attention that is misplaced, layer by KV head; the number is in the cell.",
                evaluation_charts.draw_error_maps,
            ),
            Chart(
                "Error by features",
                "The error if every KV head had this number of features and nothing else; the dotted line is what the "
                "profile predicts.",
                evaluation_charts.draw_error_curve,
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
                f"Tokens written per second, one text at a time, by its length. {EXTRAPOLATED}",
                partial(evaluation_charts.draw_rates, of="write_rate"),
            ),
            Chart(
                "Reading",
                f"Tokens read per second of a prompt, by its length. {EXTRAPOLATED}",
                partial(evaluation_charts.draw_rates, of="read_rate"),
            ),
            Chart(
                "Memory",
                "Bytes of the state or cache by the length of the text. Open markers are computed from the shape.",
                evaluation_charts.draw_memory,
            ),
        ),
    ),
    "tasks": PartView(
        "Tasks",
        "How does the student score on public tasks?",
        tables.tasks_tables,
        (Chart("Scores", "The score in every task, with standard errors.", evaluation_charts.draw_scores),),
    ),
}


def evaluation_report(parts: Mapping[str, Part]) -> str:
    """Write the results of parts as plain text: the tables of each part, then what they were measured with."""
    texts = [f"{name}\n{write_tables(PART_VIEWS[name].tables(part))}" for name, part in parts.items()]
    notes = sorted({note for part in parts.values() for note in describe_environment(part)}, key=str.lower)
    return "\n\n".join([*texts, "\n".join(notes)])
