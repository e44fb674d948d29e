"""The table of the benchmark on a real model: what was measured of every row, budget and document, and its summary."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import torch

from linearizer.amounts import size
from linearizer.evaluate.language import Units
from linearizer.report.line_chart import Line
from linearizer.report.tables import in_ten_thousand
from linearizer.run.files import write_whole
from tests.benchmarks.line_chart import Panel, draw
from tests.benchmarks.quality_rows import FORMER, ROWS, describe_row
from tests.benchmarks.quality_table import Table

TEACHER, BESIDE = "teacher", "swa, 8 bits"  # the row that differences are taken from is of the same budget
DRAWN = {  # rows of the chart, by their names there
    "student": "best",
    "plain window": "swa, 8 bits",
    "H2O": "h2o, 8 bits",
    "TOVA": "tova, 8 bits",
    "ZSMerge": "zsmerge, 8 bits",
}
NAMES = {row: name for name, row in DRAWN.items()}
KINDS = {"student": "lz-student", "plain window": "lz-window"}  # how lines look
DRAWN_BUDGET = 256  # at which all of them are drawn
LEAD_LENGTH, LEAD_WINDOWS = 4096, (256, 1024)  # tokens, and budgets of windows
TAIL = (
    " After the KL stands how many of 10,000 positions are catastrophic: the teacher loses less than 0.1 nats there, "
    "and the row more than 1."
)
ABOUT = (
    "KL is to the teacher, in nats a token; brackets hold intervals of 95% by Student's t over the documents, and "
    f"differences are paired, document by document.{TAIL} A document is read once, "
    "and its first tokens are the shorter texts. A needle is a number of six digits: the share of numbers that are "
    "told whole, by depth. Long-text tasks, of RULER's kinds but with other sentences and scoring: the share of right "
    "answers over tasks and depths, and the loss of the answers. "
    "Answers: the teacher answers questions about a text, in its chat template: the share of the answers' tokens "
    "that a row would write next, and how many it writes as the teacher does before the first other token. "
    "Seconds are those of making the student, without judging it; passes are the tokens that went through the model "
    "for that, over the tokens of the texts that the run measured and trained on, whose number and length stand last."
)


class RealTable(Table):
    """Records by row and budget; a row that has no budget has 0."""

    def find(self, row, budget, source=None):
        """Return the record of a row, or an empty one; with `source`, only one that was judged on these texts."""
        found = [r for r in self.records if (r["row"], r["budget"]) == (row, budget)]
        found = [r for r in found if source in (None, r.get("source"))]
        empty = {"row": row, "budget": budget, "seed": 0, "texts": {}, "state": {}, "needle": {}, "ruler": {}}
        return {"answers": {}, "source": source, **(found[0] if found else empty)}

    def write(self):
        """Write the records and the table; return the table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file("json"), json.dumps([self.summed_up(record) for record in self.records], indent=0) + "\n")
        write_whole(self.file("md"), text := self.markdown())
        return text

    def summed_up(self, record):
        """Add to a record what its documents say together."""
        others = {name: value for name, value in record.items() if name != "summary"}
        summary = {
            str(length): {
                "kl": self.estimate(record, "kl", length),
                "kl less window": self.difference(record, length),
                **{name: self.estimate(record, name, length) for name in ("agreement", "loss", "catastrophic")},
            }
            for length in lengths_of(record)
        }
        return {**others, "summary": summary}

    def estimate(self, record, measure, length, other=None):
        """Return mean and interval of a measure over documents, or of its difference from another record's."""
        names = sorted(name for name in record["texts"] if other is None or name in other["texts"])
        own = [mean_until(record["texts"][name], measure, length) for name in names]
        theirs = [0.0 if other is None else mean_until(other["texts"][name], measure, length) for name in names]
        values = [a - b for a, b in zip(own, theirs, strict=True) if a is not None and b is not None]
        if not values:
            return None
        owners = torch.arange(len(values))[:, None]
        found = Units(owners).estimate(torch.tensor(values, dtype=torch.float64)[:, None])
        return {"mean": found.mean, "interval": found.interval, "documents": len(values)}

    def difference(self, record, length):
        """Return how much larger the KL of a row is than that of the window at its budget; None if not known."""
        other = self.find(BESIDE, record["budget"])
        if record["row"] in (TEACHER, BESIDE) or not other["texts"]:
            return None
        return self.estimate(record, "kl", length, other)

    def markdown(self):
        """Write a block for every budget, and what the rows are."""
        budgets = sorted({record["budget"] for record in self.records})
        blocks = [self.block(budget) for budget in budgets]
        rows = [row for row in (*ROWS, *FORMER) if any(record["row"] == row for record in self.records)]
        lines = [f"- `{row}`: {describe_row(row)}" for row in rows]
        documents = sorted({name for record in self.records for name in record["texts"]})
        judged = f"Judged on {count_kinds(documents)}: {', '.join(map(shorten, documents))}."
        return "\n\n".join([ABOUT, judged, *blocks, "\n".join(["What the rows are", "", *lines])]) + "\n"

    def short(self):
        """Write the KL of the student, of its rivals and of caches in few bits alone."""
        shown = {*DRAWN.values(), *(row for row in ROWS if row.startswith("cache"))}
        records = [record for record in self.ordered() if record["row"] in shown and "refused" not in record]
        lengths = sorted({length for record in records for length in lengths_of(record)})
        lines = [
            [NAMES.get(record["row"], record["row"]), str(record["budget"] or ""), held(record)]
            + [self.kl_and_tail(record, length) for length in lengths]
            for record in records
        ]
        names = sorted({name for record in records for name in record["texts"]})
        head = ["", "budget", "state", *(f"KL, {length:,} tokens" for length in lengths)]
        return f"{grid(head, lines)}\n\nJudged on {count_kinds(names)}.{TAIL * any('; ' in line[-1] for line in lines)}"

    def lead(self):
        """Write what matters most of one length: the student of a budget, and windows of its bytes and of more."""
        lines = [["the model's cache, which grows", held(self.find(TEACHER, 0), LEAD_LENGTH), "0", "0"]]
        for name, budget in (("student", DRAWN_BUDGET), *(("plain window", budget) for budget in LEAD_WINDOWS)):
            record = self.find(DRAWN[name], budget)
            kl, share = (self.estimate(record, measure, LEAD_LENGTH)["mean"] for measure in ("kl", "catastrophic"))
            lines.append([f"{name}, budget {budget}", held(record, LEAD_LENGTH), f"{kl:.4f}", in_ten_thousand(share)])
        return grid([f"{LEAD_LENGTH:,} tokens", "state", "KL", "catastrophic, of 10,000 positions"], lines)

    def kl_and_tail(self, record, length):
        """Write the KL of a row, and how many of 10,000 positions are catastrophic."""
        kl, share = (self.estimate(record, measure, length) for measure in ("kl", "catastrophic"))
        return in_words(kl) + (f"; {in_ten_thousand(share['mean'])}" if share else "")

    def chart(self):
        """Draw the KL over the length of the text: all rows at one budget, and two rows at the budgets of both."""
        with_all = [{record["budget"] for record in self.records if record["row"] == DRAWN[name]} for name in KINDS]
        budgets = sorted(set.intersection(*with_all))
        rivals = [self.line(name, row, DRAWN_BUDGET, KINDS.get(name, "lz-other")) for name, row in DRAWN.items()]
        sizes = [
            self.line(
                f"{name.split()[-1]}, {budget}", DRAWN[name], budget, kind + " lz-dashed" * (budget != DRAWN_BUDGET)
            )
            for budget in budgets
            for name, kind in KINDS.items()
        ]
        panels = [
            Panel(title, [line for line in lines if line.points], "{:g}".format)
            for title, lines in ((f"KL at a budget of {DRAWN_BUDGET} tokens", rivals), ("KL at each budget", sizes))
        ]
        about = "KL to the teacher, SmolLM2-135M-Instruct, over the length of a text, for students and rivals"
        return draw([panel for panel in panels if panel.lines], about)

    def line(self, name, row, budget, kind):
        """Return the line of a row: its mean KL at every length, but where it is none, as on a text that fits."""
        record = self.find(row, budget)
        found = [(length, self.estimate(record, "kl", length)) for length in lengths_of(record)]
        return Line(
            name, [(length, estimate["mean"]) for length, estimate in found if estimate and estimate["mean"] > 0], kind
        )

    def ordered(self):
        """List the records by budget, those that have none last, and by row."""
        order = [TEACHER, *ROWS, *FORMER]
        return sorted(self.records, key=lambda record: (record["budget"] or math.inf, order.index(record["row"])))

    def block(self, budget):
        """Write the rows of a budget, or those that have none."""
        records = [record for record in self.ordered() if record["budget"] == budget]
        title = f"## Budget {budget}" if budget else "## The teacher, and its whole cache in few bits, which grows"
        kl, loss, tasks = self.kl_table(records), self.place_table(records), self.task_table(records)
        return "\n\n".join([title, kl, *loss, *tasks])

    def kl_table(self, records):
        lengths = sorted({length for record in records for length in lengths_of(record)})
        head = ["", "state"]
        for length in lengths:
            head += [f"KL, {length}; of 10,000", f"less window, {length}", f"agrees, {length}"]
        lines = []
        for record in records:
            cells = [record["row"], held(record)]
            for length in lengths:
                cells += [self.kl_and_tail(record, length), in_words(self.difference(record, length))]
                agreement = self.estimate(record, "agreement", length)
                cells.append(f"{100 * agreement['mean']:.1f}%" if agreement else "")
            made = record.get("made", {})
            cells += [f"{made['seconds']:.0f}" if made else "", f"{made['passes']:.1f}" if made else ""]
            cells.append(f"{made['texts']} of {made['length']}" if made else "")
            lines.append(cells)
        return grid([*head, "s", "passes", "texts"], lines)

    def place_table(self, records):
        """Write loss, and KL, by place in the text."""
        edges = max((text["edges"] for record in records for text in record["texts"].values()), key=len, default=[0])
        if len(edges) < 2:
            return []
        head = [f"{a}–{b}" for a, b in pairwise(edges)]
        tables = []
        for measure, digits in (("loss", 3), ("kl", 4)):
            lines = []
            for record in records:
                texts = [x for x in record["texts"].values() if x["edges"] == edges[: len(x["edges"])]]
                columns = zip(*(text[measure] for text in texts), strict=False)  # to where all were read
                cells = [f"{sum(column) / len(column):.{digits}f}" for column in columns]
                lines.append([record["row"], *cells, *[""] * (len(head) - len(cells))])
            tables.append(f"{measure.upper() if measure == 'kl' else 'Loss'} by place\n\n" + grid(["", *head], lines))
        return tables

    def task_table(self, records):
        """Write needles by depth and long-text tasks, at every length."""
        tables = []
        for length, done in by_length(records, "needle"):
            head = ["", *(f"{depth:.0%}" for depth in done[0][1]["depths"]), "numbers a depth"]
            lines = [[row, *(f"{share:.0%}" for share in own["whole"]), str(own["count"])] for row, own in done]
            tables.append(f"Needles in {length} tokens\n\n" + grid(head, lines))
        for length, done in by_length(records, "ruler"):
            kinds = list(done[0][1]["tasks"])
            scores = [(row, [own["tasks"][kind] for kind in kinds]) for row, own in done]
            lines = [[row, *(f"{one['right']:.0%}, {one['loss']:.2f}" for one in tasks)] for row, tasks in scores]
            tables.append(f"Long-text tasks in {length} tokens\n\n" + grid(["", *kinds], lines))
        for length, done in by_length(records, "answers"):
            lines = [
                [row, f"{own['agreement']:.1%}", f"{own['alike']:.1f} of {own['tokens']:.1f}"] for row, own in done
            ]
            tables.append(f"Answers about {length} tokens\n\n" + grid(["", "agrees", "tokens alike"], lines))
        return tables


