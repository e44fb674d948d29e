"""What the command line shows: progress while a step works, and tables of what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from linearizer.amounts import columns, growing, size, smaller_from
from linearizer.progress import Progress, Steps
from linearizer.run import events

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import Comparison
    from linearizer.publish.push import Preview
    from linearizer.run.allocation import Allocation
    from linearizer.run.folder import Run
    from linearizer.run.head_bytes import Head, Layer
    from linearizer.run.inspection import Inspection
    from linearizer.run.profile import Profile

Product = TypeVar("Product")


class Bar:
    """One line on a terminal: how far a step is, how fast it goes, what is left."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.shown = stream, stream.isatty()
        self.step, self.begin, self.first, self.width = ("", ""), 0.0, 0, 0

    def show(self, progress: Progress, now: float | None = None) -> None:
        """Show progress that was made now, or at a time in seconds."""
        now = time.monotonic() if now is None else now
        if (progress.step, progress.unit) != self.step:
            if progress.step == "queue" and not self.shown:  # who waits for hours is told, on whatever stream
                self.stream.write(f"waiting for the runs before this one: {progress.total}\n")
            self.step, self.begin, self.first = (progress.step, progress.unit), now, progress.done
        done, took = progress.done - self.first, now - self.begin
        count = size if progress.unit == "bytes" else str
        unit = "" if progress.unit == "bytes" else f" {progress.unit}"
        line = f"{progress.step:>10}  {count(progress.done)}/{count(progress.total)}{unit}"
        if "waiting" in progress.details:
            line += f"  {progress.details['because']}, trying again in {progress.details['waiting']} s"
        if done and took > 0:
            rate = size(done / took) if progress.unit == "bytes" else f"{done / took:.1f}"
            line += f"  {rate}/s  {duration((progress.total - progress.done) * took / done)} left"
        self.print(line)

    def print(self, line: str) -> None:
        if self.shown:
            self.stream.write("\r" + line.ljust(self.width))
            self.stream.flush()
            self.width = len(line)

    def clear(self) -> None:
        self.print("")
        if self.shown:
            self.stream.write("\r")


def watch(steps: Steps[Product]) -> Product:
    """Run a step to its end, with its progress on standard error if that is a terminal."""
    bar = Bar(sys.stderr)
    with closing(steps):
        try:
            while True:
                try:
                    bar.show(next(steps))
                except StopIteration as end:
                    return end.value
        finally:
            bar.clear()


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def inspection_text(found: Inspection) -> str:
    """Say what a model is."""
    shapes = sorted({(layer.query_heads, layer.kv_heads, layer.key_dim) for layer in found.layers})
    windowed = sum(layer.native_window is not None for layer in found.layers)
    heads = "; ".join(f"{query} query heads on {kv} KV heads of size {dim}" for query, kv, dim in shapes)
    facts = [
        ("model", found.name + (f" at {found.revision}" if found.revision else "")),
        ("architecture", f"{found.architecture} ({found.model_type})"),
        ("supported", "yes" + ("" if found.tested else ", by its interface; its family is not among the tested"))
        if found.supported
        else ("supported", f"no, because {found.reason}: {found.remedy}"),
        ("layers", f"{len(found.layers)}" + (f", {windowed} of them windowed by itself" if windowed else "")),
        ("attention", heads or "unknown"),
        ("positions", f"{found.positions or 'unknown'}, at most {found.max_positions or 'any'}"),
        ("parameters", f"{found.parameters:,} ({size(found.weight_bytes)} to download)"),
        ("licence", (found.licence or "not stated") + (", gated" if found.gated else "")),
        ("KV cache", f"{found.cache_bytes_per_token:,} bytes a token"),
    ]
    lines = [f"{name:13}{text}" for name, text in facts]
    for budget in found.budgets:
        lines.append(
            f"{'budget ' + str(budget.tokens):13}{size(budget.bytes)} of state, or {budget.features_mean:.1f} features "
            "per KV head"
        )
    return "\n".join(lines)


def profile_text(profile: Profile) -> str:
    """Say what was measured, layer by layer."""
    reference = profile.settings.ridges.index(profile.settings.reference)
    rows: list[Sequence[object]] = [
        ("layer", "N(λ) by KV head", "in sinks", f"in window {profile.windows[-1]}", "nats")
    ]
    for index, layer in enumerate(profile.layers):
        if not layer.heads:
            rows.append((index, "bounded by itself", "", "", ""))
            continue
        counts = " ".join(f"{head.freedoms[reference]:.1f}{'*' * head.saturated}" for head in layer.heads)
        sinks, window, entropy = (
            sum(values) / len(layer.heads)
            for values in zip(*((h.sink_mass, h.window_mass[-1], h.entropy) for h in layer.heads), strict=True)
        )
        rows.append((index, counts, f"{sinks:.0%}", f"{window:.0%}", f"{entropy:.2f}"))
    text = columns(rows) + f"\ndegrees of freedom at λ = {profile.settings.reference:g}, from {profile.tokens:,} tokens"
    if any(head.saturated for layer in profile.layers for head in layer.heads):
        text += f"\n* more than a quarter of the {profile.settings.samples} samples: ask for more with --samples"
    return text


