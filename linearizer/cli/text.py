"""The text of the command line: the progress of a step, and tables of its product."""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from linearizer.amounts import columns, duration, size
from linearizer.plan.allocation import ROW_TITLES, ReadingSize, StateSize
from linearizer.progress import Progress, Steps, finish
from linearizer.report.parts import PART_VIEWS
from linearizer.report.tables import describe_heads, write_tables
from linearizer.report.verdict import kl_sentences
from linearizer.run.training_end import read_training

if TYPE_CHECKING:
    from linearizer.encoders.encoder_quality import Judgement
    from linearizer.hub.repository import Preview
    from linearizer.plan.allocation import Allocation
    from linearizer.plan.encoder_plan import EncoderInspection
    from linearizer.plan.head_bytes import Layer
    from linearizer.plan.inspection import Inspection
    from linearizer.run.folder import Run
    from linearizer.run.results import Comparison, Side
    from linearizer.serve.state_files import StateFile

Product = TypeVar("Product")


class ProgressBar:
    """One line on a terminal: the progress of a step, its speed, and the time that remains."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_terminal = stream, stream.isatty()
        self.step, self.step_began, self.done_before, self.done, self.width = ("", ""), 0.0, 0, 0, 0

    def show(self, progress: Progress, now: float | None = None) -> None:
        """Show progress as of now, or as of a time in seconds."""
        now = time.monotonic() if now is None else now
        if (progress.step, progress.unit) != self.step or progress.done < self.done:
            if progress.step == "queue" and not self.is_terminal:  # a wait of hours is announced on every stream
                self.stream.write(f"waiting for the runs before this one: {progress.total}\n")
            self.step, self.step_began, self.done_before = (progress.step, progress.unit), now, progress.done
        self.done = progress.done
        done, seconds = progress.done - self.done_before, now - self.step_began
        in_bytes = progress.unit == "bytes"
        counts = [size(count) if in_bytes else f"{count}" for count in (progress.done, progress.total)]
        line = f"{progress.step:>10}  {'/'.join(counts)}{'' if in_bytes else f' {progress.unit}'}"
        if "waiting" in progress.details:
            line += f"  {progress.details['because']}, trying again in {progress.details['waiting']} s"
        if done and seconds > 0:
            rate = size(done / seconds) if in_bytes else f"{done / seconds:.1f}"
            line += f"  {rate}/s  {duration((progress.total - progress.done) * seconds / done)} left"
        self.print(line)

    def print(self, line: str) -> None:
        if self.is_terminal:
            self.stream.write("\r" + line.ljust(self.width))
            self.stream.flush()
            self.width = len(line)

    def clear(self) -> None:
        self.print("")
        if self.is_terminal:
            self.stream.write("\r")


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Keep a ctrl-C that Python drops, as in a destructor; yield a function that raises it again."""
    report, interrupted = sys.unraisablehook, threading.Event()

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        interrupted.set() if issubclass(dropped.exc_type, KeyboardInterrupt) else report(dropped)

    def check() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    sys.unraisablehook = keep
    try:
        yield check
    finally:
        sys.unraisablehook = report


def show_progress(steps: Steps[Product]) -> Product:
    """Run a step to its end; show its progress on standard error if that is a terminal."""
    bar = ProgressBar(sys.stderr)
    with closing(steps), kept_interrupts() as check:

        def show(progress: Progress) -> None:
            bar.show(progress)
            check()

        try:
            return finish(steps, show)
        finally:
            bar.clear()


