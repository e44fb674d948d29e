"""The parts of an evaluation as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from linearizer.terminal import columns, size

Found = Mapping[str, Any]
Rows = list[Sequence[object]]


def evaluation_report(parts: Mapping[str, Found]) -> str:
    """Say all that was measured, a table for each part, and what it was measured with."""
    tables = [f"{part}\n{TABLES[part](found)}" for part, found in parts.items()]
    return "\n\n".join([*tables, *sorted({made_with_text(found["asked"]["made_with"]) for found in parts.values()})])


def made_with_text(made: Found) -> str:
    """Say with what, and whether there was a teacher."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    text = f"{made['dtype']} on {made['device']}; {versions}"
    return text if made["alone"] is None else f"{text}\nthe student was measured alone: {made['alone']}"


def text_of(found: Found) -> str:
    """Say on what text, and whether it is longer than the teacher's positions."""
    beyond = "; longer than the teacher's positions: extrapolated" if found.get("extrapolated") else ""
    return f"{found['texts']} texts of {found['length']} tokens of {found['text']}, seed {found['seed']}{beyond}"


def language_table(found: Found) -> str:
    rows: Rows = [("", "state", "loss", "95 %", "perplexity", "above teacher", "KL", "agreement", "calibration")]
    for one in found["subjects"]:
        low, high = one["loss"]["interval"]
        row = [one["name"], state(one["state_bytes"]), f"{one['loss']['mean']:.3f}", f"{low:.3f}–{high:.3f}"]
        row += [f"{one['perplexity']:.2f}", spread(one["excess"]), spread(one["kl"]), spread(one["agreement"], ".1%")]
        rows.append([*row, f"{one['calibration_error']:.3f}"])
    ranges: Rows = [("loss from token", *found["edges"])]
    ranges += [(one["name"], *(f"{loss:.3f}" for loss in one["by_position"])) for one in found["subjects"]]
    over = f"95 % intervals from {found['count']} {found['drawn']}, drawn again"
    return f"{columns(rows)}\n\n{columns(ranges)}\n{text_of(found)}; {over}"


def recall_table(found: Found) -> str:
    rows: Rows = [("loss the second time, after", *found["gaps"], "the first")]
    for one in found["subjects"]:
        first = sum(one["first"]) / len(one["first"])
        rows.append((one["name"], *(f"{loss:.3f}" for loss in one["second"]), f"{first:.3f}"))
    text = f"{columns(rows)}\npassages of {found['passage']} tokens; {text_of(found)}"
    if (longer := found["longer"]) is None:
        return text
    marks = ("*" if beyond else "" for beyond in longer["extrapolated"])
    ranges: Rows = [("loss from token", *(f"{edge}{mark}" for edge, mark in zip(longer["edges"], marks, strict=True)))]
    for name, losses in zip(longer["names"], longer["losses"], strict=True):
        ranges.append((name, *(f"{loss:.3f}" for loss in losses)))
    note = f"the features were trained on texts of {longer['trained']} tokens"
    star = "\n* beyond the teacher's positions: extrapolated" if any(longer["extrapolated"]) else ""
    return f"{text}\n\n{columns(ranges)}\n{note}{star}"


def state(bytes: int | None) -> str:
    return "grows" if bytes is None else size(bytes)


def spread(estimate: Found | None, form: str = ".3f") -> str:
    """A mean and half of its interval's width; a dash where there is nothing to compare with."""
    if estimate is None:
        return "–"
    low, high = estimate["interval"]
    return f"{estimate['mean']:{form}} ± {(high - low) / 2:{form}}"


TABLES: dict[str, Callable[[Found], str]] = {"language": language_table, "recall": recall_table}
