"""All recipes as points, KL over bytes, by what each reached with the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from linearizer.plan.recipes import RECIPES, WINDOW, Quality, measured_quality
from linearizer.report.line_chart import WIDTH, Axis, Frame, Line, place_names, write_power

NAMED = {  # recipes whose names stand in the chart; all others say theirs under the mouse
    "best": "measured",
    "windows": "windows",
    WINDOW: "plain window",
    "lolcats": "LoLCATs",
    "paper": "the paper",
}
MARGIN = 110  # right of the points, for these names
ABOUT = (
    "KL to the demo model by the bytes of the state, in tokens of its cache: a line for every recipe. The same figures "
    "stand in the list of recipes."
)


def draw_methods() -> str:
    """Draw a line with points for every recipe that was measured; each says by data-recipe which it is."""
    found = {name: rows for name in RECIPES if (rows := measured_quality().get(name))}
    points = [row for rows in found.values() for row in rows]
    budgets = sorted({row.budget for row in points})
    x = Axis(budgets[0], budgets[-1], [(budget, str(budget)) for budget in budgets], title="bytes, in tokens of cache")
    y = Axis.round((row.kl for row in points), "KL, nats per token", lambda ticks: [*map(write_power, ticks)])
    frame = Frame(x, y, WIDTH - MARGIN)
    lines = {name: Line(NAMED.get(name, name), placed(rows), kind_of(name)) for name, rows in found.items()}
    drawn = frame.draw_axes()
    for name, line in sorted(lines.items(), key=lambda item: item[0] in NAMED):  # the last lie above the others
        notes = [f"{RECIPES[name].label}, {budget:g} tokens: KL {kl:.2g}" for budget, kl in line.points]
        parts = frame.draw_line(Line(line.name, line.points, line.kind, notes=notes))
        drawn.append(f'<g class="lz-method" data-recipe="{escape(name, quote=True)}">{"".join(parts)}</g>')
    ends = [frame.place(lines[name].points[-1]) for name in NAMED]
    for (name, title), (at, height, anchor) in zip(NAMED.items(), place_names([*NAMED.values()], ends), strict=True):
        drawn.append(f'<text class="{kind_of(name)}" x="{at:g}" y="{height + 4:.1f}"{anchor}>{escape(title)}</text>')
    return (
        f'<figure class="lz-figure lz-real lz-methods"><svg viewBox="0 -18 {WIDTH} 276" role="img" '
        f'aria-label="{escape(ABOUT, quote=True)}">{"".join(drawn)}</svg></figure>'
    )


def placed(rows: Sequence[Quality]) -> list[tuple[float, float]]:
    return [(float(row.budget), row.kl) for row in rows]


def kind_of(name: str) -> str:
    """Return the class of a recipe's line in the page's style."""
    return {"best": "lz-student", "distilled": "lz-student", WINDOW: "lz-window"}.get(name, "lz-other")
