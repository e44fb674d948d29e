"""The two charts of a result: quality by the length of texts, and quality by bytes, with alternatives."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

from linearizer.amounts import size
from linearizer.method.by_prices import kl_by_bytes
from linearizer.method.decide import offers_of
from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation
from linearizer.report.line_chart import Axis, Line, draw_lines
from linearizer.report.plotly_charts import MIN_DRAWN_KL, thin_points
from linearizer.report.tables import describe_intervals
from linearizer.report.verdict import find_correction
from linearizer.run.folder import Run
from linearizer.run.results import Language, Part

KL = "KL, nats per token"
KINDS = {"student": "lz-student", "window": "lz-window", "teacher": "lz-teacher"}
SAME_BYTES = ("student", "window")  # subjects of an evaluation
MAX_PREDICTED, MIN_POINTS = 60, 4  # points of the line of budgets
BY_LENGTH = "KL to the teacher over texts of each length, lower is better; the bars: {}."
BY_BYTES = "KL to the teacher over texts of {:,} tokens, lower is better, by bytes of memory; marks were measured."


def result_charts(run: Run, allocation: Allocation, part: Part[Language]) -> str:
    """Lay out both charts; a run that was judged at a single length lacks the one by length."""
    return f'<div class="lz-real lz-charts">{length_chart(part.result)}{bytes_chart(run, allocation, part)}</div>'


def length_chart(language: Language) -> str:
    """Draw how far every subject is from the teacher, by the length of texts; without a teacher, its loss."""
    lengths = [result.length for result in language.lengths]
    if len(lengths) < 2:
        return ""
    no_teacher = any(subject.kl is None for subject in language.lengths[0].subjects)
    title, lines = "loss, nats per token" if no_teacher else KL, []
    for subjects in zip(*(result.subjects for result in language.lengths), strict=True):
        estimates = [estimate for item in subjects if (estimate := item.loss if no_teacher else item.kl) is not None]
        if no_teacher or subjects[0].name != "teacher":  # whose KL is zero
            points = [(length, item.mean) for length, item in zip(lengths, estimates, strict=True)]
            ends = [item.interval for item in estimates]
            notes = [
                f"{mean:.4g} nats{f' ({low:.4g} to {high:.4g})' * (low < high)} over {length:,} tokens"
                for (length, mean), (low, high) in zip(points, ends, strict=True)
            ]
            lines.append(named_line(subjects[0].name, points, notes, ends))
    values = [end for line in lines for ends in line.intervals for end in ends]
    if no_teacher:
        low, high = min(values), max(values)
        middle = (low + high) / 2
        y = Axis(low, max(high, low + 0.01), [(at, f"{at:.3g}") for at in (low, middle, high)], log=False, title=title)
    else:
        y = kl_axis(values)
    named = [(length, f"{length:,}") for length in lengths][:: 1 + len(lengths) // 6]
    x = Axis(lengths[0], lengths[-1], named, title="length of the texts, tokens")
    last = language.lengths[-1]
    return figure("Quality by length", BY_LENGTH.format(describe_intervals(last.count, last.drawn)), x, y, lines)


def bytes_chart(run: Run, allocation: Allocation, part: Part[Language]) -> str:
    """Draw bytes and KL of the student and of its alternatives, on texts of the run's length.

    A line shows the KL that prices predict for every budget, corrected by the KL of whole students. There is none
    where the state grows: prices count its bytes at another length.
    """
    layers, language = run.layers, part.result
    assert (read := part.read) is not None, "the part reads texts"
    length = run.plan.resolved_length(run.positions)  # as long as what prices predict
    at = language.at(length)
    subjects, length = (at.subjects, length) if at else (language.subjects, read.length)
    state_bytes = max(allocation.state_bytes(layers, length), 1)  # an axis of factors has no zero
    lines, about = [] if allocation.growth(layers) else predicted_line(run), BY_BYTES.format(length)
    if lines:
        about += f" The line is what the prices predict{corrected_by(run)}."
    for subject in subjects:
        if subject.kl is not None and subject.name in SAME_BYTES:
            notes = [f"KL {subject.kl.mean:.4g} with {size(state_bytes)}"]
            lines.append(named_line(subject.name, [(state_bytes, subject.kl.mean)], notes))
    if not lines:
        return ""
    cache = head_bytes.cache_bytes(layers, length)
    counts = [cache, *(count for line in lines for count, _ in line.points)]
    x = Axis.round(counts, "state or cache, bytes", lambda counts: [size(count) for count in counts])
    y = kl_axis(kl for line in lines for _, kl in line.points)
    cache_line = Line(f"teacher’s cache, {size(cache)}", [(cache, y.low), (cache, y.high)], "lz-teacher", marked=False)
    return figure("Quality by bytes", about, x, y, [*lines, cache_line], at_ends=True)


def kl_axis(values: Iterable[float]) -> Axis:
    """Return the axis of KL: an axis of factors has no zero, so a KL below the smallest is drawn at its end."""
    return Axis.round((max(kl, MIN_DRAWN_KL) for kl in values), KL)


def predicted_line(run: Run) -> list[Line]:
    """Return the line of the KL that prices predict, if prices decide."""
    if run.plan.strategy_spec.decided_by != "prices" or not run.has_file("prices.json"):
        return []
    token, factor = head_bytes.cache_bytes(run.layers, 1), factor_of(run)
    priced = thin_points(kl_by_bytes(offers_of(run, run.plan, run.layers)), MAX_PREDICTED)
    points = [(float(count), max(factor * kl, MIN_DRAWN_KL)) for count, kl in priced]
    notes = [f"KL {kl:.2g} predicted with {size(count)}, {count / token:.0f} tokens of cache" for count, kl in points]
    # named where it begins, as there is room above it
    return [Line("predicted", points, "lz-predicted", notes=notes, marked=False, named_first=True)]


def budget_chart(run: Run, budget: int, least: int) -> str:
    """Draw the KL that prices predict by the budget from `least` on, the chosen one, and the knee; empty without."""
    token = head_bytes.cache_bytes(run.layers, 1)
    points = [
        (count / token, kl) for line in predicted_line(run) for count, kl in line.points if count >= least * token
    ]
    if len(points) < MIN_POINTS:
        return ""
    knee = find_knee(points)
    x = Axis.round([*(at for at, _ in points), budget], "budget, tokens of cache")
    y = kl_axis(kl for _, kl in points)
    marked = [(f"{budget:,}", budget, "lz-student"), (f"knee {knee:,.0f}", knee, "lz-other")]
    lines = [Line("", points, "lz-predicted", marked=False)]
    lines += [Line(name, [(at, y.low), (at, y.high)], kind, marked=False) for name, at, kind in marked]
    about = f"More than some {knee:,.0f} tokens buy little. The line is what prices predict{corrected_by(run)}."
    return figure("KL by budget", about, x, y, lines, at_ends=True)


def find_knee(points: Sequence[tuple[float, float]]) -> float:
    """Return where a falling line bends most: farthest below the straight line between its ends, in factors."""
    (first, high), (last, low) = points[0], points[-1]
    x, y = Axis(first, last, ()), Axis(low, max(high, 1.01 * low), ())
    return min(points, key=lambda point: x.share(point[0]) + y.share(point[1]))[0]


def factor_of(run: Run) -> float:
    """Return the factor by which whole students correct what prices predict."""
    return 1.0 if (correction := find_correction(run)) is None else correction.factor


def corrected_by(run: Run) -> str:
    return f", times {factor:.2g}, as whole students were measured" if (factor := factor_of(run)) != 1 else ""


def named_line(
    name: str,
    points: Sequence[tuple[float, float]],
    notes: Sequence[str],
    intervals: Sequence[tuple[float, float]] = (),
) -> Line:
    """Return the line of a subject, which looks the same in both charts."""
    return Line(name, points, KINDS.get(name, "lz-cache"), intervals, [f"{name}: {note}" for note in notes])


def figure(title: str, about: str, x: Axis, y: Axis, lines: Sequence[Line], at_ends: bool = False) -> str:
    """Lay out a chart below its title and a sentence about it; a button of head.html saves its numbers."""
    notes = [note for line in lines for note in dict.fromkeys((*line.notes[:1], *line.notes[-1:]))]
    drawn = draw_lines(f"{title}. {'; '.join(notes)}", x, y, lines, at_ends)
    numbers = escape(numbers_csv(x, y, [line for line in lines if line.notes]), quote=True)
    return f'<figure class="lz-chart lz-figure" data-csv="{numbers}"><h3>{title}</h3><p>{about}</p>{drawn}</figure>'


def numbers_csv(x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Write the points of lines, and their intervals if there are any, as CSV."""
    written = io.StringIO()
    table = csv.writer(written, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerow(("line", x.title, y.title, *["95% from", "to"] * any(line.intervals for line in lines)))
    for line in lines:
        for point, ends in zip_longest(line.points, line.intervals, fillvalue=()):
            table.writerow((line.name, *point, *ends))
    return written.getvalue()