def allocation_text(allocation: Allocation, layers: Sequence[Layer], length: int) -> str:
    """Say what every head got, and what that costs."""
    rows: list[Sequence[object]] = [("layer", "by KV head: window, + features or slots (s)")]
    for index, heads in enumerate(allocation.heads):
        rows.append((index, "  ".join(map(head_text, heads)) or "stays as it is"))
    return columns(rows) + "\n" + cost_text(allocation, layers, length)


def cost_text(allocation: Allocation, layers: Sequence[Layer], length: int) -> str:
    """Say in one line what a student's state is and costs, once `length` tokens have been read where it grows."""
    growth = allocation.growth(layers)
    begin = smaller_from(allocation.breakeven_tokens(layers), allocation.saved(layers))
    state = f"{growing(allocation.state_bytes(layers, 0), growth)} of state"
    if growth:
        state += f" ({size(allocation.state_bytes(layers, length))} after {length:,} tokens)"
    smaller = "never smaller than the cache" if begin == "never" else f"smaller than the cache {begin}"
    return f"{allocation.strategy}: {held_text(allocation)}, {state}, {smaller}"


def head_text(head: Head) -> str:
    """Say in a word what one head holds."""
    if head.softmax:
        return "softmax"
    return f"{head.window}+{head.slots}s" if head.slots else f"{head.window}+{head.features}"


def held_text(allocation: Allocation) -> str:
    """Say in a line what the heads hold."""
    heads = [head for row in allocation.heads for head in row]
    kinds = {
        "with a window": [head for head in heads if not (head.softmax or head.slots or head.features)],
        f"with {allocation.features_mean:.1f} features on average": [head for head in heads if head.features],
        "with slots": [head for head in heads if head.slots],
        "left softmax": [head for head in heads if head.softmax],
    }
    counts = ", ".join(f"{len(found)} KV heads {kind}" for kind, found in kinds.items() if found)
    return f"{counts}, {allocation.sinks} sinks, {allocation.bits} bits a number"


def run_text(run: Run) -> str:
    """Say what came of a run that is done."""
    assert run.allocation is not None
    from linearizer.publish.parts import PART_VIEWS
    from linearizer.publish.tables import text_of

    parts = run.evaluation_parts
    judged = "\n\n".join(
        text_of(PART_VIEWS[part].tables(parts[part])) for part in ("language", "recall") if part in parts
    )
    bought = events.events_of_student(run.events(), "exchanged")
    real = (
        f"KL on the text that heads were priced on: {bought[-1]['predicted']:.4f} predicted, "
        f"{bought[-1]['measured']:.4f} measured\n"
        if bought
        else ""
    )
    costs = cost_text(run.allocation, run.layers, run.plan.target_tokens(run.positions))
    text = f"{costs}\n{real}{judged}\nthe student is in {run.checkpoint}"
    text += f"\nsee it write: linearizer compare {run.folder}"
    if (published := run.published) is None:
        return text
    return f"{text}\n{published_text(published)}\n\n{published.get('snippet', '')}".rstrip()


def published_text(event: Mapping[str, Any]) -> str:
    """Say where a student was published."""
    seen = "private" if event.get("private") else "public"
    return f"published as {event['repo_id']} ({seen}), revision {event['revision']}: {event['url']}"


def comparison_text(found: Comparison) -> str:
    """Say what teacher and student wrote, how fast, and what they remember."""
    rows: list[Sequence[object]] = [("", "tokens", "first token", "tokens/s", "remembers")]
    for name, side in (("teacher", found.teacher), ("student", found.student)):
        first = f"{side.first_token_seconds * 1000:.0f} ms"
        rows.append((name, side.tokens, first, f"{side.tokens_per_second:.1f}", size(side.state_bytes)))
    texts = (f"{name}: {side.text}" for name, side in (("teacher", found.teacher), ("student", found.student)))
    return "\n\n".join([f"prompt: {found.prompt}", *texts, columns(rows)])


def preview_text(found: Preview) -> str:
    """Say what would be published: the notes first, then files and card."""
    seen = "private" if found.private else "public"
    lines = [f"{found.repo_id}, {seen}, {len(found.files)} files, {size(found.bytes)}; nothing was sent"]
    lines += [f"note: {note}" for note in found.notes]
    files = columns([(name, size(count)) for name, count in found.files])
    return "\n".join([*lines, "", files, "", found.card])
