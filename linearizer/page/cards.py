"""The HTML of a run: its state and progress, its result, how to use its student, publishing and evaluation."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from linearizer.amounts import ago, duration, size
from linearizer.errors import LinearizerError
from linearizer.page.visitors import is_example, on_space
from linearizer.plan.allocation import Allocation, StateSize
from linearizer.progress import Progress
from linearizer.report.markup import announcement, folded, message_box, sentence_html, table, values_list
from linearizer.report.parts import PART_VIEWS
from linearizer.report.quality_charts import result_charts
from linearizer.report.tables import with_half_width
from linearizer.report.verdict import Verdict, judge_lengths, of_subject
from linearizer.run.folder import Run
from linearizer.run.hub_job import read_hub_job
from linearizer.run.results import Language, LengthResult, Part
from linearizer.run.training_end import read_training
from linearizer.serve.server import HOST, PORT
from linearizer.workers import control, device_queue
from linearizer.workers.control import LIVE, Status

STATE_SIGNS = {
    "queued": "◷", "running": "●", "stopping": "◑", "stopped": "■", "failed": "▲", "done": "✓", "lost": "?",
    "damaged": "▲",
}  # fmt: skip
STATE_SENTENCES = {
    "queued": "waiting for its turn",
    "running": "running",
    "stopping": "finishes its step, saves, then stops",
    "stopped": "stopped; everything that was finished is kept",
    "failed": "failed",
    "done": "done",
    "lost": "its process is gone; resume it, and it continues from what was saved",
}
STEP_SENTENCES = {
    "profile": "measures the teacher",
    "try": "tries numbers of sinks",
    "price": "prices every head",
    "check": "compares it with plain students",
    "distill": "trains the student",
    "evaluate": "judges the student",
}


ERRORS = {"attention_error": "attention error", "kl": "KL to the teacher"}  # by the key in a step of training
EVALUATION_ENDS = {
    "stopped": "Stopped; the finished parts are kept. Press Evaluate to continue.",
    "lost": "Its process is gone; the finished parts are kept. Press Evaluate to continue.",
}
EXAMPLE = message_box(
    "A finished example that comes with Linearizer. Its weights were those of a GGUF file with 4 bits a number. Under "
    "Compare you can chat with its student."
)
WEIGHTLESS = message_box(
    "This example comes without weights: to use, evaluate or publish such a student, start a run of its model, or of "
    "the demo, which takes seconds."
)


def run_card(status: Status, name: str, now: float, worked: float = 0.0) -> str:
    """Show the state of a run; `worked`: the seconds that it took, without those in which it waited or was stopped."""
    plan = status.run.any_plan
    turn = turn_line(status.run, now) if status.state in ("queued", "running") else ""  # a running run may pause
    state = STATE_SENTENCES[status.state] if turn or status.state != "queued" else "starting"
    moving = status.step if status.state in LIVE else None
    # in quarters, so that a screen reader speaks only four times a step
    done = f", {step_title(moving)}, {25 * int(4 * share_done(moving))}%" if moving else ""
    loud = announcement(f"{plan.model}: {state}{done}")
    lines = [state_line(status.state, state, loud)]
    if moving:
        lines.append(step_bar(moving, now))
    lines.append(turn)
    if (work := status.evaluation) is not None and work.live:
        lines.append(evaluation_card(work, now))
    if status.error and status.state in ("failed", "stopped", "done"):
        lines.append(message_box(status.error, "bad" if status.state == "failed" else "note"))
    facts = [plan.model, plan.budget_in_words, name]
    if not is_example(status.run):  # which was made on another machine, beside other work
        facts.append(f"begun {ago(status.begun, now)}")
        if worked and status.state == "done":
            facts.append(f"took {duration(worked)}")
    if status.saved is not None and status.state != "done":
        facts.append(f"saved {ago(status.saved, now)}")
    facts.append(f"{size(status.disk_bytes)} of disk")
    if (job := read_hub_job(status.run)) is not None:
        facts.append(f"runs in a job on {job.flavor}, at most ${job.cap:.2f}")
    if status.published:
        facts.append(f"published as {status.published['repo_id']}")
    if status.live:
        facts.append("you may close the page, the run goes on")
    link = copy_button("Copy link", f"?run={quote(name)}")
    note = EXAMPLE if is_example(status.run) else ""
    return f'{"".join(lines)}<p class="lz-faint">{escape(" · ".join(facts))} · {link}</p>{note}'


def turn_line(run: Run, now: float) -> str:
    """Name the run that this one waits for, when it began, and how long its step still takes, if that is known."""
    with suppress(OSError, LinearizerError):  # it may end meanwhile
        if not (runs_ahead := device_queue.runs_before(run.folder)):
            return ""
        status = control.status(Run(runs_ahead[0]))
        step = next((work.step for work in (status, status.evaluation) if work and work.state in LIVE), None)
        name = escape(status.run.folder.name)
        mine = runs_ahead[0].parent == run.folder.resolve().parent
        elsewhere = "another visitor’s run" if on_space() else "a run in another folder"
        holder = f'<a href="?run={name}">{name}</a>' if mine else elsewhere
        facts = [f"begun {ago(status.begun, now)}", *([step_title(step), time_left(step, now)] if step else [])]
        facts += [f"{len(runs_ahead) - 1} more before this run"] * (len(runs_ahead) > 1)
        return f'<p class="lz-links">The machine is running {holder}: {escape(", ".join(filter(None, facts)))}.</p>'
    return ""


def time_left(step: Mapping[str, Any], now: float) -> str:
    """Describe how long a step still takes; empty if that is not known."""
    seconds = step.get("seconds_left")
    is_known = isinstance(seconds, float) and math.isfinite(seconds) and step["done"] < step["total"]
    return f"{duration(max(1.0, seconds - (now - step['time'])))} left" if is_known else ""


def state_line(state: str, words: str, loud: str = "") -> str:
    sign = f'<span aria-hidden="true">{STATE_SIGNS[state]}</span>'
    return f'<p class="lz-state lz-{state}"{loud}>{sign} {escape(words)}</p>'


def step_title(step: Mapping[str, Any]) -> str:
    return STEP_SENTENCES.get(step["event"], step["event"])


def share_done(step: Mapping[str, Any]) -> float:
    return min(1.0, step["done"] / max(1, step["total"]))


def step_bar(step: Mapping[str, Any], now: float) -> str:
    """Draw how far a step is, and describe how long it still takes."""
    facts = f"{step['done']:,} of {step['total']:,} {step.get('unit', '')}", time_left(step, now)
    return progress_bar(step_title(step), share_done(step), " · ".join(filter(None, facts)))


def progress_bar(title: str, share: float | None, text: str = "", loud: str = "") -> str:
    """Draw a progress bar under a title; a share of None: not known."""
    value = "" if share is None else f' value="{share:.3f}" max="1"'
    caption = f'<p class="lz-faint">{escape(text)}</p>' if text else ""
    return (
        f'<p class="lz-step"{loud}>{escape(title)}</p><progress aria-label="{escape(title, quote=True)}"{value}>'
        f"</progress>{caption}"
    )


def trains(run: Run) -> bool:
    """Whether a run trains, as far as is known: features of its student, or copies of its teacher's weights."""
    if run.is_encoder_run:  # its training is shown above the steps only
        return False
    features = (allocation := run.allocation) is None or any(head.features for row in allocation.heads for head in row)
    return run.plan.trains and (features or run.plan.changes_weights)


