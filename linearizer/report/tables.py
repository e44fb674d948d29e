"""The parts of an evaluation as tables, for a terminal, the page and the card to lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linearizer.amounts import columns, count_in_words, from_length, size
from linearizer.plan.allocation import Allocation
from linearizer.run import results
from linearizer.run.results import Part

Rows = list[Sequence[object]]
ALIKE = 0.1  # two shares of repeated text that differ by less are alike
CATASTROPHIC = "catastrophic: of 10,000 positions, those where the teacher loses less than 0.1 nats and this one over 1"


@dataclass(frozen=True)
class Table:
    """Rows of cells, the head first, and notes below them."""

    rows: Sequence[Sequence[object]]
    notes: tuple[str, ...] = ()


def write_tables(tables: Sequence[Table]) -> str:
    """Write tables as plain text."""
    return "\n\n".join("\n".join([columns(table.rows), *table.notes]) for table in tables)


def describe_heads(allocation: Allocation) -> str:
    """Describe what all heads hold, on one line."""
    heads = [head for row in allocation.heads for head in row]
    far = "rows of a memory" if any(head.memory for head in heads) else "features"
    kinds = {
        "with a window": [head for head in heads if not (head.softmax or head.slots or head.features)],
        f"with {allocation.features_mean:.1f} {far} on average": [head for head in heads if head.features],
        "with slots": [head for head in heads if head.slots],
        "left softmax": [head for head in heads if head.softmax],
    }
    counts = ", ".join(f"{len(members)} KV heads {kind}" for kind, members in kinds.items() if members)
    return f"{counts}, {allocation.sinks} sink{'s' * (allocation.sinks != 1)}, {allocation.bits_in_words} bits a number"


def describe_environment(part: Part) -> tuple[str, ...]:
    """Name the software and device of a measurement, and why there was no teacher."""
    setup = part.made_with
    versions = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    kernels = f", kernels: {setup.kernels}" if setup.kernels else ""
    text = f"{setup.dtype} on {setup.device}{kernels}; {versions}"
    return (text,) if setup.alone is None else (text, f"the student was measured alone: {setup.alone}")


def describe_texts(part: Part) -> str:
    """Describe the texts of a part, and whether they are longer than the teacher's positions."""
    read = part.read
    assert read is not None, "the part reads texts"
    beyond = "; longer than the teacher's positions: extrapolated" * read.beyond
    return f"{read.texts} texts of {read.length} tokens of {read.text}, seed {read.seed}{beyond}"


def language_tables(part: Part[results.Language]) -> list[Table]:
    """Show each subject at the run's own length, then at all lengths; the other tables are of whole texts."""
    language, read = part.result, part.read
    assert read is not None, "the part reads texts"
    # lengths: a quarter of the run's texts, these, and two of them joined
    judged = language.lengths[min(1, len(language.lengths) - 1)]
    named = {subject.name: subject for subject in judged.subjects}
    rows: Rows = [(f"over {judged.length:,} tokens", "state", "loss", "95%", "KL", "same top token", "catastrophic")]
    for subject in language.subjects:
        at = named[subject.name]
        low, high = at.loss.interval
        near = with_half_width(at.kl, ".4f"), with_half_width(at.agreement, ".1%")
        losses = f"{at.loss.mean:.3f}", f"{low:.3f}–{high:.3f}" if low < high else "–"
        rows.append((subject.name, size(subject.state_bytes), *losses, *near, in_ten_thousand(at.catastrophic)))
    ranges: Rows = [("loss from token", *language.edges)]
    ranges += [(subject.name, *cells(subject.by_position)) for subject in language.subjects]
    intervals = describe_intervals(language.count, language.drawn)
    state = f"state: what is remembered after {read.length:,} tokens; the teacher's grows with every token"
    ends = Table(ranges, (f"{describe_texts(part)}; {intervals}",))
    return [Table(rows, (state, CATASTROPHIC)), length_table(language.lengths), tail_table(language), ends]


def tail_table(language: results.Language) -> Table:
    """Show how far each subject is from the teacher, token by token."""
    rows: Rows = [("over whole texts", "above teacher", "KL, 99%", "KL, 99.9%", "RMS Δp", "calibration")]
    for subject in language.subjects:
        tails = ["–"] * 3
        if (tail := subject.tail) is not None:
            tails = [*cells([tail.kl_99, tail.kl_999], ".4f"), f"{tail.probability_change:.2%}"]
        rows.append((subject.name, with_half_width(subject.excess), *tails, f"{subject.calibration_error:.3f}"))
    note = "99% and 99.9% of the tokens have a smaller KL; Δp: change in the probability of the next token of the text"
    return Table(rows, (note,))


