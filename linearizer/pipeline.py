"""The order of the steps, written once: model -> profile -> allocation -> student -> training -> checkpoint.

Each step's product is stored in the run's folder, and a step whose product is there is not done again.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearizer import checkpoint
from linearizer.allocation import Allocation
from linearizer.asking import asked_of, check_plan, settings_of
from linearizer.checkpoint import holding
from linearizer.comparison import Comparison, compare
from linearizer.cost import Layer
from linearizer.decision import decide, market_of
from linearizer.devices import device_of
from linearizer.distillation import distill
from linearizer.errors import RequestError
from linearizer.estimate import estimate
from linearizer.evaluation import Evaluation, evaluate_language, evaluate_recall
from linearizer.files import remove, writing
from linearizer.gates import learn_gates
from linearizer.hub import Source, find_model
from linearizer.initialisation import begin_layer, initialise
from linearizer.inspection import Inspection, inspect_model, verify_teacher
from linearizer.measurement import measure
from linearizer.model_card import add_card
from linearizer.plan import Plan
from linearizer.prices import Prices, exchanges
from linearizer.pricing import Begin, exchange, measuring_seconds, options, price, with_repeats
from linearizer.profile import Profile
from linearizer.progress import Steps
from linearizer.provenance import environment
from linearizer.room import check_disks
from linearizer.run import Run
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.runtime.student import LayerStudent
from linearizer.samples import Samples
from linearizer.schedule import Settings
from linearizer.subjects import window_control
from linearizer.teacher import load_config, load_teacher, load_tokenizer, quiet
from linearizer.text import enough_windows
from linearizer.working import check, interruptible, logged, working

GATE_STEPS = 60
TRIED = 4  # steps, to see how long one takes
PATIENCE = 1200  # seconds that prices may take to be measured, before they are estimated instead
JUDGED = 8  # texts that are kept from training, to judge by


@dataclass(frozen=True)
class Teacher:
    """A teacher in memory, checked against its inspection."""

    source: Source
    inspection: Inspection
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def inspect(model: str, token: str | None = None) -> Inspection:
    """Say what a model is and whether it can be linearized; no weight is downloaded."""
    source = find_model(model, token)
    return inspect_model(source, load_config(source, token))


def load(plan: Plan, token: str | None = None, folder: Path | None = None) -> Teacher:
    """Load the teacher of a plan, after its config said that it can be linearized, and a run's folder can hold it."""
    source = find_model(plan.model, token)
    inspection = inspect_model(source, load_config(source, token))
    inspection.require_support()
    check_plan(plan, inspection.layers)
    if folder is not None:
        check_disks(folder, plan, source, inspection)
    tokenizer = load_tokenizer(source, token)
    model = load_teacher(source, plan.dtype, device_of(plan.device), token)
    verify_teacher(model, inspection)
    return Teacher(source, inspection, model, tokenizer)


