"""The page of all runs: a card for each run with its actions, and two runs side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

import gradio as gr

from linearizer.amounts import ago, growing, size
from linearizer.errors import LinearizerError
from linearizer.page import actions, layout
from linearizer.page.calls import ONCE, QUICK, Browser, handler
from linearizer.page.cards import STEP_SENTENCES, copy_button, state_line, step_bar
from linearizer.page.layout import browser_memory
from linearizer.page.visitors import EXAMPLE_NAME
from linearizer.plan.allocation import StateSize
from linearizer.plan.plan import Plan
from linearizer.report import markup
from linearizer.report.line_chart import Axis, Line, draw_lines
from linearizer.report.markup import folded, message_box, sentence_html, table
from linearizer.report.plotly_charts import MIN_DRAWN_KL, thin_points
from linearizer.report.tables import describe_heads
from linearizer.report.verdict import judge_run, of_subject
from linearizer.run.events import EventName, events_of_student
from linearizer.run.folder import Run
from linearizer.run.names import refuse_encoder
from linearizer.run.training_end import read_training
from linearizer.workers.control import LIVE, Status

RESUMED = ("stopped", "failed", "lost")  # states of runs that can be resumed
CARD_ACTIONS = {"stop": actions.stop_run, "resume": actions.resume_run, "delete": actions.delete_run}
PAIR = (("One run", "first"), ("Another run", "second"))


def runs_page(page: gr.Blocks) -> None:
    """Build the page that lists all runs."""
    memory = browser_memory()
    layout.header("p")
    layout.lead("Runs", "Runs go on by themselves; open one to watch it.", "h1")
    listed, busy = gr.HTML(elem_id="runs", js_on_load="actOnRuns(element, trigger)"), gr.Checkbox(visible="hidden")
    with gr.Column(visible=False) as two:
        layout.lead("Two runs side by side", "Plans, heads, quality and bytes.", "h2")
        with gr.Row(elem_classes="lz-pick"):
            pair = [gr.Dropdown([], label=label, allow_custom_value=True, elem_id=name) for label, name in PAIR]
        compared = gr.HTML(elem_id="compared")
    gr.on([part.change for part in pair], compare_runs, [memory, *pair], compared, **QUICK)
    acted = listed.click(act_on_run, memory, None, **ONCE)
    refresh: dict[str, Any] = {"inputs": [memory, busy], "outputs": [listed, two, *pair], **QUICK}
    acted.success(list_runs, **refresh)
    gr.on([page.load, gr.Timer(5).tick], list_runs, js="askWhetherBusy", **refresh)


@handler
def list_runs(browser: Browser, busy: bool) -> list[Any]:
    """List the visitor's runs, unless they are `busy` with a card; offer the undamaged ones for a comparison."""
    if busy:
        return [gr.skip()] * 4
    try:
        statuses = browser.visitor.runs()
    except LinearizerError as error:
        return [markup.message_box(str(error), "bad"), gr.Column(visible=False), *[gr.skip()] * 2]
    names = [*(status.run.folder.name for status in statuses if isinstance(status.plan, Plan)), EXAMPLE_NAME]
    return [run_cards(statuses), gr.Column(visible=len(names) > 1), *[gr.Dropdown(choices=names)] * 2]


@handler
def compare_runs(browser: Browser, first_name: str | None, second_name: str | None) -> str:
    """Set two runs side by side."""
    if not first_name or not second_name:
        return ""
    try:
        return comparison_card(browser.visitor.find_run(first_name), browser.visitor.find_run(second_name))
    except LinearizerError as error:
        return markup.message_box(str(error), "bad")


@handler
def act_on_run(browser: Browser, event: gr.EventData) -> None:
    """Do what a button on a run's card asks for; a browser may send anything."""
    sent = event._data if isinstance(event._data, dict) else {}
    act, run, value = (str(sent.get(name, "")) for name in ("act", "run", "value"))
    if act == "rename":
        actions.rename_run(browser.visitor, run, value)
    elif act in CARD_ACTIONS:
        CARD_ACTIONS[act](browser.visitor, run)


def run_cards(statuses: Sequence[Status]) -> str:
    """List runs as cards, the newest first: the plan of each, its progress, its result, and its actions."""
    if not statuses:
        return message_box("No runs yet: start a run on the first page.")
    return f'<div class="lz-list">{"".join(list_run(status, time.time()) for status in statuses)}</div>'


