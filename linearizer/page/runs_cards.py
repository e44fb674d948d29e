"""The HTML of the page of runs: the list, the question before one is deleted, and two runs side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from linearizer.amounts import ago, growing, size
from linearizer.errors import LinearizerError
from linearizer.page.cards import STEP_SENTENCES, state_sign
from linearizer.plan.state_size import StateSize
from linearizer.report.markup import folded, message_box, sentence_html, table, without_folders
from linearizer.report.tables import describe_heads
from linearizer.report.verdict import judge_run
from linearizer.run.folder import Run
from linearizer.run.results import Language, Speed
from linearizer.workers.control import LIVE, Status

BESIDE = ("student", "teacher")
RATES = {"reads, tokens/s": "read_rate", "writes, tokens/s": "write_rate"}


def runs_table(statuses: Sequence[Status], now: float | None = None) -> str:
    """List runs, the newest first, each with a link to it, how far it is, and what judging measured."""
    if not statuses:
        return message_box("No runs yet: start a run on the first page.")
    now = time.time() if now is None else now
    rows = []
    for status in statuses:
        name, plan = status.run.folder.name, status.plan
        if plan is None:  # it is damaged
            what = [escape(without_folders(status.error or "")), "", ""]
        else:
            link = f'<a href="../?run={escape(name, quote=True)}">{escape(plan.model)}</a>'
            what = [link, escape(plan.recipe), escape(plan.dial + ", may grow" * plan.may_grow)]
        rows.append(
            [
                *what,
                f"{state_sign(status.state)} {escape(state_words(status))}",
                *quality_cells(status.run),
                escape(ago(status.begun, now)),
                escape(size(status.disk_bytes)),
                f"<code>{escape(name)}</code>",
            ]
        )
    head = ("model", "recipe", "budget", "state", "kl, nats", "agreement", "begun", "disk", "name")
    return table("Your runs", head, rows, safe=True, kind="lz-words")


def state_words(status: Status) -> str:
    """Say what a run is doing, and how far that is."""
    if status.state == "done":
        return "done" + ", evaluating" * status.live
    if status.step is None or status.state not in LIVE:
        return status.state
    done, total = int(status.step["done"]), max(1, int(status.step["total"]))
    return f"{STEP_SENTENCES.get(status.step['event'], status.state)}, {100 * done // total}%"


def quality_cells(run: Run) -> tuple[str, str]:
    """Say the kl and the agreement of a run's student; a dash where it is not judged."""
    try:
        verdict = judge_run(run)
    except LinearizerError:  # a damaged file of one run must not hide the others
        return "–", "–"
    if verdict is None or verdict.kl is None or verdict.agreement is None:
        return "–", "–"
    return f"{verdict.kl:.4f}", f"{verdict.agreement:.1%}"


def deleting_card(status: Status) -> str:
    """Ask whether a run shall go for good."""
    published = status.published["repo_id"] if status.published else None
    hub = f" What was published as {published} stays." if published else ""
    held = "student, measurements and log" if status.run.checkpoint.is_dir() else "measurements and log"
    name, model = status.run.folder.name, status.plan.model if status.plan else "damaged"
    return message_box(
        f"Delete {name} ({model}, {size(status.disk_bytes)}) for good? Its {held} will be gone.{hub}", "bad"
    )


def comparison_card(first: Run, second: Run) -> str:
    """Set two runs side by side: plan, allocation, kl, agreement, bytes and speed; the same options are folded."""
    columns = [run_facts(run) for run in (first, second)]
    rows = [
        [name, *(column.get(name, "–") for column in columns)] for name in dict.fromkeys([*columns[0], *columns[1]])
    ]
    plans = [asdict(run.plan) for run in (first, second)]
    differing = [name for name in plans[0] if plans[0][name] != plans[1][name]]
    head = ("", first.folder.name, second.folder.name)
    options = {name: [name.replace("_", " "), *(show_option(plan[name]) for plan in plans)] for name in plans[0]}
    different = [options[name] for name in differing] or [["nothing", "", ""]]
    alike = [options[name] for name in options if name not in differing]
    verdicts = "".join(
        f'<p class="lz-faint">{sentence_html(run.folder.name)}: {sentence_html(verdict.sentence)}</p>'
        for run in (first, second)
        if (verdict := judge_run(run)) is not None
    )
    return (
        table("What came of both", head, rows, kind="lz-words lz-pair")
        + verdicts
        + table("Options of the plan that differ", head, different, kind="lz-words lz-pair")
        + folded("Options that are the same", table("", head, alike, label="The same options", kind="lz-words lz-pair"))
    )


def show_option(value: object) -> str:
    """Write an option of a plan; an option that was left out is the recipe's, or measured."""
    return "left out" if value is None else "yes" if value is True else "no" if value is False else str(value)


def run_facts(run: Run) -> dict[str, str]:
    """Name what came of a run; what was not measured is left out."""
    parts, allocation, layers = run.results, run.allocation, run.layers
    facts: dict[str, str] = {}
    if "language" in parts:
        language: Language = parts["language"].result
        subjects = {subject.name: subject for subject in language.subjects}
        if (verdict := judge_run(run)) is not None and verdict.kl is not None and verdict.agreement is not None:
            facts["kl, nats per token"] = f"{verdict.kl:.4f} on texts of {verdict.length:,} tokens"
            facts["agreement with the teacher"] = f"{verdict.agreement:.1%}"
        facts |= {f"loss of the {name}, nats": f"{subjects[name].loss.mean:.3f}" for name in BESIDE if name in subjects}
    if allocation is not None:
        state = StateSize.of(allocation, layers)
        facts["state"] = growing(state.fixed, state.growth)
        facts["smaller from"] = "never" if state.breakeven is None else f"{state.breakeven:,} tokens on"
        facts["heads hold"] = describe_heads(allocation)
    unknown = dict.fromkeys(RATES, "not evaluated yet")
    return facts | (speed_facts(parts["speed"].result) if "speed" in parts else unknown)


def speed_facts(speed: Speed) -> dict[str, str]:
    """Give the rates at the longest text at which the student was measured, beside its teacher's there."""
    facts: dict[str, str] = {}
    courses = {course.name: course.paces for course in speed.subjects}
    for title, rate in RATES.items():
        paces = {name: {pace.length: getattr(pace, rate) for pace in courses.get(name, ())} for name in BESIDE}
        lengths = [pace.length for pace in courses["student"] if getattr(pace, rate) and pace.extrapolated is None]
        if lengths:
            own, beside = (paces[name].get(max(lengths)) for name in BESIDE)
            teacher = f"; its teacher {beside:,.0f}" if beside else ""
            facts[title] = f"{own:,.0f} after {max(lengths):,} tokens{teacher}"
    return facts