def training_card(status: Status, events: Sequence[Mapping[str, Any]]) -> str:
    """Show the speed and errors of a training; the card of the run shows its progress."""
    if not events:
        return message_box("Training begins once the teacher is measured.")
    newest = events[-1]
    pairs = [("tokens a second", f"{newest['tokens_per_second']:,.0f}")]
    first = {name: next((event[name] for event in events if event.get(name) is not None), None) for name in ERRORS}
    pairs += [
        (f"{title}; {first[name]:.4g} at first", f"{newest[name]:.4g}")
        for name, title in ERRORS.items()
        if newest.get(name) is not None
    ]
    ended_early = status.state == "done" and newest["done"] < newest["total"]
    end_note = message_box(f"Training was ended at {newest['done']} of {newest['total']} steps.") if ended_early else ""
    warnings = [message_box(str(text)) for event in events for text in event.get("events", ())][-3:]
    return values_list(pairs, "lz-wide") + end_note + "".join(warnings)


def verdict_card(verdict: Verdict | None) -> str:
    """Show a verdict: its first sentence in a box, the others below."""
    if verdict is None:
        return ""
    headline, _, details = verdict.sentence.partition(". ")
    details_html = f'<p class="lz-note-below">{sentence_html(details)}</p>' if details else ""
    return f'<div class="lz-verdict">{message_box(headline + "." * bool(details), verdict.kind)}{details_html}</div>'


def result_card(run: Run, allocation: Allocation, part: Part[Language]) -> str:
    """Show the verdict on a student, four numbers, and two charts."""
    state, lengths = StateSize.of(allocation, run.layers), part.result.lengths
    verdict = judge_lengths(lengths, state)
    judged = next(result for result in lengths if result.length == verdict.length)
    numbers = numbers_card(judged, state, run.positions)
    trained = read_training(run)
    early = message_box(f"Its training was ended early, at {trained.in_words}.") if trained.early else ""
    gain = message_box(f"Distilled: {trained.gain_in_words}.") if trained.gain_in_words else ""
    return verdict_card(verdict) + early + gain + numbers + result_charts(run, allocation, part)


