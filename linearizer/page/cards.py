"""The HTML of the page's cards and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from linearizer.amounts import ago, duration, from_length, number, size
from linearizer.errors import LinearizerError
from linearizer.jobs.control import LIVE, Status
from linearizer.progress import Progress
from linearizer.publish.html import announcement, folded, message_box, table, values_list, without_folders
from linearizer.publish.tables import state_size
from linearizer.publish.training_charts import ERRORS
from linearizer.publish.verdict import Verdict
from linearizer.run import head_bytes
from linearizer.run.allocation import Allocation
from linearizer.run.folder import Run
from linearizer.run.head_bytes import Layer
from linearizer.run.plan import Plan
from linearizer.run.recipes import RECIPES
from linearizer.run.results import Language, Recall
from linearizer.run.state_size import ROW_TITLES, STATED_LENGTHS, StateSize, size_row

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import Side
    from linearizer.jobs.forecast import RunForecast
    from linearizer.run.inspection import Inspection

STATE_SIGNS = {
    "queued": "◷", "running": "●", "stopping": "◑", "stopped": "■", "failed": "▲", "done": "✓", "lost": "?",
    "damaged": "▲",
}  # fmt: skip
STATE_SENTENCES = {
    "queued": "waiting for its turn",
    "running": "at work",
    "stopping": "finishes its step, saves, stops",
    "stopped": "stopped; all that was finished is kept",
    "failed": "failed",
    "done": "done",
    "lost": "its process is gone; resume it, and it goes on from what was saved",
}
STEP_SENTENCES = {
    "profile": "measures the teacher",
    "try": "tries sinks",
    "price": "prices every head",
    "exchange": "tries exchanges",
    "gates": "learns gates",
    "distill": "trains the features",
    "evaluate": "judges the student",
}


def model_card(inspection: Inspection) -> str:
    """Say what a model is, and whether it can be linearized."""
    shapes = sorted({(layer.query_heads, layer.kv_heads, layer.key_dim) for layer in inspection.layers})
    heads = "; ".join(f"{query} on {kv} KV, {dim} wide" for query, kv, dim in shapes) or "unknown"
    windowed = sum(layer.native_window is not None for layer in inspection.layers)
    pairs = [
        ("parameters", number(inspection.parameters)),
        ("layers", str(len(inspection.layers)) + (f", {windowed} with windows of their own" if windowed else "")),
        ("heads", heads),
        ("positions", f"{inspection.positions or 'unknown'}, up to {inspection.max_positions or 'any length'}"),
        ("cache", f"{size(inspection.cache_bytes_per_token)} a token"),
        ("weights", size(inspection.weight_bytes)),
        ("licence", (inspection.licence or "not stated") + (" · gated" if inspection.gated else "")),
    ]
    if not inspection.supported:
        verdict = message_box(f"Not supported, because {inspection.reason}: {inspection.remedy}.", "bad")
    else:
        tested = "" if inspection.tested else " by its interface; its family is not among those we test"
        verdict = message_box(f"Supported{tested}.", "good")
    kind = f"{inspection.architecture} · {inspection.revision[:8]}" if inspection.revision else inspection.architecture
    return (
        f'<article class="lz-card"><header><h3>{escape(inspection.name)}</h3><small>{escape(kind)}</small></header>'
        f"{verdict}{values_list(pairs)}</article>"
    )


def feature_unit(layers: Sequence[Layer]) -> int:
    """Bytes of one feature for every KV head."""
    return sum(layer.kv_heads * head_bytes.feature_bytes(layer) for layer in layers if layer.native_window is None)


def cost_card(features: float, worth: float, state: str, smaller: str, rows: Sequence[Sequence[str]]) -> str:
    """Say what a state is, and what teacher and student remember of long texts."""
    held = ("mean features per KV head", features) if features else ("worth in features per KV head", worth)
    pairs = [(held[0], f"{held[1]:.1f}"), ("state", state), ("smaller than the cache", smaller)]
    loud = announcement(f"state {state}, smaller than the cache {smaller}")
    return f"<div{loud}>{values_list(pairs, 'lz-wide')}{table('Memory of teacher and student', ROW_TITLES, rows)}</div>"


def budget_card(plan: Plan, layers: Sequence[Layer], positions: int) -> str:
    """Say what a budget means before anything is measured: the most that its state can take.

    Where heads may grow, the state takes no more than the budget at the plan's target length. It is a fixed part and a
    part in proportion to the length, so at a greater length it takes at most as many times more.
    """
    unit = feature_unit(layers)
    kept = head_bytes.cache_bytes(layers, plan.kept_sinks + plan.kept_window)
    if plan.budget is None:
        features, most = float(plan.features or 0), kept + (plan.features or 0) * unit
    else:
        most = head_bytes.cache_bytes(layers, plan.budget)
        features = 0.0 if plan.rules.spends_tokens else max(0, most - kept) / unit
    grows = plan.may_grow and plan.rules.decided_by in ("prices", "gates")
    target = plan.target_tokens(positions)
    rows = []
    for tokens in STATED_LENGTHS:
        state = most * max(target, tokens) // target if grows else most
        rows.append(size_row(tokens, head_bytes.cache_bytes(layers, tokens), state, "≤"))
    begin = head_bytes.meeting(most, head_bytes.cache_bytes(layers, 1))
    length = f" up to {target:,} tokens, more beyond" if grows else ", whatever the length"
    smaller = from_length(begin if not grows or (plan.budget or 0) < target else None)
    return cost_card(features, most / unit, f"at most {size(most)}{length}", smaller, rows)


def allocation_card(allocation: Allocation, layers: Sequence[Layer]) -> str:
    """Say what an allocation is and costs."""
    state = StateSize.of(allocation, layers)
    worth, smaller = state.fixed / feature_unit(layers), from_length(state.breakeven)
    return cost_card(allocation.features_mean, worth, state.in_words, smaller, state.rows())


def shares_note(decided: bool) -> str:
    """Say whose allocation is shown: the run's own, or what is predicted for a budget."""
    own, other = "What this run holds.", "What this budget would buy, as predicted from what was measured."
    return f'<p class="lz-faint">{own if decided else other}</p>'


