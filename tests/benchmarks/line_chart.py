"""Draws panels of lines as SVG for the README, both axes of each on a scale of factors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linearizer.report.line_chart import HEIGHT, LEFT, WIDTH, Axis, Line, draw_lines, round_numbers

TITLE, GAP = 24, 28  # units above a panel, and on either side, which names may take
STYLE = (  # colours stand out from white and from black
    "svg{font:12px sans-serif;fill:#7c8796}.lz-grid{stroke:#7c8796;stroke-opacity:.25}"
    ".lz-line{fill:none;stroke:#7c8796;stroke-width:2}.lz-line.lz-student{stroke:#2a83c4}"
    ".lz-line.lz-window{stroke:#c9772b}.lz-student{fill:#2a83c4}.lz-window{fill:#c9772b}"
    ".lz-line.lz-student,.lz-line.lz-window{fill:none}.lz-dashed{stroke-dasharray:5 3}"
)


@dataclass(frozen=True)
class Panel:
    """Lines over lengths in tokens, and how their values are written."""

    title: str
    lines: Sequence[Line]
    written: Callable[[float], str]


def draw(panels: Sequence[Panel], about: str) -> str:
    """Draw panels side by side; `about` says in words what is seen."""
    width, height = len(panels) * (WIDTH + 2 * GAP), TITLE + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{about}</title><style>{STYLE}</style>",
    ]
    for place, panel in enumerate(panels):
        left = place * (WIDTH + 2 * GAP) + GAP
        parts.append(f'<text x="{left + LEFT}" y="18" font-weight="bold">{panel.title}</text>')
        where = f'x="{left}" y="{TITLE}" width="{WIDTH}" height="{HEIGHT}" overflow="visible"'
        parts.append(draw_panel(panel).replace("<svg", f"<svg {where}", 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panel(panel: Panel) -> str:
    """Draw one panel."""
    lengths = sorted({int(length) for line in panel.lines for length, _ in line.points})
    values = [value for line in panel.lines for _, value in line.points]
    ticks = round_numbers(min(values), max(values))
    names = [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    some = [*zip(lengths, names, strict=True)][:: 1 + len(lengths) // 6]
    x = Axis(lengths[0], max(lengths[-1], lengths[0] + 1), some)
    y = Axis(ticks[0], ticks[-1], [(tick, panel.written(tick)) for tick in ticks])
    return draw_lines(panel.title, x, y, panel.lines)
