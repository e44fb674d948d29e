"""The table of what the quality benchmark measured: a file of records, and a text of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from linearizer.amounts import size
from linearizer.plan.recipes import RECIPES, SUMMARY
from linearizer.run.files import write_whole
from linearizer.student.update_rules import UPDATE_RULES
from tests.benchmarks.quality_rows import FORMER, MEMORY_STEPS, ROWS, describe_row

RESULTS = Path(__file__).parent / "results"
LONG = " at 8192"  # how rows end that are priced for longer texts
LENGTH, PASSAGE = 512, 64  # of texts, unless another is asked for, and of what comes again in them


class Table:
    """What has been measured, kept in a file."""

    def __init__(self, path, length=LENGTH):
        self.path, self.length = path, length
        self.records = json.loads(self.file("json").read_text()) if self.file("json").exists() else []

    def file(self, kind):
        return self.path.with_name(f"{self.path.name}.{kind}")  # a model's name may have dots of its own

    def has(self, row, budget, seed):
        return any((r["row"], r["budget"], r["seed"]) == (row, budget, seed) for r in self.records)

    def add(self, record):
        """Add a record, in the place of one that was measured before."""
        cell = [record[name] for name in ("row", "budget", "seed")]
        self.records = [r for r in self.records if [r["row"], r["budget"], r["seed"]] != cell] + [record]

    def write(self):
        """Write both forms; return the table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file("json"), json.dumps(self.records, indent=0))
        text = self.markdown()
        write_whole(self.file("md"), text)
        if self.path == RESULTS / "quality-demo":
            write_whole(SUMMARY, json.dumps(self.summary(), indent=1) + "\n")
        return text

    def summary(self):
        """Return what `linearizer run --recipe list` and the page say of each recipe."""
        budgets = sorted({record["budget"] for record in self.records})
        result = {name: [(budget, self.of(name, budget)) for budget in budgets] for name in RECIPES}
        means = {name: [mean_quality(*each) for each in of_row if each[1]] for name, of_row in result.items()}
        for name in UPDATE_RULES:
            means[name] = [row for budget in budgets for row in self.of_memory(name, budget)]
        return {name: of_row for name, of_row in means.items() if of_row}

    def of_memory(self, name, budget):
        """Return the quality of a memory at a budget: trained, and as it begins where that was not measured."""
        for row in (f"{name}, {MEMORY_STEPS} steps", f"{name}, untrained"):
            if records := self.of(row, budget):
                return [{**mean_quality(budget, records), **({"untrained": True} if "untrained" in row else {})}]
        return []

    def of(self, row, budget):
        return [r for r in self.records if (r["row"], r["budget"]) == (row, budget) and "loss" in r]

    def markdown(self):
        budgets = sorted({record["budget"] for record in self.records})
        kinds = [[row for row in (*ROWS, *FORMER) if row.endswith(LONG) == long] for long in (False, True)]
        blocks = [self.block(budget, rows) for rows in kinds for budget in budgets]
        rows = [row for row in (*ROWS, *FORMER) if any(self.of(row, budget) for budget in budgets)]
        lines = ["What the rows are", "", *(f"- `{row}`: {describe_row(row)}" for row in rows)]
        return "\n\n".join([*filter(None, blocks), "\n".join(lines)]) + "\n"

    def block(self, budget, kind):
        """The rows of one budget that were judged on the same text, their teacher first."""
        edges = edges_of(self.length)
        places = (f"<{edges[1]}", *(f"{a}–{b}" for a, b in pairwise(edges[1:])), f">{edges[-1]}")
        tails = ("KL, 99%", "KL, 99.9%", "RMS Δp")
        gaps = [f"recall at {gap}" for gap in gaps_of(self.length)]
        names = ("", "loss", *places, "KL", *tails, "agrees", *gaps)
        names = (*names, "no far field", "no window", "state", "s", "seeds")
        rows = [row for row in kind if self.of(row, budget)]
        if not rows:
            return ""
        title = f"Budget {budget}" + (", priced for 8192 tokens, on texts of 1024" if rows[0].endswith(LONG) else "")
        lines = [title, "", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        lines.append(self.line("teacher", [record["teacher"] for record in self.of(rows[0], budget)]))
        for row in rows:
            lines.append(self.line(row, self.of(row, budget)))
        refused = sorted({r["row"] for r in self.records if (r["budget"], "refused" in r) == (budget, True)} & {*kind})
        if refused:
            lines += ["", f"Not to be had at this budget: {', '.join(refused)}."]
        return "\n".join(lines)

    @staticmethod
    def line(name, result):
        """One row: means over seeds, ± half of their range where there are several."""

        def cell(values, digits):
            mean, spread = sum(values) / len(values), (max(values) - min(values)) / 2
            return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread >= 0.5 * 10**-digits else "")

        cells = [cell([r["loss"] for r in result], 3)]
        cells += [cell([r["by_position"][i] for r in result], 3) for i in range(len(result[0]["by_position"]))]
        cells.append(cell([r["kl"] for r in result], 4))
        tails = [r["tail"] for r in result if "tail" in r]  # of none that was measured before tails were
        for measure, digits in (("kl_99", 3), ("kl_999", 3), ("probability_change", 4)):
            cells.append(cell([tail[measure] for tail in tails], digits) if tails else "")
        cells.append(cell([100 * r["agreement"] for r in result], 1) + "%")
        cells += [cell([100 * share(r, i) for r in result], 0) + "%" for i in range(len(result[0]["recall"]))]
        for ablation in ("no far", "no window"):
            kept = [r[ablation]["loss"] for r in result if ablation in r]
            cells.append(cell(kept, 3) if kept else "")
        seconds = [r["seconds"] for r in result if "seconds" in r]
        cells += [held_bytes(result[0]), cell(seconds, 0) if seconds else "", str(len(result))]
        return f"| {name} | " + " | ".join(cells) + " |"


def edges_of(length):
    """List where the ranges of positions begin."""
    return [edge for edge in (0, 64, 256, 1024) if 2 * edge <= length]


def gaps_of(length):
    """List the tokens between a passage and its second time, the last as many as fit after some text."""
    some = (64, 128, 256) if length <= LENGTH else (64, 256, 1024)
    return [*(gap for gap in some if 2 * gap <= length), length - 3 * PASSAGE]


def mean_quality(budget, records):
    """Return the means of some records as the fields of a Quality."""
    shares = [share(record, index) for record in records for index in range(len(record["recall"]))]
    kl = sum(record["kl"] for record in records) / len(records)
    return dict(budget=budget, kl=round(kl, 5), recall=round(sum(shares) / len(shares), 3), seeds=len(records))


def held_bytes(record):
    """Write how many bytes are held at the end of a text, and of longer texts where they grow."""
    if "state" not in record:
        return ""
    later = (f"{size(bytes)} at {length}" for length, bytes in record.get("later", {}).items())
    return ", ".join([size(record["state"]), *later])


def share(record, index):
    """What a student gains the second time, as a share of what its teacher gains."""
    mine, theirs = record["recall"][index], record.get("teacher", record)["recall"][index]
    return (mine["first"] - mine["second"]) / (theirs["first"] - theirs["second"])