def describe_inspection(inspection: Inspection) -> str:
    """Describe a model."""
    revision = inspection.revision
    part = f", {inspection.reads}" if inspection.reads else ""
    working = f", {inspection.active:,} active per token" if inspection.resting else ""
    files = f"{size(inspection.weight_bytes)} in its files"
    facts = [
        ("model", inspection.name + (f" at {revision}" if revision else "")),
        ("architecture", f"{inspection.architecture} ({inspection.model_type}){part}"),
        ("supported", describe_support(inspection)),
        *inspection.describe_shape(),
        ("parameters", f"{inspection.parameters:,} ({files}){working}"),
    ]
    if inspection.supported:
        facts.append(("memory", describe_memory(inspection)))
    if inspection.quantised:
        form = "as they are" if inspection.packed else "expanded while they load"
        note = f"; its weights are held {form}" if inspection.supported else ""
        facts.append(("quantised", inspection.quantised + note))
    facts.append(("KV cache", f"{inspection.cache_bytes_per_token:,} bytes a token"))
    for budget in inspection.budgets:
        features = f"{budget.features_mean:.1f} features per KV head"
        facts.append((f"budget {budget.tokens}", f"{size(budget.bytes)} of state, or {features}"))
    return "\n".join(f"{name:13}{text}" for name, text in facts)


def describe_encoder(inspection: EncoderInspection, title: str) -> str:
    """Describe an encoder, and what its attention costs."""
    model = f"{inspection.name} ({inspection.architecture}), {title.format(reads=inspection.reads)}"
    return "\n".join(f"{name:12}{value}" for name, value in [("model", model), *inspection.describe_shape()])


def describe_support(inspection: Inspection) -> str:
    """Describe whether a model can be linearized, and if not, why, and what to do."""
    if not inspection.supported:
        return f"no, because {inspection.reason}: {inspection.remedy}"
    return "yes" if inspection.tested else "yes, by its interface; its family is not among the tested families"


def describe_memory(inspection: Inspection) -> str:
    """Describe the bytes of a model's weights, and where they fit on this machine."""
    from linearizer.teacher.streaming import bytes_in_memory, spreads, streams

    place = "more than is free here, so they are read block by block" if streams(inspection) else "fits here"
    if spreads(inspection):
        place = "more than is free on one device, so they are spread over several"
    return f"{size(bytes_in_memory(inspection))} of weights, {place}"


def describe_allocation(allocation: Allocation, layers: Sequence[Layer]) -> str:
    """Describe what every head holds, and the bytes of all at several lengths of text."""
    rows: list[Sequence[object]] = [("layer", "by KV head: window + what stands for older tokens")]
    for index, heads in enumerate(allocation.heads):
        rows.append((index, " · ".join(head.in_brief for head in heads) or "stays as it is"))
    sizes = columns([ROW_TITLES, *StateSize.of(allocation, layers).rows()])
    return f"{columns(rows)}\n{describe_state(allocation, layers)}\n{sizes}"


def describe_state(allocation: Allocation, layers: Sequence[Layer]) -> str:
    """Describe a student's state in one line."""
    state = StateSize.of(allocation, layers)
    return f"{allocation.strategy}: {describe_heads(allocation)}; state {state.in_words}; {state.beside_cache}"


def describe_run(run: Run, judged: Collection[Judgement] = ()) -> str:
    """Describe a finished run: its student, its quality, and its place; of an encoder's, all judgements or `judged`."""
    student = describe_encoders_student(run, judged) if run.is_encoder_run else describe_student(run)
    lines = [*verdict_lines(run), *student]
    if (published := run.published) is not None:
        lines += [describe_publication(published), "", published.get("snippet", "")]
    return "\n".join(lines).rstrip()


def describe_student(run: Run) -> list[str]:
    allocation, parts = run.require_allocation(), run.results
    evaluation = "\n\n".join(
        write_tables(PART_VIEWS[part].tables(parts[part])) for part in ("language", "recall") if part in parts
    )
    places = f"the student is in {run.checkpoint}", f"see it write: linearizer compare {run.folder}"
    state = "; ".join(filter(None, (describe_state(allocation, run.layers), run.inspection.beside_state)))
    trained = read_training(run)
    early = [f"trained {trained.in_words}: it was ended early"] if trained.early else []
    return [state, *early, *filter(None, [trained.gain_in_words]), *kl_sentences(run), evaluation, *places]