def list_run(status: Status, now: float) -> str:
    """Show a run in the list."""
    name, plan, step = escape(status.run.folder.name, quote=True), status.plan, status.step
    doing = status.evaluation if status.evaluation is not None and status.evaluation.live else status
    facts = [f"begun {ago(status.begun, now)}", f"{size(status.disk_bytes)} of disk"]
    facts += [f"published as {status.published['repo_id']}"] if status.published else []
    acts = [f'<a href="../?run={name}">Open</a>'] if plan is not None else []
    acts += [act_button("stop", "Stop")] if doing.state in ("queued", "running") else []
    acts += [act_button("resume", "Resume")] if status.state in RESUMED and not status.live else []
    acts += [copy_button("Copy the plan", plan.to_json())] if plan is not None else []
    if not status.live:
        acts += [folded("Rename", rename_form(name))] if plan is not None else []
        acts.append(folded("Delete", deleting_card(status) + act_button("delete", "Delete it for good")))
    title = "A damaged run" if plan is None else f'<a href="../?run={name}">{escape(plan.model)}</a>'
    subtitle = name if plan is None else f"{name} · {escape(plan.in_brief)}"
    bar = step_bar(step, now) if step and status.state in ("running", "stopping") else ""
    summary = sentence_html(status.error) if status.error else ""
    summary += quality_line(status.run) if not summary or status.state == "done" else ""
    if (
        isinstance(plan, Plan)
        and plan.trains
        and status.state == "done"
        and (trained := read_training(status.run)).early
    ):
        facts.append(f"trained {trained.in_words}")
    return (
        f'<article class="lz-card" data-run="{name}"><header><h2>{title}</h2><small>{subtitle}</small></header>'
        f"{state_line(status.state, state_words(status))}{bar}"
        f'<div>{summary}</div><p class="lz-faint">{escape(" · ".join(facts))}</p><div class="lz-acts">{"".join(acts)}'
        "</div></article>"
    )


def act_button(act: str, title: str) -> str:
    """Make a button of a card, which head.html sends on."""
    return f'<button type="button" data-act="{act}">{title}</button>'


def rename_form(name: str) -> str:
    field = f'<input value="{name}" maxlength="200" autocomplete="off" spellcheck="false">'
    return f"<label>New name {field}</label>{act_button('rename', 'Rename it')}"


def quality_line(run: Run) -> str:
    """Show the verdict on a run's student, and the KL of student and window over the length of texts."""
    from linearizer.encoders.encoder_report import judge_any_run

    with suppress(LinearizerError):  # a damaged file of one run must not hide the others
        if (verdict := judge_any_run(run)) is None:
            return ""
        lines = [Line(name, kl_points(run, name), f"lz-{name}", marked=False) for name in ("window", "student")]
        return f"{draw_kl(lines)}<p>{sentence_html(verdict.sentence.partition('. ')[0])}.</p>"
    return ""


def kl_points(run: Run, name: str) -> list[tuple[float, float]]:
    """Return the lengths on which a run was judged, and the KL of a subject on each."""
    lengths = part.result.lengths if (part := run.results.get("language")) else ()
    judged = [(float(result.length), of_subject(result, name).kl) for result in lengths]
    return [(length, max(kl.mean, MIN_DRAWN_KL)) for length, kl in judged if kl is not None]


def loss_points(run: Run) -> list[tuple[float, float]]:
    """Return the steps of a training, and how far the loss was above the least, in the mean of layers."""
    steps = [event for event in events_of_student(run.events(), EventName.DISTILL) if event.get("layers")]
    means = [(float(event["done"]), fmean(event["layers"].values())) for event in thin_points(steps)]
    return [(step, mean) for step, mean in means if step > 0 and mean > 0]


def draw_pair(runs: Sequence[Run], points: Callable[[Run], list[tuple[float, float]]], x: str, y: str) -> str:
    """Draw a line for each of two runs; empty where none has two points."""
    kinds = zip(runs, ("lz-student", "lz-other"), strict=True)
    lines = [line for run, kind in kinds if len((line := Line(run.folder.name, points(run), kind)).points) > 1]
    if not lines:
        return ""
    across, up = ([point[side] for line in lines for point in line.points] for side in (0, 1))
    names = " and ".join(line.name for line in lines)
    return draw_lines(f"{y} by {x}, {names}", Axis.round(across, x), Axis.round(up, y), lines, at_ends=True)