def length_table(lengths: Sequence[results.LengthResult]) -> Table:
    """Show the KL of each subject over texts of each length; without a teacher, its loss."""
    measure = "loss" if any(subject.kl is None for subject in lengths[0].subjects) else "KL"
    rows: Rows = [(f"{measure} over texts of … tokens", *(f"{result.length:,}" for result in lengths))]
    for subjects in zip(*(result.subjects for result in lengths), strict=True):
        rows.append((subjects[0].name, *(with_half_width(subject.kl or subject.loss, ".4f") for subject in subjects)))
    rows.append(("student less window, 95%", *(in_interval(result.difference) for result in lengths)))
    rows.append(("tokens of the window", *(f"{result.window:,}" for result in lengths)))
    counted = "; ".join(f"{result.count} {result.drawn} at {result.length:,}" for result in lengths)
    notes = [f"the difference is paired; its interval is by Student's t over {counted}"]
    if strained := [f"{result.length:,}" for result in lengths if result.strained]:
        notes.append(f"the teacher itself predicts worse than the window at the end of texts of {', '.join(strained)}")
    return Table(rows, tuple(notes))


def in_ten_thousand(share: float | None) -> str:
    return "–" if share is None else f"{10_000 * share:.0f}"


def recall_tables(part: Part[results.Recall]) -> list[Table]:
    recall = part.result
    rows: Rows = [("loss the second time, after", *recall.gaps, "the first")]
    for subject in recall.subjects:
        rows.append((subject.name, *cells(subject.second), format_mean(subject.first)))
    return [Table(rows, (f"passages of {recall.passage} tokens; {describe_texts(part)}",))]


def needle_tables(part: Part[results.Needle]) -> list[Table]:
    """Lay out the share of the value that was recalled, a block for each subject."""
    needle = part.result
    lengths = [f"{length}{'*' * beyond}" for length, beyond in zip(needle.lengths, needle.extrapolated, strict=True)]
    rows: Rows = [("recalled, at depth", *(f"{depth:.0%}" for depth in needle.depths), "loss", "when new")]
    known = [each for each in needle.subjects if each.name == "teacher" or not teacher_recalls_little(needle)]
    for subject in known:
        for length, shares, *losses in zip(lengths, subject.correct, subject.loss, subject.surprise, strict=True):
            rows.append((f"{subject.name}, {length}", *cells(shares, ".0%"), *map(format_mean, losses)))
    notes = [describe_texts(part)]
    if teacher_recalls_little(needle):
        notes.append("the teacher itself recalls less than half, so this shows nothing of what the student forgets")
    if any(needle.extrapolated):
        notes.append("* longer than the teacher's positions: extrapolated")
    if any(share is None for subject in needle.subjects for row in subject.correct for share in row):
        notes.append("– more than memory holds")
    return [Table(rows, tuple(notes))]


def teacher_recalls_little(needle: results.Needle) -> bool:
    """Whether the teacher itself fails the test of its student."""
    shares = [share for grid in needle.subjects if grid.name == "teacher" for row in grid.correct for share in row]
    mean = mean_of(shares)
    return mean is not None and mean < 0.5


def generation_tables(part: Part[results.Generation]) -> list[Table]:
    generation = part.result
    rows: Rows = [("", "leaves the teacher", "repeats", "distinct 1", "2", "3", "loss by the teacher", "its choice")]
    for subject in generation.subjects:
        divergence = "–" if subject.diverged is None else f"after {format_mean(subject.diverged, '.1f')} tokens"
        by_teacher = *cells([subject.loss]), *cells([subject.likeliest], ".0%")
        name = f"{subject.name}, {'drawn' if subject.sampled else 'greedy'}"
        rows.append((name, divergence, f"{subject.repeated:.0%}", *cells(subject.distinct, ".2f"), *by_teacher))
    prompts = f"{generation.prompts} prompts of {generation.prompt_tokens} tokens, {generation.new_tokens} written"
    return [Table(rows, (*conclude_writing(generation), f"{prompts}; {describe_texts(part)}"))]


def conclude_writing(generation: results.Generation) -> tuple[str, ...]:
    """Say whether the student repeats itself as its teacher does."""
    shares = {subject.name: subject.repeated for subject in generation.subjects if not subject.sampled}
    if not {"teacher", "student"} <= shares.keys():
        return ()
    teacher, student = shares["teacher"], shares["student"]
    words = "as often as" if abs(student - teacher) <= ALIKE else "more than" if student > teacher else "less than"
    about = f"{student:.0%} and {teacher:.0%} of its runs of four tokens"
    return (f"greedy, the student repeats itself {words} its teacher ({about})",)


