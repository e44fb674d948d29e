"""The report on an encoder's student: a verdict in sentences, and tables of its judgements."""

from __future__ import annotations

from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_quality import Judgement, Quality
from linearizer.encoders.encoder_run import STUDENT, WINDOW
from linearizer.encoders.kinds import kind_of
from linearizer.report.tables import Table, describe_intervals, in_interval, with_half_width
from linearizer.report.verdict import FAR, NEAR, Kind, Verdict, judge_run
from linearizer.run.folder import Run


def judge_any_run(run: Run) -> Verdict | None:
    """Return the verdict on the student of any run; None until it is judged."""
    return judge_encoder(EncoderRun(run)) if run.is_encoder_run else judge_run(run)


def judge_encoder(encoder: EncoderRun) -> Verdict | None:
    """Return the verdict on the student of a run; None until it is judged."""
    if not encoder.judgements:
        return None
    judged = [*encoder.judgements.values()]
    judgement = judged[0]
    student, window = judgement.rows[STUDENT], judgement.rows.get(WINDOW)
    kind, words = weigh(encoder, judgement, student, window)
    lengths = tuple(sorted({x.tokens for x in judged}))
    sentence = f"{words} {describe_lengths(encoder, judgement, lengths)}"
    return Verdict(kind, sentence, student.agreement.mean, student.kl.mean, judgement.tokens, lengths)


def weigh(encoder: EncoderRun, judgement: Judgement, student: Quality, window: Quality | None) -> tuple[Kind, str]:
    """Compare a student with a window of as many keys by the interval of their paired difference."""
    inputs = f"on {describe_inputs(encoder, judgement.tokens)}"
    distance = f"it is as near to its teacher as a KL of {student.kl.mean:.4f}"
    agrees = f"{what_agrees(encoder)} for {student.agreement.mean:.1%}"
    if window is None or window.apart is None:
        return "note", f"A plain window: {inputs} {distance}, with {agrees}."
    control = "a window of as many keys" + ", trained in the same way," * bool(encoder.plan.steps)
    low, high = window.apart.interval
    result = f"{distance} (the window {window.kl.mean:.4f}; difference {in_interval(window.apart)}), with {agrees}"
    if high < 0:
        return "good" if student.agreement.mean >= NEAR else "note", f"Better than {control} {inputs}: {result}."
    if low > 0:
        return "bad", f"Worse than {control} {inputs}: {result}. Take windows alone (--no-slots), or a larger budget."
    kind: Kind = "bad" if student.agreement.mean < FAR else "note"
    return kind, f"No difference from {control} is shown {inputs}: {result}."


def what_agrees(encoder: EncoderRun) -> str:
    """Name the result on which student and teacher should agree."""
    heads = ("Classification", "MaskedLM")
    return "the same class" if encoder.inspection.auto_class.endswith(heads) else kind_of(encoder.inspection).agrees


def describe_inputs(encoder: EncoderRun, tokens: int) -> str:
    return f"{encoder.inspection.reads} of {tokens:,} tokens"


def describe_lengths(encoder: EncoderRun, judgement: Judgement, lengths: tuple[int, ...]) -> str:
    """Describe how many inputs were judged, and at which lengths."""
    units = f" of {judgement.count} documents" if judgement.drawn == "documents" else ""
    sizes = " and ".join(f"{length:,}" for length in lengths)
    stretched = ""
    if encoder.stretched:
        positions = f"{encoder.inspection.tokens:,} positions, stretched to {encoder.tokens:,}"
        stretched = f" The teacher has {positions} by interpolation; how well it reads such texts itself is not judged."
    inputs = f"{judgement.inputs} {encoder.inspection.reads}{units}"
    return f"Judged on {inputs}; with other numbers of tokens than {sizes}: not judged.{stretched}"


def describe_choice(encoder: EncoderRun) -> str:
    """Describe the choice of how heads attend; empty if there was none."""
    ways = encoder.ways
    alternatives = ", ".join(f"{name} {kl:.4f}" for name, kl in ways.kl.items() if name != ways.chosen)
    basis = f"before training, on {encoder.inspection.reads} that are not judged"
    return f"{ways.chosen}: KL {ways.kl[ways.chosen]:.4f} {basis}; {alternatives}" if ways.kl else ""


def quality_table(encoder: EncoderRun, judgement: Judgement) -> Table:
    """Return the table that compares the student and its controls with the teacher."""
    rows: list[tuple[object, ...]] = [
        (describe_inputs(encoder, judgement.tokens), "keys", "KL", "student less", "same first", "nearest", "hidden")
    ]
    for name, row in judgement.rows.items():
        shares = (with_half_width(estimate, ".1%") for estimate in (row.agreement, row.nearest))
        cells = with_half_width(row.kl, ".4f"), in_interval(row.apart), *shares, with_half_width(row.hidden, ".4f")
        rows.append((name, f"{row.keys:.4g}", *cells))
    kl_of = kind_of(encoder.inspection).kl_of
    over = f"{describe_intervals(judgement.count, judgement.drawn)}; {judgement.text}"
    about = (
        f"KL: {kl_of}; student less: its KL less that of the row, input by input; same first: {what_agrees(encoder)}"
    )
    nearest = (
        "nearest: of the nearest five, the share that is the same; hidden: cosine of the hidden states of all tokens, "
        "or of noise"
    )
    return Table(rows, (about, nearest, over))