DECIDING = {
    "prices": "This run decides by kl: a head's price is the kl at the model's output if it alone holds an option, and "
    "the budget goes where a byte saves most of it. Degrees of freedom decide nothing here; they decide the features "
    "of the recipes features and paper.",
    "freedoms": "This run decides by degrees of freedom: they say how many features a head's attention needs for a "
    "given error, and a head with more of them gets more features.",
    "gates": "This run decides by learned gates: the heads with the largest gates keep their whole cache. Degrees of "
    "freedom decide nothing here; they decide the features of the recipes features and paper.",
    "budget": "This recipe gives every head the same, so no measurement decides. Degrees of freedom decide the "
    "features of the recipes features and paper.",
}


def deciding_note(plan: Plan) -> str:
    """Say what decides in a run what its heads hold."""
    return message_box(DECIDING[plan.rules.decided_by])


def efforts_table(forecasts: Mapping[str, RunForecast], chosen: str, lent: bool = False) -> str:
    """Say what every effort takes, before a run begins; the chosen effort has a mark.

    A GPU that is `lent` is not there to be measured.
    """
    rows = [
        [
            f"{name} ✓" if name == chosen else name,
            duration(forecast.seconds),
            size(forecast.memory_bytes),
            size(forecast.disk_bytes),
        ]
        for name, forecast in forecasts.items()
    ]
    load = next((forecast.download_bytes for forecast in forecasts.values()), 0)
    note = f"{size(load)} of it to download" if load else "nothing to download"
    here = "What it takes on the CPU; the GPU that is lent is faster" if lent else "What it takes here, about"
    return table(f"{here}; {note}", ("effort", "time", "memory", "disk"), rows)


def run_card(status: Status | None, name: str, now: float) -> str:
    """Say what a run is doing."""
    if status is None:
        return '<p class="lz-empty">No run yet. Choose a model and a budget, then press Start.</p>'
    plan = status.run.plan
    dial = f"{plan.budget} tokens of cache" if plan.features is None else f"{plan.features} features"
    state = STATE_SENTENCES[status.state]
    if status.state == "queued" and status.place:
        state += f": place {status.place}" if status.place > 1 else ": it is next"
    moving = status.step if status.state in LIVE else None
    loud = announcement(f"{plan.model}: {state}{quarters_done(moving) if moving else ''}")
    lines = [f'<p class="lz-state lz-now lz-{status.state}"{loud}>{state_sign(status.state)} {escape(state)}</p>']
    if moving:
        lines.append(progress_bar(moving, now))
    if status.error and status.state in ("failed", "stopped"):
        lines.append(message_box(status.error, "bad" if status.state == "failed" else "note"))
    pairs = [
        ("model", plan.model),
        ("budget", dial),
        ("begun", ago(status.begun, now)),
        ("disk", size(status.disk_bytes)),
        ("name", name),
    ]
    if status.published:
        pairs.append(("published as", status.published["repo_id"]))
    if status.saved is not None and status.state != "done":
        pairs.insert(3, ("last saved", ago(status.saved, now)))
    return "".join(lines) + values_list(pairs, "lz-list")