def draw_kl(lines: Sequence[Line]) -> str:
    """Draw lines of KL over the length; empty where none has two points."""
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return ""
    x, y = (Axis.around([point[side] for line in lines for point in line.points]) for side in (0, 1))
    names = " and ".join(line.name for line in lines)
    return draw_lines(f"KL over texts of {x.low:,.0f} to {x.high:,.0f} tokens, {names}", x, y, lines)


def last_runs(statuses: Sequence[Status]) -> str:
    """Link to runs, each with its budget and its state; empty without runs."""
    links = [
        f'<a href="?run={escape(status.run.folder.name, quote=True)}">{escape(status.plan.model)}, '
        f"{escape(status.plan.budget_in_words)}</a> ({escape(state_words(status))})"
        for status in statuses
        if status.plan is not None
    ]
    return f'<p class="lz-links">Your last runs: {" · ".join(links)}</p>' if links else ""


def state_words(status: Status) -> str:
    """Describe the state of a run, and its progress."""
    if status.state == "done":
        return "done" + ", evaluating" * status.live
    if status.step is None or status.state not in LIVE:
        return status.state
    done, total = int(status.step["done"]), max(1, int(status.step["total"]))
    return f"{STEP_SENTENCES.get(status.step['event'], status.state)}, {100 * done // total}%"


def deleting_card(status: Status) -> str:
    """Ask whether to delete a run for good."""
    published = status.published["repo_id"] if status.published else None
    hub = f" What was published as {published} stays." if published else ""
    contents = "student, measurements and log" if status.run.checkpoint.is_dir() else "measurements and log"
    name, model = status.run.folder.name, status.plan.model if status.plan else "damaged"
    return message_box(
        f"Delete {name} ({model}, {size(status.disk_bytes)}) for good? Its {contents} will be gone.{hub}", "bad"
    )


def comparison_card(first: Run, second: Run) -> str:
    """Compare two runs: results, verdicts, and the options of their plans that differ."""
    for run in (first, second):
        refuse_encoder(run)
    columns, plans = zip(*((run_facts(run), asdict(run.plan)) for run in (first, second)), strict=True)
    rows = [[name, *(facts.get(name, "–") for facts in columns)] for name in columns[0] | columns[1]]
    options = [[name.replace("_", " "), *(show_option(plan[name]) for plan in plans)] for name in plans[0]]
    differing = [row for row in options if row[1] != row[2]] or [["nothing", "", ""]]
    head, kind = ("", first.folder.name, second.folder.name), "lz-words lz-pair"
    verdicts = "".join(
        f'<p class="lz-faint">{sentence_html(run.folder.name)}: {sentence_html(verdict.sentence)}</p>'
        for run in (first, second)
        if (verdict := judge_run(run)) is not None
    )
    facts, plan = "Results", "Options of the plan that differ"
    pairs = [
        draw_pair((first, second), partial(kl_points, name="student"), "tokens of a text", "KL, nats per token"),
        draw_pair((first, second), loss_points, "steps of training", "loss above the least, mean of layers"),
    ]
    drawn = "".join(f"<figure>{pair}</figure>" for pair in pairs if pair)
    chart = f'<div class="lz-real lz-charts">{drawn}</div>' if drawn else ""
    return chart + table(facts, head, rows, kind=kind) + verdicts + table(plan, head, differing, kind=kind)


def show_option(value: object) -> str:
    """Write an option of a plan; the recipe or a measurement decides an option that is left out."""
    return "left out" if value is None else "yes" if value is True else "no" if value is False else str(value)


def run_facts(run: Run) -> dict[str, str]:
    """Return the results of a run by their names, each quality at its length."""
    facts: dict[str, str] = {}
    for result in part.result.lengths if (part := run.results.get("language")) else ():
        student = of_subject(result, "student")
        facts |= {f"KL, texts of {result.length:,} tokens": f"{student.kl.mean:.4f}"} if student.kl else {}
        if student.agreement:
            facts[f"agreement, texts of {result.length:,} tokens"] = f"{student.agreement.mean:.1%}"
    if (allocation := run.allocation) is not None:
        state = StateSize.of(allocation, run.layers)
        facts["state"] = growing(state.fixed, state.growth)
        facts["smaller from"] = "never" if state.breakeven is None else f"{state.breakeven:,} tokens on"
        facts["heads hold"] = describe_heads(allocation)
    if run.plan.trains and (trained := read_training(run)).done:
        facts["trained"] = trained.in_words
    return facts
