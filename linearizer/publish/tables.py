"""The parts of an evaluation as tables, which a terminal, the page and the card each lay out in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linearizer.amounts import columns, from_length, size

Found = Mapping[str, Any]
Rows = list[Sequence[object]]


@dataclass(frozen=True)
class Table:
    """Rows of cells, the head first; and what is to be said below."""

    rows: Sequence[Sequence[object]]
    notes: tuple[str, ...] = ()


def text_of(tables: Sequence[Table]) -> str:
    """Write tables as plain text."""
    return "\n\n".join("\n".join([columns(table.rows), *table.notes]) for table in tables)


def made_with(found: Found) -> tuple[str, ...]:
    """Say with what a part was measured, and whether there was a teacher."""
    made = found["asked"]["made_with"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    text = f"{made['dtype']} on {made['device']}; {versions}"
    return (text,) if made["alone"] is None else (text, f"the student was measured alone: {made['alone']}")


def source_of(found: Found) -> str:
    """Say on what text, and whether it is longer than the teacher's positions."""
    beyond = "; longer than the teacher's positions: extrapolated" if found.get("beyond") is True else ""
    return f"{found['texts']} texts of {found['length']} tokens of {found['text']}, seed {found['seed']}{beyond}"


def language_tables(found: Found) -> list[Table]:
    rows: Rows = [("", "state", "loss", "95 %", "perplexity", "above teacher", "KL", "agreement", "calibration")]
    for one in found["subjects"]:
        low, high = one["loss"]["interval"]
        row = [one["name"], state(one["state_bytes"]), f"{one['loss']['mean']:.3f}", f"{low:.3f}–{high:.3f}"]
        row += [f"{one['perplexity']:.2f}", spread(one["excess"]), spread(one["kl"]), spread(one["agreement"], ".1%")]
        rows.append([*row, f"{one['calibration_error']:.3f}"])
    ranges: Rows = [("loss from token", *found["edges"])]
    ranges += [(one["name"], *(f"{loss:.3f}" for loss in one["by_position"])) for one in found["subjects"]]
    over = f"95 % intervals from {found['count']} {found['drawn']}, drawn again"
    return [Table(rows), Table(ranges, (f"{source_of(found)}; {over}",))]


def recall_tables(found: Found) -> list[Table]:
    rows: Rows = [("loss the second time, after", *found["gaps"], "the first")]
    for one in found["subjects"]:
        first = sum(one["first"]) / len(one["first"])
        rows.append((one["name"], *(f"{loss:.3f}" for loss in one["second"]), f"{first:.3f}"))
    again = Table(rows, (f"passages of {found['passage']} tokens; {source_of(found)}",))
    if (longer := found["longer"]) is None:
        return [again]
    marks = ("*" if beyond else "" for beyond in longer["extrapolated"])
    ranges: Rows = [("loss from token", *(f"{edge}{mark}" for edge, mark in zip(longer["edges"], marks, strict=True)))]
    for name, losses in zip(longer["names"], longer["losses"], strict=True):
        ranges.append((name, *(f"{loss:.3f}" for loss in losses)))
    note = f"the student was made from texts of {longer['trained']} tokens"
    star = ("* beyond the teacher's positions: extrapolated",) * any(longer["extrapolated"])
    return [again, Table(ranges, (note, *star))]


def needle_tables(found: Found) -> list[Table]:
    """The share of the value that was found, a block for each subject."""
    marks = ["*" if beyond else "" for beyond in found["extrapolated"]]
    rows: Rows = [("found, at depth", *(f"{depth:.0%}" for depth in found["depths"]), "loss", "when new")]
    for one in found["subjects"]:
        for length, mark, *cells in zip(
            found["lengths"], marks, one["found"], one["loss"], one["surprise"], strict=True
        ):
            shares = ("–" if share is None else f"{share:.0%}" for share in cells[0])
            rows.append((f"{one['name']}, {length}{mark}", *shares, *(mean(losses) for losses in cells[1:])))
    star = ("* longer than the teacher's positions: extrapolated",) * any(found["extrapolated"])
    gone = any(share is None for one in found["subjects"] for row in one["found"] for share in row)
    return [Table(rows, (source_of(found), *star, *("– more than memory holds",) * gone))]


def generation_tables(found: Found) -> list[Table]:
    rows: Rows = [("", "leaves the teacher", "repeats", "distinct 1", "2", "3", "loss by the teacher", "its choice")]
    for one in found["subjects"]:
        after = "–" if one["diverged"] is None else f"after {mean(one['diverged'], '.1f')}"
        distinct = (f"{share:.2f}" for share in one["distinct"])
        loss = "–" if one["loss"] is None else f"{one['loss']:.3f}"
        likeliest = "–" if one["likeliest"] is None else f"{one['likeliest']:.0%}"
        name = f"{one['name']}, {'drawn' if one['sampled'] else 'greedy'}"
        rows.append((name, after, f"{one['repeated']:.0%}", *distinct, loss, likeliest))
    asked = f"{found['prompts']} prompts of {found['prompt_tokens']} tokens, {found['new_tokens']} written"
    return [Table(rows, (f"{asked}, of {found['text']}, seed {found['seed']}",))]