def state_sign(state: str) -> str:
    return f'<span aria-hidden="true">{STATE_SIGNS[state]}</span>'


def quarters_done(step: Mapping[str, Any]) -> str:
    """Say in quarters how far a step is, so that a screen reader speaks only four times."""
    done, total = int(step["done"]), max(1, int(step["total"]))
    return f", {STEP_SENTENCES.get(step['event'], str(step['event']))}, {25 * (4 * done // total)} %"


def progress_bar(step: Mapping[str, Any], now: float) -> str:
    """Draw how far a step is, and say how long it will take."""
    done, total = int(step["done"]), max(1, int(step["total"]))
    what = STEP_SENTENCES.get(step["event"], str(step["event"]))
    left = step.get("seconds_left")
    text = f"{done:,} of {total:,} {step.get('unit', '')}"
    if isinstance(left, float) and math.isfinite(left) and done < total:
        text += f" · {duration(max(1.0, left - (now - step['time'])))} left"
    return (
        f'<p class="lz-step lz-now">{escape(what)}</p>'
        f'<progress aria-label="{escape(what)}" value="{done}" max="{total}"></progress>'
        f'<p class="lz-faint lz-now">{escape(text)}</p>'
    )


def untrained_note(why: str) -> str:
    """Say that nothing is trained; the charts of training are not shown beside it."""
    return f'<div class="lz-untrained">{message_box(why)}</div>'


def training_card(status: Status, events: Sequence[Mapping[str, Any]], now: float) -> str:
    """Say how a training goes."""
    if not events:
        if not status.run.plan.trains:
            return untrained_note("The plan asks for no training: continue to the last step.")
        allocation = status.run.allocation
        if allocation and not any(head.features for row in allocation.heads for head in row):
            return untrained_note("No head has features in this allocation, so there is nothing to train: continue.")
        return message_box("Training begins when the teacher is measured.")
    last = events[-1]
    pairs = [("step", f"{last['done']} of {last['total']}"), ("tokens a second", f"{last['tokens_per_second']:,.0f}")]
    pairs += [(title, f"{last[name]:.4f}") for name, title in ERRORS.items() if last.get(name) is not None]
    if status.state in LIVE and last["done"] < last["total"]:
        pairs.append(("time left", duration(last["seconds_left"])))
    pairs.append(("last saved", "not yet" if status.saved is None else ago(status.saved, now)))
    ended = status.state == "done" and last["done"] < last["total"]
    early = message_box(f"Training was ended at {last['done']} of {last['total']} steps.") if ended else ""
    warnings = [message_box(str(text)) for event in events for text in event.get("events", ())][-3:]
    return values_list(pairs, "lz-wide") + early + "".join(warnings)


def verdict_card(verdict: Verdict | None) -> str:
    """Lead a result with its verdict."""
    return "" if verdict is None else f'<div class="lz-verdict">{message_box(verdict.sentence, verdict.kind)}</div>'


def evaluation_table(language: Language, recall: Recall | None) -> str:
    """Compare the student with its teacher and a plain window of the same bytes."""
    gaps = [f"recall after {gap}" for gap in recall.gaps] if recall else []
    again = {subject.name: [f"{loss:.3f}" for loss in subject.second] for subject in recall.subjects} if recall else {}
    cells = [
        [
            subject.name,
            state_size(subject.state_bytes),
            f"{subject.loss.mean:.3f}",
            "–" if subject.kl is None else f"{subject.kl.mean:.4f}",
            "–" if subject.agreement is None else f"{subject.agreement.mean:.1%}",
            *again.get(subject.name, ["–"] * len(gaps)),
        ]
        for subject in language.subjects
    ]
    head = ("model", "state", "loss", "KL to the teacher", "agreement", *gaps)
    note = "On text that was kept from training, in nats per token; window: a plain one that takes the student's bytes"
    return folded("In numbers", table(note, head, cells), is_open=True)


def side_card(side: Side | None) -> str:
    """Say how fast one model wrote, and what it remembers."""
    if side is None or not side.tokens:
        return values_list([("tokens/s", "–"), ("first token", "–"), ("remembers", "–")], "lz-thirds")
    pairs = [
        ("tokens/s", f"{side.tokens_per_second:.1f}"),
        ("first token", f"{side.first_token_seconds * 1000:.0f} ms"),
        (f"remembers after {side.tokens_read} tokens", size(side.state_bytes)),
    ]
    return values_list(pairs, "lz-thirds")