def by_length(records, kind):
    """List the lengths of needles, tasks or answers, and what each row has there."""
    found = [(record["row"], record.get(kind, {})) for record in records]
    lengths = sorted({int(length) for _, own in found for length in own})
    return [(n, [(row, own[str(n)]) for row, own in found if str(n) in own]) for n in lengths]


def lengths_of(record):
    """List the lengths at which the documents of a record were judged."""
    return sorted(map(int, record["state"]))


def mean_until(text, measure, length):
    """Return the mean of a measure over the first tokens of a document; None where it was not read that far."""
    if length not in text["edges"] or measure not in text:
        return None
    places = text["edges"].index(length)
    counts = text["counts"][:places]
    return math.fsum(a * b for a, b in zip(text[measure], counts, strict=False)) / sum(counts)


def held(record, length=None):
    """Write how many bytes are held after a length, or after the longest text, and the shortest where they grow."""
    if length is not None:
        return size(record["state"][str(length)])
    sizes = [record["state"][str(length)] for length in lengths_of(record)]
    if not sizes:
        return ""
    first = f"{size(sizes[0])} at {lengths_of(record)[0]}, " if sizes[0] != sizes[-1] else ""
    return f"{first}{size(sizes[-1])}"


def in_words(estimate):
    """Write a mean and its interval."""
    if estimate is None:
        return ""
    low, high = estimate["interval"]
    mean, low, high = (round(x, 4) + 0.0 for x in (estimate["mean"], low, high))  # a sum turns -0 into 0
    return f"{mean:.4f} [{low:.4f}, {high:.4f}]"


def count_kinds(names):
    """Count documents by their kinds, the first words of their names: 24 documents: 4 code, 4 news, …"""
    kinds = Counter(name.split()[0] for name in names)
    return f"{len(names)} documents: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def shorten(name):
    return name if len(name) <= 40 else f"{name[:38]}…"


def grid(head, lines):
    """Write a table in Markdown."""
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