def describe_encoders_student(run: Run, judged: Collection[Judgement]) -> list[str]:
    from linearizer.encoders.encoder_folder import EncoderRun
    from linearizer.encoders.encoder_report import describe_choice, quality_table
    from linearizer.encoders.layer_times import crossing

    encoder = EncoderRun(run)
    share = f"attention is {encoder.inspection.share(encoder.tokens):.0%} of the teacher's operations"
    lines = [f"{encoder.tokens:,} tokens, {encoder.keys:.4g} keys each; {share}"]
    lines += filter(None, [describe_choice(encoder)])
    if (meeting := crossing(encoder.times)) is not None:
        lines.append(f"a layer is faster than SDPA from about {meeting:,.0f} tokens on, as timed in this run")
    tables = [quality_table(encoder, judgement) for judgement in judged or encoder.judgements.values()]
    load = f"{encoder.inspection.auto_class}.from_pretrained({str(run.checkpoint)!r}, trust_remote_code=True)"
    return [*lines, "", write_tables(tables), "", load]


def verdict_lines(run: Run) -> list[str]:
    """Return the verdict on a run's student as a line, if it was judged."""
    from linearizer.encoders.encoder_report import judge_any_run

    verdict = judge_any_run(run)
    return [] if verdict is None else [verdict.sentence]


def describe_publication(event: Mapping[str, Any]) -> str:
    """Describe where a student was published."""
    visibility = "private" if event.get("private") else "public"
    return f"published as {event['repo_id']} ({visibility}), revision {event['revision']}: {event['url']}"


def describe_comparison(comparison: Comparison) -> str:
    """Describe what each model wrote, where that differs from the teacher's, its speed, and the bytes of its state."""
    rows: list[Sequence[object]] = [("", "tokens", "first token", "tokens/s", "remembers")]
    parts = [f"prompt: {comparison.prompt}"]
    apart = []
    for name in ("teacher", "student", "window"):
        side: Side | None = getattr(comparison, name)
        if side is None:
            continue
        speed = f"{side.first_token_seconds * 1000:.0f} ms", f"{side.tokens_per_second:.1f}"
        rows.append((name, side.tokens, *speed, size(side.state_bytes)))
        parts.append(f"{name}: {side.text}")
        if (split := side.difference) is not None:
            apart.append(f"the {name}: {split.place} tokens alike; then {split.own!r}, the teacher {split.teacher!r}")
    return "\n\n".join([*parts, columns(rows), *apart])


def describe_reading(reading: ReadingSize, run: str, path: Path) -> str:
    """Describe how much was read, and the bytes of the state."""
    beside = f"; {size(reading.recurrent_bytes)} of recurrent layers beside either" if reading.recurrent_bytes else ""
    twice = "twice " if reading.readings > 1 else ""
    return (
        f"{reading.tokens:,} tokens read {twice}into {path}: {size(reading.state_bytes)} of state; the teacher's cache "
        f"would be {size(reading.cache_bytes)}{beside}\nlinearizer ask {run} --state {path} --prompt …"
    )


def describe_states(states: Sequence[StateFile]) -> str:
    """List states, with what they have read."""
    rows = [(printable(x.name), f"{x.tokens:,} tokens", size(x.bytes), printable(x.teacher)) for x in states]
    return columns(rows) if rows else "there are no states in this folder"


def printable(text: str) -> str:
    """Replace the control characters of a name: a terminal would obey them."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def describe_preview(preview: Preview) -> str:
    """Describe what would be published: the notes first, then files and card."""
    visibility = "private" if preview.private else "public"
    lines = [f"{preview.repo_id}, {visibility}, {len(preview.files)} files, {size(preview.bytes)}; nothing was sent"]
    lines += [f"note: {note}" for note in preview.notes]
    files = columns([(name, size(count)) for name, count in preview.files])
    return "\n".join([*lines, "", files, "", preview.card])


def print_stream(pieces: Generator[str, None, Product], silent: bool) -> Product:
    """Print the pieces of a text as they arrive, unless `silent`; return the product at the end."""
    with closing(pieces):
        if silent:
            return finish(pieces)
        try:
            return finish(pieces, lambda piece: print(piece, end="", flush=True))  # noqa: T201
        finally:
            print()  # noqa: T201


def print_product(arguments: Namespace, product: object, text: str) -> None:
    """Print a product as text, or only as JSON."""
    print(json.dumps(product, indent=1) if arguments.json else text)  # noqa: T201