def plan_card(plan: Plan) -> str:
    """Show the plan of a run: what it asks for beside the recipe's choices, and how to do the same elsewhere."""
    dial = f"{plan.budget} tokens of cache" if plan.features is None else f"{plan.features} features per KV head"
    pairs = [
        ("model", plan.model),
        ("budget", dial),
        ("state", "may grow" if plan.may_grow else "never grows"),
        ("recipe", f"{plan.recipe}: {RECIPES[plan.recipe].label}"),
        ("text", f"{plan.texts} texts of {plan.length} tokens, {plan.text}"),
        ("training", f"{plan.minutes} minutes" if plan.minutes is not None else f"{plan.steps} steps"),
        ("seed", str(plan.seed)),
    ]
    command = f"<code>{escape(plan.command())}</code>"
    whole = folded("The whole plan", f"<pre>{escape(plan.to_json())}</pre>")
    lines = values_list(pairs)
    return f'<article class="lz-card">{lines}<p class="lz-faint">From a command line: {command}</p>{whole}</article>'


def runs_table(statuses: Sequence[Status], now: float | None = None) -> str:
    """List runs, the newest first, each with a link to it, how far it is, and what judging measured."""
    if not statuses:
        return message_box("No runs yet: the first page begins one.")
    now = time.time() if now is None else now
    rows = []
    for status in statuses:
        name, plan = status.run.folder.name, status.plan
        if plan is None:  # it is damaged
            what = [escape(without_folders(status.error or "")), "", ""]
        else:
            dial = f"{plan.budget} tokens" if plan.features is None else f"{plan.features} features"
            link = f'<a href="../?run={escape(name, quote=True)}">{escape(plan.model)}</a>'
            what = [link, escape(plan.recipe), escape(dial + ", may grow" * plan.may_grow)]
        rows.append(
            [
                *what,
                f"{state_sign(status.state)} {escape(state_words(status))}",
                *judged_of(status.run),
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
    return f"{STEP_SENTENCES.get(status.step['event'], status.state)}, {100 * done // total} %"


def judged_of(run: Run) -> tuple[str, str]:
    """Say the kl and the agreement of a run's student; a dash where it is not judged."""
    try:
        part = run.results.get("language")
    except LinearizerError:  # a damaged file of one run must not hide the others
        return "–", "–"
    student = next((each for each in part.result.subjects if each.name == "student"), None) if part else None
    if student is None or student.kl is None or student.agreement is None:
        return "–", "–"
    return f"{student.kl.mean:.4f}", f"{student.agreement.mean:.1%}"


def deleting_card(status: Status) -> str:
    """Ask whether a run shall go for good."""
    published = status.published["repo_id"] if status.published else None
    hub = f" What was published as {published} stays." if published else ""
    held = "student, measurements and log" if status.run.checkpoint.is_dir() else "measurements and log"
    name, model = status.run.folder.name, status.plan.model if status.plan else "damaged"
    return message_box(
        f"Delete {name} ({model}, {size(status.disk_bytes)}) for good? Its {held} will be gone.{hub}",
        "bad",
    )


def files_table(files: Sequence[tuple[str, int]], total: int) -> str:
    """List what would be published."""
    rows = [[name, size(count)] for name, count in files]
    return table("Files", ("file", "size"), [*rows, ["in all", size(total)]])


def published_card(published: Mapping[str, Any]) -> str:
    """Say where a student was published."""
    link = f'<a href="{escape(published["url"], quote=True)}" target="_blank" rel="noopener">'
    loud = announcement(f"Published as {published['repo_id']}.")
    return (
        f'<p class="lz-message lz-good"{loud}><span aria-hidden="true">✓</span> Published as {link}'
        f"{escape(published['repo_id'])}</a>, revision <code>{escape(published['revision'][:12])}</code>, and checked: "
        "what is there is what was sent.</p>"
    )


def sending_card(repo_id: str, step: Progress | None, error: str | None) -> str:
    """Say how publishing goes."""
    if error is not None:
        return message_box(f"{error}. What was sent is kept: press Publish again.", "bad")
    share = f' value="{step.done}" max="{max(1, step.total)}"' if step is not None else ""
    loud = announcement(f"Sending to {repo_id}.")
    return (
        f'<p class="lz-step"{loud}>Sending to {escape(repo_id)}</p><progress aria-label="publishing"{share}></progress>'
    )
