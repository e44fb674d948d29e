"""Writes amounts for people: numbers, times, bytes, tables."""

from __future__ import annotations

from collections.abc import Sequence


def count_in_words(count: int) -> str:
    """Parameters of a model: 7 million, 1.24 billion."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= 0.9995 * unit:  # with three digits that is 1
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    """A time, coarsely: 40 s, 12 min, 3.5 h, 4 d."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{round(seconds / 86400)} d"


def ago(moment: float, now: float) -> str:
    """The time since a moment, so coarsely that the text does not change every second."""
    past = max(0.0, now - moment)
    if past < 5:
        return "just now"
    return f"{duration(past - past % 5 if past < 90 else past)} ago"


def size(count: float) -> str:
    """Bytes with three digits: 512 B, 1.52 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # with three digits more would be 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def growing(fixed: int, growth: int) -> str:
    """Bytes, and the bytes that every token adds: 98.6 kB, or 1.20 kB + 64 B a token."""
    return f"{size(fixed)} + {size(growth)} a token" if growth else size(fixed)


def from_length(begin: int | None) -> str:
    """The length from which on something holds, in words; None: never."""
    if begin is None:
        return "never"
    return f"from {begin:,} tokens on" if begin else "at any length"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows of cells, with the first column aligned left and the others aligned right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in texts)
    return "\n".join("  ".join([row[0].strip().ljust(widths[0]), *row[1:]]).rstrip() for row in lines)
