"""An evaluation as one HTML file that loads nothing else: tables and charts, in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from string import Template

from linearizer.publish.html import part_html, part_lead
from linearizer.publish.parts import PART_VIEWS
from linearizer.run.folder import Run
from linearizer.run.results import Part

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
:root { color-scheme: light dark; --ink: #1a1c1b; --faint: #565853; --line: #e6e6e1; --ground: #fafaf8; }
@media (prefers-color-scheme: dark) { :root { --ink: #f3f3f0; --faint: #a3a49d; --line: #272926; --ground: #121413; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h3 { margin: 2rem 0 0; } h2 { border-top: 1px solid var(--line); padding-top: 1rem; margin-top: 2.5rem; }
p { color: var(--faint); margin: .25rem 0; } .lz-scroll { overflow-x: auto; margin-top: .75rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100%; }
th, td { text-align: right; font-weight: 400; white-space: nowrap; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; } tbody th { font-weight: 600; } thead th, .lz-faint { color: var(--faint);
  font-size: .82rem; }
.js-plotly-plot g:not(.heatmap-label):not(.hovertext) > text { fill: var(--faint) !important; }
.js-plotly-plot .hovertext > text.name { fill: var(--ink) !important; }
.js-plotly-plot .annotation-text, .js-plotly-plot .legendtext { fill: var(--ink) !important; }
</style><script>$plotly</script></head><body><h1>$title</h1>$parts</body></html>
""")


def write_page(run: Run, parts: Mapping[str, Part]) -> str:
    """Write the tables and charts of parts as one page of HTML."""
    from plotly.offline import get_plotlyjs

    sections = "".join(write_section(name, part) for name, part in parts.items())
    return PAGE.substitute(title=escape(f"What {run.plan.model} kept"), plotly=get_plotlyjs(), parts=sections)


def write_section(name: str, part: Part) -> str:
    """Write the tables and charts of one part."""
    charts = []
    for number, chart in enumerate(PART_VIEWS[name].charts, 1):
        figure = chart.draw(part)
        if figure is None:
            continue
        drawn = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"{name}-{number}",
            config={"displayModeBar": False, "responsive": True},
        )
        charts.append(f"<h3>{escape(chart.title)}</h3><p>{escape(chart.text)}</p>{drawn}")
    lead = part_lead(name).replace("<h3", "<h2").replace("</h3>", "</h2>")
    return f"<section>{lead}{''.join(charts)}{part_html(name, part)}</section>"