def numbers_card(judged: LengthResult, state: StateSize, length: int) -> str:
    """Show the four numbers of a result, on the texts that decide its verdict."""
    student, window = of_subject(judged, "student"), of_subject(judged, "window")
    cache = size(state.teacher_bytes(length))
    pairs = [
        ("agrees with its teacher", with_half_width(student.agreement, ".1%")),
        ("a window of the same bytes does", with_half_width(window.agreement, ".1%")),
        (f"{'KL' if student.kl else 'loss'}, nats per token", with_half_width(student.kl or student.loss, ".4f")),
        (f"state; the cache at {length:,} tokens: {cache}", size(state.student_bytes(length))),
    ]
    return values_list(pairs, "lz-wide")


def use_card(run: Run) -> str:
    """Show the code that loads and serves a student on this machine."""
    from linearizer.publish.card import EncoderCard

    if is_example(run):
        return WEIGHTLESS
    if not run.checkpoint.is_dir():
        return ""
    if on_space():
        return message_box("To use it elsewhere, download or publish it: the page then shows the lines that load it.")
    ways = EncoderCard(run).write_ways_to_load() if run.is_encoder_run else write_causal_ways(run)
    blocks = "".join(
        f'<div><h3>{title}</h3>{copy_button("Copy", code)}<pre tabindex="0">{escape(code)}</pre></div>'
        for title, code in ways.items()
    )
    return f'<div class="lz-lead"><h3>Use it</h3></div><div class="lz-card lz-use">{blocks}</div>'


def write_causal_ways(run: Run) -> dict[str, str]:
    """Write the code that loads and serves the student of a causal language model."""
    folder, place = str(run.checkpoint.absolute()), shlex.quote(str(run.checkpoint.absolute()))
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)\n'
        'written = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=40)\n'
        "print(tokenizer.decode(written[0]))"
    )
    body = json.dumps({"prompt": "Once", "max_tokens": 40})
    ways = {"Load it": load, "Serve it": f"linearizer serve {shlex.quote(str(run.folder.absolute()))}"}
    if find_spec("vllm") is not None:
        ways["Serve it with vLLM"] = f"vllm serve {place} --enable-prefix-caching --block-size 256"
    asked = f"curl http://{HOST}:{PORT}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    return {**ways, "Ask the server": asked}


def copy_button(title: str, text: str) -> str:
    """Make a button with which head.html copies a text."""
    return f'<button type="button" data-act="copy" value="{escape(text, quote=True)}">{title}</button>'


def files_table(files: Sequence[tuple[str, int]], total: int) -> str:
    """List what would be published."""
    rows = [[name, size(count)] for name, count in files]
    return folded(f"{len(files)} files, {size(total)} in all", table("", ("file", "size"), rows, label="Files"))


def published_card(published: Mapping[str, Any]) -> str:
    """Link to a published student."""
    link = f'<a href="{escape(published["url"], quote=True)}" target="_blank" rel="noopener">'
    loud = announcement(f"Published as {published['repo_id']}.")
    return (
        f'<p class="lz-message lz-good"{loud}><span aria-hidden="true">✓</span> Published as {link}'
        f"{escape(published['repo_id'])}</a>, revision <code>{escape(published['revision'][:12])}</code>, and checked: "
        "the Hub has exactly what was sent.</p>"
    )


def sending_card(repo_id: str, step: Progress | None, error: str | None) -> str:
    """Show the progress of publishing."""
    if error is not None:
        return message_box(f"{error}. Press Publish to continue.", "bad")
    share = None if step is None else share_done(asdict(step))
    return progress_bar(f"Sending to {repo_id}", share, loud=announcement(f"Sending to {repo_id}."))


def evaluation_card(status: Status | None, now: float) -> str:
    """Show the progress of an evaluation, or its end."""
    if status is None:
        return ""
    if status.state in LIVE:
        state, step = STATE_SENTENCES[status.state], status.step
        loud = announcement(f"Evaluation: {state}")
        line = state_line(status.state, state, loud)
        return line + (turn_line(status.run, now) if status.state == "queued" or step is None else part_bar(step))
    if status.state == "failed":
        return message_box(status.error or "The evaluation failed.", "bad")
    if status.state == "done":
        return message_box("Evaluated. The model card will show it, too.", "good")
    reason = f"{status.error}. " if status.state == "stopped" and status.error else ""
    return message_box(reason + EVALUATION_ENDS[status.state])


def part_bar(step: Mapping[str, Any]) -> str:
    """Draw the progress of an evaluation over all its parts."""
    place, parts = int(step.get("place", 1)), max(1, int(step.get("parts", 1)))
    view = PART_VIEWS.get(str(step.get("part")))
    text = f"part {place} of {parts}: {step['done']:,} of {step['total']:,} {step.get('unit', '')}"
    return progress_bar(view.title if view else step["event"], (place - 1 + share_done(step)) / parts, text)
