"""How each part of an evaluation is shown: its title, its question, its tables and its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from linearizer.report import evaluation_charts as charts
from linearizer.report import tables
from linearizer.report.evaluation_charts import Chart
from linearizer.report.tables import Table, describe_environment, write_tables
from linearizer.run.results import Part


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
        (charts.loss_chart, charts.position_chart),
    ),
    "recall": PartView("Recall", "How far back is a passage remembered?", tables.recall_tables, (charts.recall_chart,)),
    "needle": PartView(
        "Hidden pairs",
        "Is the value of a key recalled, wherever it stood?",
        tables.needle_tables,
        (charts.needle_chart,),
    ),
    "generation": PartView(
        "Writing", "Does the student write as its teacher does?", tables.generation_tables, (charts.difference_chart,)
    ),
    "approximation": PartView(
        "Approximation",
        "How far is the attention of every head from its teacher's?",
        tables.approximation_tables,
        (charts.error_chart,),
    ),
    "speed": PartView(
        "Speed and memory",
        "How fast is the student, and how much memory does it need, on this machine?",
        tables.speed_tables,
        (charts.writing_chart, charts.reading_chart, charts.memory_chart),
    ),
    "tasks": PartView(
        "Tasks", "How does the student score on public tasks?", tables.tasks_tables, (charts.score_chart,)
    ),
}


def evaluation_report(parts: Mapping[str, Part]) -> str:
    """Write the results of parts as plain text: the tables of each part, then what they were measured with."""
    texts = [f"{name}\n{write_tables(PART_VIEWS[name].tables(part))}" for name, part in parts.items()]
    notes = sorted({note for part in parts.values() for note in describe_environment(part)}, key=str.lower)
    return "\n\n".join([*texts, "\n".join(notes)])