def approximation_tables(found: Found) -> list[Table]:
    """Errors by layer; what was predicted of the student, and how far the order of the heads agrees with it."""
    rows: Rows = [("rows misplaced in layer", *range(len(found["predicted"][0])), "all", "of outputs", "foretold")]
    for one, ranked in zip(found["subjects"], found["correlation"], strict=True):
        cells = (mean(heads) for heads in one["rows"])
        agreed = "–" if ranked is None else f"{ranked:.2f}"
        rows.append((one["name"], *cells, f"{one['rows_mean']:.3f}", f"{one['outputs_mean']:.3f}", agreed))
    told = ("–" if None in heads else mean(heads, ".1e") for heads in found["predicted"][0])  # of slots nothing is
    rows.append(("student, predicted", *told, "", "", ""))
    note = "foretold: rank correlation over heads of what is misplaced with what the profile predicts"
    tables = [Table(rows, (note, source_of(found)))]
    return tables if found["curve"] is None else [*tables, curve_table(found["curve"])]


def curve_table(curve: Found) -> Table:
    """Errors by the number of features."""
    points: Rows = [("features per KV head, and nothing else", *curve["features"])]
    for name, errors, outputs in zip(curve["names"], curve["rows"], curve["outputs"], strict=True):
        points.append((f"{name}: rows misplaced", *(f"{error:.3f}" for error in errors)))
        points.append((f"{name}: of outputs", *(f"{error:.3f}" for error in outputs)))
    points.append(("predicted: λ where N(λ) is that many", *(f"{error:.2g}" for error in curve["predicted"])))
    return Table(points)


def speed_tables(found: Found) -> list[Table]:
    head = ("", "reads tokens/s", "writes", "peak", "remembers", "told", "operations", "batch", "reads", "writes")
    rows: Rows = [head]
    beyond = dict(zip(found["lengths"], found["beyond"], strict=True))
    for one in found["subjects"]:
        many = {pace["length"]: pace for pace in one["many"]}
        for pace in one["one"]:
            length, more = pace["length"], many.get(pace["length"])
            mark = "*" * (pace["extrapolated"] is not None) + "+" * beyond[length]
            own = (rate(pace["read_rate"]), rate(pace["write_rate"]), held(pace["peak_bytes"]))
            told = (held(pace["state_bytes"]), held(pace["told_bytes"]), f"{pace['told_operations']:.2g}")
            others = (more["batch"], rate(more["read_rate"]), rate(more["write_rate"])) if more else ("", "", "")
            rows.append((f"{one['name']}, {length}{mark}", *own, *told, *others))
    marks = {pace["extrapolated"] for one in found["subjects"] for pace in one["one"]} - {None}
    star = (f"* drawn out from shorter texts, for lack of {' and '.join(sorted(marks))}",) * bool(marks)
    plus = ("+ longer than the teacher's positions",) * any(found["beyond"])
    return [Table(rows, (*star, *plus, *breakeven_note(found["breakeven"])))]


def breakeven_note(found: Found | None) -> tuple[str, ...]:
    """Say from when on the student is the better one, as told by its shape and as measured."""
    if found is None:
        return ()
    told_bytes, held, told_operations, writing = (
        from_length(found[name]) for name in ("told_bytes", "bytes", "told_operations", "writing")
    )
    return (
        f"the student remembers less {told_bytes} by its shape, {held} as measured; it writes with fewer operations "
        f"{told_operations}, and faster {writing} as measured",
    )


def tasks_tables(found: Found) -> list[Table]:
    """A row for every metric of every task, a column for every subject."""
    rows: Rows = [("", *(one["name"] for one in found["subjects"]), "samples")]
    for scores in zip(*(one["scores"] for one in found["subjects"]), strict=True):
        values = (
            f"{score['value']:.4f}" + ("" if score["error"] is None else f" ± {score['error']:.4f}") for score in scores
        )
        rows.append((f"{scores[0]['task']}, {scores[0]['metric']}", *values, scores[0]["samples"]))
    if found["subjects"][0]["accuracy"] is not None:
        rows.append(("mean of acc", *(f"{one['accuracy']:.4f}" for one in found["subjects"]), ""))
    shots = "examples as each task says" if found["few_shot"] is None else f"{found['few_shot']} examples"
    limit = "all samples" if found["limit"] is None else f"at most {found['limit']} samples"
    return [Table(rows, (f"± standard errors; {shots}, {limit}",))]


def rate(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def held(bytes: int | None) -> str:
    return "–" if bytes is None else size(bytes)


def mean(values: Sequence[float | None], form: str = ".3f") -> str:
    there = [value for value in values if value is not None]
    return f"{sum(there) / len(there):{form}}" if there else "–"


def state(bytes: int | None) -> str:
    return "grows" if bytes is None else size(bytes)


def spread(estimate: Found | None, form: str = ".3f") -> str:
    """A mean and half of its interval's width; a dash where there is nothing to compare with."""
    if estimate is None:
        return "–"
    low, high = estimate["interval"]
    return f"{estimate['mean']:{form}} ± {(high - low) / 2:{form}}"
