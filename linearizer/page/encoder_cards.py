"""The HTML of encoders: a model, what a budget of keys buys, the plan of a run, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from linearizer.amounts import count_in_words
from linearizer.encoders.encoder_folder import EncoderRun, attention_of
from linearizer.encoders.encoder_quality import Judgement, LayerTime
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, judge_encoder, quality_table
from linearizer.encoders.encoder_run import ALIKE, MERGED, STUDENT, UNTRAINED, WINDOW
from linearizer.encoders.kinds import kind_of
from linearizer.encoders.layer_times import crossing
from linearizer.page.cards import verdict_card
from linearizer.page.plan_cards import show_choices, show_model
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.report.line_chart import Axis, Line, draw_lines
from linearizer.report.markup import announcement, folded, message_box, table, table_html, values_list
from linearizer.report.tables import Table, describe_intervals, with_half_width

if TYPE_CHECKING:
    from linearizer.plan.encoder_plan import EncoderInspection

NO_BYTES = "An encoder reads a text or picture at once and keeps no cache, so a budget buys operations, not bytes."
NO_CHAT = (
    "There is no chat here, because an encoder writes no text. `linearizer evaluate` judges its student on other "
    "lengths."
)
LOOKS = {STUDENT: "lz-student", WINDOW: "lz-window"}  # classes of lines; the others have lz-other
SHORT = {UNTRAINED: "untrained", ALIKE: "heads alike", MERGED: "merged"}  # names of lines, for which there is room


def model_card(inspection: EncoderInspection) -> str:
    """Describe an encoder that can be linearized."""
    kind = f"{kind_of(inspection).title.format(reads=inspection.reads)} · {inspection.architecture}"
    return show_model(inspection, kind, inspection.describe_shape()[:-1])


def keys_card(plan: EncoderPlan, inspection: EncoderInspection) -> str:
    """Show how many tokens a token sees at a budget, and the operations that this saves by length."""
    tokens, keys = plan.length or inspection.tokens, attention_of(plan, inspection).keys
    rows = []
    for length in (tokens, 4 * tokens, 16 * tokens):
        teacher, student = (inspection.layer_parameters + seen * inspection.pair_operations for seen in (length, keys))
        counts = (count_in_words(round(count)) for count in (teacher, student))
        rows.append((f"{length:,} tokens", *counts, f"{teacher / student:.1f}×"))
    pairs = [
        ("tokens that a token sees", f"{keys:g} of {tokens:,}"),
        ("attention, of the model’s operations", f"{inspection.share(tokens):.0%}"),
        ("operations of a token", f"{rows[0][3]} fewer"),
    ]
    caption = "Multiplications and additions of a token, teacher and student"
    sizes = table(caption, ("", "teacher", "student", "fewer"), rows)
    loud = announcement(f"{keys:g} of {tokens:,} tokens, {rows[0][3]} fewer operations")
    return f'<div{loud}>{values_list(pairs, "lz-wide")}<p class="lz-faint">{NO_BYTES}</p>{sizes}</div>'


def plan_card(plan: EncoderPlan) -> str:
    """Show the plan of a run, and the command that does the same elsewhere."""
    pairs = [
        ("model", plan.model),
        ("budget", plan.in_brief),
        ("reads", plan.pictures or (f"texts of {plan.length:,} tokens, {plan.text}" if plan.length else plan.text)),
        ("judged on", f"{plan.texts}"),
        ("training", f"{plan.steps} steps of {plan.batch}" if plan.steps else "none"),
        ("seed", f"{plan.seed}"),
    ]
    return show_choices(pairs, plan.command())


def result_card(encoder: EncoderRun) -> str:
    """Show the verdict on a student, its measurements, and the time of a layer; empty until it is judged."""
    if not (judged := [*encoder.judgements.values()]):
        return ""
    first, rows, times = judged[0], judged[0].rows, encoder.times
    titles = {STUDENT: "KL to the teacher", WINDOW: "a window of as many keys has", MERGED: "merged tokens have"}
    numbers = [(title, with_half_width(rows[name].kl, ".4f")) for name, title in titles.items() if name in rows]
    numbers.append(("tokens that a token sees", f"{encoder.keys:.4g} of {first.tokens:,}"))
    charts = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"
        for title, drawn in [
            *([draw_times(times)] if len(times) > 1 else []),
            draw_quality(encoder, first),
            *([draw_keys(encoder)] if encoder.ways.kl and encoder.inspection.layers > 1 else []),
        ]
    )
    tables = [quality_table(encoder, entry) for entry in judged] + [times_table(times)] * bool(times)
    lists = "".join(table_html(f"Result, {number}", entry) for number, entry in enumerate(tables, 1))
    chosen = describe_choice(encoder)
    choice = f'<p class="lz-faint">How each head attends: {escape(chosen)}.</p>' if chosen else ""
    return (
        f"{verdict_card(judge_encoder(encoder))}{values_list(numbers, 'lz-wide')}"
        f'<div class="lz-real lz-charts">{charts}</div>{choice}{folded("In numbers", lists)}{message_box(NO_CHAT)}'
    )


def draw_times(times: Sequence[LayerTime]) -> tuple[str, str]:
    """Draw the time of a layer over the tokens, with a line where student and SDPA take equally long."""
    x = Axis(times[0].tokens, times[-1].tokens, [(time.tokens, short(time.tokens)) for time in times])
    y = Axis.round(second for time in times for second in (time.student, time.sdpa))
    lines = [
        Line("student", [(time.tokens, time.student) for time in times], "lz-student"),
        Line("SDPA", [(time.tokens, time.sdpa) for time in times], "lz-window"),
    ]
    meeting = crossing(times)
    faster = times[-1].sdpa > times[-1].student
    title = f"equal at about {meeting:,.0f} tokens" if meeting else f"the student’s is {'less' if faster else 'more'}"
    about = "; ".join(f"{time.tokens:,} tokens {time.student:.2g} s, SDPA {time.sdpa:.2g} s" for time in times)
    if meeting is not None:
        lines.append(Line("", [(meeting, y.low), (meeting, y.high)], "lz-other", marked=False))
    return f"Seconds of a layer over the tokens: {title}", draw_lines(f"Time of a layer, {title}: {about}", x, y, lines)


def draw_quality(encoder: EncoderRun, judgement: Judgement) -> tuple[str, str]:
    """Draw the KL of a student and its controls with their intervals, each a line of its own."""
    ends = {name: (*row.kl.interval, row.kl.mean) for name, row in judgement.rows.items()}
    highest = max(high for _, high, _ in ends.values()) or 1.0
    x = Axis(0.0, highest, [(share * highest, f"{share * highest:.2g}") for share in (0.0, 0.5, 1.0)], log=False)
    y = Axis(-0.5, len(ends) - 0.5, (), log=False)
    lines = [
        Line(SHORT.get(name, name), [(low, place), (mean, place), (high, place)], LOOKS.get(name, "lz-other"))
        for place, (name, (low, high, mean)) in enumerate(reversed(ends.items()))
    ]
    about = "; ".join(f"{name} {mean:.4f} ({low:.4f} to {high:.4f})" for name, (low, high, mean) in ends.items())
    inputs = describe_inputs(encoder, judgement.tokens)
    bars = describe_intervals(judgement.count, judgement.drawn)
    return f"KL to the teacher on {inputs}; the bars: {bars}", draw_lines(f"KL to the teacher: {about}", x, y, lines)


def draw_keys(encoder: EncoderRun) -> tuple[str, str]:
    """Draw how many keys a token sees in each layer: the mean over heads, the most and the least."""
    layers = [sorted(way.keys for way in layer.ways) for layer in encoder.ways.layers]
    x = Axis(1, len(layers), [(number, f"layer {number}") for number in (1, len(layers))], log=False)
    y = Axis.round(keys for layer in layers for keys in layer)
    of_layers = {"most": [layer[-1] for layer in layers], "least": [layer[0] for layer in layers]}
    of_layers["mean"] = [sum(layer) / len(layer) for layer in layers]
    kinds = {"mean": "lz-student", "most": "lz-other", "least": "lz-other"}
    lines = [Line(name, [*enumerate(keys, 1)], kinds[name]) for name, keys in of_layers.items()]
    about = "; ".join(f"layer {number} {keys:.0f}" for number, keys in enumerate(of_layers["mean"], 1))
    drawn = draw_lines(f"Keys, a mean over heads: {about}", x, y, lines)
    return "Keys that a token sees in the heads of a layer", drawn


def times_table(times: Sequence[LayerTime]) -> Table:
    """Lay out the time of a layer by length."""
    rows = [("tokens", "student", "SDPA", "times faster")]
    rows += [
        (f"{time.tokens:,}", f"{time.student:.2g} s", f"{time.sdpa:.2g} s", f"{time.sdpa / time.student:.2f}")
        for time in times
    ]
    return Table(rows, ("Attention of one layer on one text or picture, where the run worked",))


def short(tokens: int) -> str:
    """Write a number of tokens where there is little room."""
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else f"{tokens}"