def speed_tables(part: Part[results.Speed]) -> list[Table]:
    speed = part.result
    rows: Rows = [
        ("", "reads tokens/s", "writes", "peak", "state", "predicted", "operations", "batch", "reads", "writes")
    ]
    beyond = dict(zip(speed.lengths, speed.beyond, strict=True))
    for subject in speed.subjects:
        batched = {pace.length: (pace.batch, *format_rates(pace)) for pace in subject.batched}
        for pace in subject.paces:
            mark = "*" * (pace.extrapolated is not None) + "+" * beyond[pace.length]
            counts = pace.peak_bytes, pace.state_bytes, pace.predicted_bytes
            sizes = ("–" if count is None else size(count) for count in counts)
            single = *format_rates(pace), *sizes, count_in_words(round(pace.predicted_operations))
            rows.append((f"{subject.name}, {pace.length:,}{mark}", *single, *batched.get(pace.length, ("", "", ""))))
    marks = {pace.extrapolated for subject in speed.subjects for pace in subject.paces if pace.extrapolated}
    star = (f"* not measured, for lack of {' and '.join(sorted(marks))}",) * bool(marks)
    plus = ("+ longer than the teacher's positions",) * any(speed.beyond)
    return [Table(rows, (*star, *plus, *breakeven_note(speed.breakeven)))]


def breakeven_note(breakeven: results.Breakeven | None) -> tuple[str, ...]:
    """Name the lengths from which on the student is better."""
    if breakeven is None:
        return ()
    begins = {
        "takes fewer bytes than the cache": breakeven.predicted_bytes,
        "writes with fewer operations": breakeven.predicted_operations,
        "measurably writes faster": breakeven.writing,
    }
    facts = (f"never {does}" if begin is None else f"{does} {from_length(begin)}" for does, begin in begins.items())
    return (f"the student {'; '.join(facts)}",)


def tasks_tables(part: Part[results.Tasks]) -> list[Table]:
    """Show every metric of every task in a row, and every subject in a column."""
    tasks = part.result
    rows: Rows = [("", *(subject.name for subject in tasks.subjects), "samples")]
    for scores in zip(*(subject.scores for subject in tasks.subjects), strict=True):
        values = (f"{score.value:.4f}" + ("" if score.error is None else f" ± {score.error:.4f}") for score in scores)
        rows.append((f"{scores[0].task}, {scores[0].metric}", *values, scores[0].samples))
    if tasks.subjects[0].accuracy is not None:
        rows.append(("mean of acc", *cells([subject.accuracy for subject in tasks.subjects], ".4f"), ""))
    shots = "examples as each task says" if tasks.few_shot is None else f"{tasks.few_shot} examples"
    limit = "all samples" if tasks.limit is None else f"at most {tasks.limit} samples"
    return [Table(rows, (f"± standard errors; {shots}, {limit}",))]


def cells(values: Sequence[float | None], form: str = ".3f") -> list[str]:
    """Write numbers, and a dash for None."""
    return ["–" if value is None else f"{value:{form}}" for value in values]


def format_rates(pace: results.Pace) -> list[str]:
    rates = pace.read_rate, pace.write_rate
    return ["–" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates]


def format_mean(values: Sequence[float | None], form: str = ".3f") -> str:
    return cells([mean_of(values)], form)[0]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def with_half_width(estimate: results.Estimate | None, form: str = ".3f") -> str:
    """Write a mean, and half the width of its interval if there is one; a dash without a teacher to compare with."""
    if estimate is None:
        return "–"
    low, high = estimate.interval
    return write_number(estimate.mean, form) + (f" ± {(high - low) / 2:{form}}" if low < high else "")


def describe_intervals(count: int, units: str) -> str:
    """Say what intervals are over."""
    if count == 1:
        return f"a single {units.removesuffix('s')} has no interval"
    return f"95% intervals by Student's t over {count} {units}"


def in_interval(estimate: results.Estimate | None) -> str:
    """Write a mean and its interval, with signs; a dash if there is no interval."""
    if estimate is None:
        return "–"
    mean, low, high = (write_number(number, "+.4f") for number in (estimate.mean, *estimate.interval))
    return f"{mean} ({low} to {high})"


def write_number(number: float, form: str) -> str:
    """Write a number, without a sign if it is rounded to zero."""
    text = f"{number:{form}}"
    return text if text.strip("+-0.%") else text.lstrip("+-")
