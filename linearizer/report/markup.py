"""The pieces of the page's HTML; they escape every text from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from linearizer.report.parts import PART_VIEWS
from linearizer.report.tables import Table, describe_environment
from linearizer.run.files import project_folder
from linearizer.run.names import runs_root
from linearizer.run.results import Part

MANY_COLUMNS = 4  # a phone shows the cells of a row below each other in tables with more


def message_box(text: str, kind: str = "note") -> str:
    """Put a sentence in a box; `kind` is note, good or bad, and a sign shows it."""
    sign = {"note": "ℹ\ufe0e", "good": "✓", "bad": "▲"}[kind]
    loud = announcement(text) if kind != "note" else ""
    return f'<p class="lz-message lz-{kind}"{loud}><span aria-hidden="true">{sign}</span> {sentence_html(text)}</p>'


def announcement(text: str) -> str:
    """Return the attribute by which the page's live region announces a new piece."""
    return f' data-heard="{escape(without_folders(text))}"'


def without_folders(text: str) -> str:
    """Remove the folder of the runs from a sentence, and replace angle brackets, which could be HTML."""
    root = re.escape(str(runs_root().absolute()))
    return re.sub(root + r"/(?:[0-9a-f]{40}/)?", "", text).replace("<", "‹").replace(">", "›")


def sentence_html(text: str) -> str:
    """Escape a sentence, and set text between backticks as code."""
    parts = escape(without_folders(text)).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 and n < len(parts) - 1 else part for n, part in enumerate(parts))


def values_list(pairs: Sequence[tuple[str, str]], kind: str = "") -> str:
    """Lay out named values."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="lz-facts {kind}">{cells}</dl>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], label: str = "", kind: str = "") -> str:
    """Lay out rows of cells, each after its name; `label` is for screen readers, and `kind` a class of the style."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in head)
    is_wide = len(head) > MANY_COLUMNS
    cells = [f'<td data-head="{escape(name, quote=True)}">' if is_wide else "<td>" for name in head[1:]]
    body = ""
    for row in rows:
        values = "".join(f"{begin}{escape(cell)}</td>" for begin, cell in zip(cells, row[1:], strict=False))
        body += f'<tr><th scope="row">{escape(row[0])}</th>{values}</tr>'
    kind += " lz-many" * is_wide
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="lz-scroll" tabindex="0" role="region" aria-label="{escape(label or caption)}"><table '
        f'class="lz-table {kind}">{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded(title: str, content: str, opened: bool = False) -> str:
    """Fold HTML under a title."""
    return f'<details class="lz-fold"{" open" * opened}><summary>{escape(title)}</summary>{content}</details>'


def part_html(name: str, part: Part, opened: bool = False) -> str:
    """Show the result of a part as folded tables."""
    view = PART_VIEWS[name]
    tables = "".join(table_html(f"{view.title}, {n}", table) for n, table in enumerate(view.tables(part), 1))
    notes = "".join(f"<li>{escape(without_folders(note))}</li>" for note in describe_environment(part))
    made_with = f'<p class="lz-faint">Measured with</p><ul class="lz-faint">{notes}</ul>'
    return folded("In numbers", tables + made_with, opened)


def table_html(caption: str, content: Table) -> str:
    """Lay out a table with its notes."""
    head, *rows = [[str(cell) for cell in row] for row in content.rows]
    notes = "".join(f'<p class="lz-faint">{escape(without_folders(note))}</p>' for note in content.notes)
    return table("", head, rows, label=caption) + notes


def glossary_html() -> str:
    """Lay out a "?" that opens the README's glossary; the browser handles mouse and keyboard."""
    readme = (project_folder() / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)[2:]  # after the head and the line under it
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning).replace('`', '')}</dd>" for word, meaning in rows)
    return (
        '<button type="button" class="lz-ask" popovertarget="glossary" aria-label="Glossary">?</button>'
        '<div id="glossary" class="lz-glossary" popover role="dialog" aria-label="Glossary">'
        f"<h2>Glossary</h2><dl>{words}</dl></div>"
    )