def windows_of(
    plan: Plan, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the text that a plan measures with."""
    most = teacher.inspection.max_positions
    length = plan.length if most is None else min(plan.length, most)
    return enough_windows(
        plan.text, teacher.tokenizer, length, texts, least=least, model=teacher.model, seed=plan.seed, token=token
    )


def profile(run: Run, teacher: Teacher, token: str | None = None) -> Steps[Profile]:
    """Measure the teacher, unless this run has measured it."""
    if found := run.profile:
        return found
    with interruptible(run):
        windows = windows_of(run.plan, teacher, run.plan.texts, token)
    steps = measure(teacher.model, windows, teacher.inspection.layers, asked_of(run.plan))
    measured = yield from logged(run, steps)
    with writing(run.folder / "state"):
        save_file(measured.samples.tensors(), run.folder / "state" / "samples.safetensors")
    run.write("inspection.json", json.dumps(teacher.inspection.to_json()))
    run.write("profile.json", measured.profile.to_json())
    run.log("profiled", tokens=measured.profile.tokens)
    return measured.profile


def priced_texts(run: Run, teacher: Teacher, token: str | None) -> torch.Tensor:
    """Take the text that heads are priced on: less than is profiled, and in half of it passages come again."""
    with interruptible(run):
        windows = windows_of(run.plan, teacher, max(2, run.plan.texts // 2), token)
    return with_repeats(windows, max(2, windows.shape[1] // 16), run.plan.seed)


def measured_prices(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[Prices]:
    """Price every KV head, unless this run has done so."""
    if found := run.prices:
        return found
    offered = options(texts.shape[1], slots=run.plan.strategy != "windows")
    layers, sinks = teacher.inspection.layers, run.plan.kept_sinks
    estimated = run.plan.prices == "estimated" or (
        run.plan.prices == "auto" and measuring_seconds(teacher.model, layers, offered, texts) > PATIENCE
    )
    steps = (estimate if estimated else price)(teacher.model, texts, layers, offered, sinks, begin_of(run))
    found = yield from logged(run, steps)
    run.write("prices.json", found.to_json())
    run.log("priced", tokens=texts.numel(), estimated=estimated)
    return found


def bought(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Buy by prices, and exchange what measuring shows to be better."""
    texts, layers = priced_texts(run, teacher, token), teacher.inspection.layers
    yield from measured_prices(run, teacher, texts)
    chosen, market = decide(run, run.plan, layers), market_of(run, run.plan, layers)

    def others(allocation: Allocation) -> list[Allocation]:
        return exchanges(market, allocation, run.plan.exchanges)

    steps = exchange(teacher.model, texts, layers, chosen, others, begin_of(run))
    best, measured = yield from logged(run, steps)
    run.log("exchanged", predicted=market.divergence(market.steps(best)), measured=measured, changed=best != chosen)
    return best


def gated(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Learn gates, unless this run has done so, and leave softmax the heads that they are open for."""
    if run.gates is None:
        texts, plan = priced_texts(run, teacher, token), run.plan
        window = max(plan.budget or 0, 2 * plan.kept_sinks) - plan.kept_sinks
        steps = learn_gates(teacher.model, texts, teacher.inspection.layers, window, plan.kept_sinks, GATE_STEPS)
        run.write("gates.json", json.dumps((yield from logged(run, steps))))
    return decide(run, run.plan, teacher.inspection.layers)


def allocated(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Decide what every head holds, measuring what the plan's strategy asks for."""
    if run.plan.measured:
        return (yield from bought(run, teacher, token))
    if run.plan.strategy == "duo":
        return (yield from gated(run, teacher, token))
    return decide(run, run.plan, teacher.inspection.layers)


def reallocate(run: Run, plan: Plan) -> Allocation:
    """Decide anew, from what the run has measured; it becomes the run's own if no student was made yet."""
    allocation = decide(run, plan, run.layers)
    if not run.checkpoint.exists():
        with run.locked():
            if allocation != run.allocation:  # another student, which a training of the one before says nothing of
                remove(run.folder / "state" / "training")
            run.write("plan.json", plan.to_json())
            run.write("allocation.json", allocation.to_json())
            run.log("allocated", strategy=allocation.strategy, features_mean=allocation.features_mean)
    return allocation


def shared_texts(plan: Plan, teacher: Teacher, token: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Take texts to train on, and others to judge by: what follows all that was trained on, measured or priced."""
    wanted, least = plan.steps * plan.batch, plan.batch if plan.steps else 0
    texts = windows_of(plan, teacher, max(wanted, plan.texts) + JUDGED, token, least=least + 1)
    judged = min(JUDGED, len(texts) - least)
    return texts[:-judged][:wanted], texts[-judged:]


def samples_of(run: Run) -> Samples:
    """Read the queries and keys that were kept when the run was profiled."""
    with safe_open(run.folder / "state" / "samples.safetensors", "pt") as file:
        return Samples.of_tensors({name: file.get_tensor(name) for name in file.keys()}, len(run.layers))  # noqa: SIM118


def begin_of(run: Run) -> Begin:
    """Give the way to begin the student of one layer."""
    samples, generator = samples_of(run), torch.Generator().manual_seed(run.plan.seed)

    def begin(student: LayerStudent, index: int) -> None:
        if (found := samples.layers[index]) is not None:
            begin_layer(student, found, generator)

    return begin


def begin_features(run: Run, student: LinearizedForCausalLM) -> None:
    """Begin slots and feature maps from the samples of a run's profile: all that training starts from."""
    initialise(student, samples_of(run), run.plan.seed)


def timed_plan(run: Run, teacher: Teacher, student: LinearizedForCausalLM, token: str | None) -> Plan:
    """Turn the minutes that a plan asks for into steps, once: resumed, the run keeps their number."""
    plan = run.plan
    if plan.minutes is None:
        return plan
    if not run.has("state/steps.json"):
        before = {name: value.clone() for name, value in student.state_dict().items() if ".student." in name}
        begin_features(run, student)
        texts = windows_of(plan, teacher, TRIED * plan.batch, token, least=plan.batch)
        seconds = [step_seconds(student, replace(settings, steps=TRIED), texts) for settings in settings_of(plan)]
        student.load_state_dict(before, strict=False)
        steps = max(len(seconds), int(60 * plan.minutes / (sum(seconds) / len(seconds))))
        run.write("state/steps.json", json.dumps(steps))
        run.log("timed", steps=steps, seconds=seconds)
    return replace(plan, steps=json.loads(run.read("state/steps.json")), minutes=None)


def step_seconds(student: LinearizedForCausalLM, settings: Settings, texts: torch.Tensor) -> float:
    """Time the steps after the first; closed before its end, a training leaves the weights of the teacher alone."""
    times = []
    with closing(distill(student, texts, settings)) as steps:
        for _ in range(TRIED - 1):
            next(steps)
            times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


def train(
    run: Run, plan: Plan, student: LinearizedForCausalLM, allocation: Allocation, texts: torch.Tensor
) -> Steps[None]:
    """Begin what the heads hold from the profile's samples, and train it as long as the plan says."""
    begin_features(run, student)
    for number, settings in enumerate(settings_of(plan)):
        if settings.steps and (settings.lora or any(head.features for row in allocation.heads for head in row)):
            yield from train_phase(run, student, settings, texts, number)


def train_phase(
    run: Run, student: LinearizedForCausalLM, settings: Settings, texts: torch.Tensor, number: int
) -> Steps[None]:
    """Train with one loss, from where it was stopped."""
    folder = run.folder / "state" / "training" / str(number)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    ends = [event for event in run.events() if event["event"] == "distilled" and event.get("phase", 0) == number]
    ended = folder.exists() and bool(ends)  # perhaps early

    def enough() -> bool:
        return ended or run.requested("use")

    steps = distill(student, texts, settings, folder=folder, resume=folder.exists(), enough=enough)
    done = yield from logged(run, steps)
    run.log("distilled", phase=number, **asdict(done))
    run.settle("use")


def judge(
    run: Run, student: LinearizedForCausalLM, allocation: Allocation, texts: torch.Tensor, token: str | None
) -> Steps[tuple[Evaluation, ...]]:
    """Put teacher, student, and a window that takes the student's bytes, through the same text."""
    layers = run.layers
    length = texts.shape[1]
    state = allocation.state_bytes(layers, length)
    control = window_control(allocation, layers, length)
    passage = max(2, length // 20)
    gaps = [gap for gap in (length // 16, length // 4, length * 5 // 8) if 2 * passage + gap <= length]

    reference = student
    if run.plan.lora:  # adapters changed the student's weights: the teacher and its window have their own
        reference = checkpoint.linearize(load(run.pinned_plan, token).model, layers, control)

    def look(name: str, size: int | None, model: LinearizedForCausalLM, as_teacher: bool = False) -> Steps[Evaluation]:
        language = yield from evaluate_language(model, texts, as_teacher, reference)
        recall = yield from evaluate_recall(model, texts, gaps, passage, as_teacher)
        return Evaluation(name, size, language, recall)

    teacher = yield from look("teacher", None, reference, as_teacher=True)
    found = [teacher, (yield from look("student", state, student))]
    with holding(reference, layers, control):
        found.append((yield from look("window", control.state_bytes(layers, length), reference)))
    run.keep_found(rows=[asdict(evaluation) for evaluation in found], parts={})
    run.log("evaluated", **{evaluation.name: evaluation.language.loss for evaluation in found})
    return tuple(found)


def measure_only(run: Run, token: str | None = None, held: bool = False) -> Steps[Profile]:
    """Take a run as far as its profile."""
    with working(run, held):
        with interruptible(run):
            teacher = load(run.pinned_plan, token, run.folder)
        found = yield from profile(run, teacher, token)
        run.log("stopped")
    return found


def linearize(run: Run, token: str | None = None, held: bool = False) -> Steps[Allocation]:
    """Do what the plan of a run asks for, from where it stands; `held` says that the caller holds its lock.

    It works at once, beside others: `jobs.start` and the command line wait for their turn at the device.
    """
    if not run.done:
        with working(run, held):
            if not run.checkpoint.is_dir():  # otherwise it was killed when all but the last was done
                yield from make(run, token)
            add_card(run)
            run.log("done")
    assert run.allocation is not None
    return run.allocation


def make(run: Run, token: str | None) -> Steps[None]:
    """Do the steps that are left until a run's checkpoint is there."""
    with interruptible(run):
        teacher = load(run.pinned_plan, token, run.folder)
    layers = teacher.inspection.layers
    yield from profile(run, teacher, token)
    allocation = run.allocation or (yield from allocated(run, teacher, token))
    run.write("allocation.json", allocation.to_json())
    run.log("allocated", strategy=allocation.strategy, features_mean=allocation.features_mean)
    name = teacher.source.repo_id or Path(teacher.source.name).name  # where a folder lies is nobody's business
    origin = {"name": name, "revision": teacher.source.revision}
    student = checkpoint.linearize(teacher.model, layers, allocation, run.plan.feature_map, run.plan.seed, origin)
    with interruptible(run):
        plan = timed_plan(run, teacher, student, token)
        learnt, judged = shared_texts(plan, teacher, token)
    yield from train(run, plan, student, allocation, learnt)
    yield from logged(run, judge(run, student, allocation, judged, token))
    made_with = {"text": run.plan.text, "learnt": len(learnt), "judged": len(judged), "seed": run.plan.seed}
    run.keep_found(made_with={**made_with, **environment(student)})
    check(run)
    checkpoint.save(student, teacher.tokenizer, run.checkpoint)


def compare_run(
    run: Run, prompt: str, new_tokens: int, seed: int, sample: bool, token: str | None = None
) -> Steps[Comparison]:
    """Let the teacher and the student of a run continue a prompt."""
    if not run.checkpoint.is_dir():
        raise RequestError(f"{str(run.folder)!r} has no student yet: `linearizer run --resume` makes it")
    with quiet():
        teacher = load(run.pinned_plan, token)
        student = checkpoint.load(run.checkpoint, dtype=teacher.model.dtype).to(teacher.model.device)
        return (yield from compare(teacher.model, student, teacher.tokenizer, prompt, new_tokens, seed, sample))


def summary(allocation: Allocation, layers: tuple[Layer, ...]) -> dict[str, object]:
    """An allocation with what it costs, as plain numbers."""
    breakeven = allocation.breakeven_tokens(layers)
    return {
        **json.loads(allocation.to_json()),
        "features_mean": allocation.features_mean,
        "state_bytes": allocation.state_bytes(layers, breakeven or 0),
        "breakeven_tokens": breakeven,
    }
