"""The run of a denoiser: decide -> draw pictures with the teacher -> attend linearly -> distil -> save -> judge.

Its folder is that of an encoder's run. Teacher and student get the same latents, noise, prompts and times: those that a
pipeline asks its denoiser while it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from torch.utils.flop_counter import FlopCounterMode

from linearizer.encoders.denoiser import Call, Pipeline, check_scheduler, draw_calls
from linearizer.encoders.distill_encoder import train_layers
from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_quality import Judgement
from linearizer.encoders.encoder_run import compare, keep_judgement, missing_students
from linearizer.errors import RequestError, TextError, UnsupportedModel, first_line
from linearizer.evaluate.language import Resampled
from linearizer.plan.encoder_inspection import LATENTS, EncoderInspection
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.progress import Progress, Steps
from linearizer.run.files import replacing
from linearizer.run.results import Request
from linearizer.run.stopping import log_progress
from linearizer.teacher.devices import choose_device
from linearizer.teacher.text import read_for_length

TIMES = 4  # at which the teacher is asked for a picture
PROMPT = 200  # characters
Scores = dict[str, torch.Tensor]


def decide(plan: EncoderPlan, token: str | None = None) -> tuple[EncoderPlan, EncoderInspection]:
    """Inspect the model of a plan, whose folder is found from any other."""
    if plan.length is not None or plan.pictures is not None:
        raise RequestError("--length and --pictures are not for pipelines: they draw pictures of their usual size")
    plan = replace(plan, model=str(Pipeline.find(plan.model).folder.absolute()))
    return plan, inspect(plan.model)


@dataclass(frozen=True)
class Watch:
    """Notes the queries of each layer; it attends to nothing."""

    seen: list[torch.Size] = field(default_factory=list)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
        self.seen.append(query.shape)
        return value


def inspect(model: str, token: str | None = None) -> EncoderInspection:
    """Describe a denoiser by a step of it; its operations are counted without those of its self-attention."""
    pipeline = Pipeline.find(model)
    denoiser = pipeline.load_denoiser()
    whole = pipeline.load_with(denoiser)
    check_scheduler(model, whole.scheduler)
    try:
        watch, (call, *_) = Watch(), draw_calls(whole, denoiser, "", 0, 1)
    except Exception as error:  # of code of diffusers, in the way of each pipeline
        raise UnsupportedModel(
            f"{model!r} cannot be linearized, because it draws no picture of a prompt or a class alone "
            f"({first_line(error)}): name a pipeline that does"
        ) from error
    with torch.no_grad():
        denoiser.attend_with(watch)
        with FlopCounterMode(display=False) as counter:
            call.ask(denoiser)
    if not watch.seen:
        raise UnsupportedModel(f"{model!r} cannot be linearized, because no layer of it reads the whole picture")
    most = max(shape[2] for shape in watch.seen)
    rows, heads, tokens, dim = next(shape for shape in watch.seen if shape[2] == most)
    return EncoderInspection(
        name=model,
        architecture=pipeline.kind,
        model_type=pipeline.part,
        auto_class="DiffusionPipeline",
        reads=LATENTS,
        layers=sum(shape[2] == most for shape in watch.seen),
        heads=heads,
        head_dim=dim,
        tokens=tokens,
        parameters=sum(x.numel() for x in denoiser.parameters()),
        layer_parameters=counter.get_total_flops() // (2 * rows * tokens),
    )


def make_and_judge(encoder: EncoderRun, token: str | None = None) -> Steps[None]:
    """Make the student of a run and the window beside it, and judge them, from where the run stands."""
    plan, pipeline, device = encoder.plan, Pipeline.find(encoder.plan.model), choose_device(encoder.plan.device)
    teacher = pipeline.load_denoiser()
    whole = pipeline.load_with(teacher).to(device)
    judged, learnt = yield from log_progress(encoder.run, draw_shares(plan, whole, teacher, token))
    groups = [learnt[begin : begin + plan.batch] for begin in range(0, len(learnt), plan.batch)]

    def load(folder: Path) -> Any:
        return replace(pipeline, folder=folder).load_denoiser().to(device)

    def make_student(how: Any) -> Any:
        student = load(pipeline.folder)
        student.attend_with(how)
        return student

    def loss_on(group: Sequence[Call], kept: Any) -> torch.Tensor:
        return torch.stack([call.kl(call.ask(student), whole.scheduler) for call in group]).mean()

    for folder, (layer, *_) in missing_students(encoder):
        student = make_student(how := layer.ways[0])
        if plan.steps:
            yield from log_progress(encoder.run, train_layers(student, groups, loss_on))
        with replacing(folder) as unfinished:
            pipeline.write_denoiser(unfinished, student, how)
            if folder == encoder.run.checkpoint:
                pipeline.write_others(unfinished)
    if not encoder.judgements:
        over = Resampled(torch.arange(plan.texts)[:, None], plan.seed)
        scored = partial(score, judged=judged, scheduler=whole.scheduler)
        rows = yield from log_progress(encoder.run, compare(encoder, over, load, make_student, scored))
        keep_judgement(encoder, Judgement(plan.text, encoder.tokens, plan.texts, "pictures", over.count, rows))


def evaluate(encoder: EncoderRun, request: Request, again: bool, token: str | None = None) -> Steps[Judgement]:
    """Refuse to judge a denoiser again: teacher and student are asked what the pictures of its run asked."""
    raise RequestError("a denoiser is judged by its run alone: begin another run to judge it on other prompts")


def draw_shares(
    plan: EncoderPlan, whole: Any, teacher: Any, token: str | None
) -> Steps[tuple[list[list[Call]], list[Call]]]:
    """Draw pictures to judge on, each with its calls, and others to learn from, of other prompts."""
    count = plan.texts + -(-plan.learnt // TIMES)
    documents = islice(read_for_length(plan.text, 1, token=token), count)
    prompts = [document.strip()[:PROMPT].partition("\n")[0] for document in documents]
    judged, others = prompts[: plan.texts], prompts[plan.texts :]
    if len(judged) < plan.texts or (plan.steps and not others):
        needed = plan.texts + plan.least
        raise TextError(f"{plan.text!r} has {len(prompts)} prompts, and {needed} are needed: ask for fewer --texts")
    pictures = list[list[Call]]()
    for number, prompt in enumerate(islice(chain(judged, cycle(others)), count)):
        pictures.append(draw_calls(whole, teacher, prompt, plan.seed + number, TIMES))
        yield Progress("profile", number + 1, count, "pictures")
    learnt = [call for picture in pictures[plan.texts :] for call in picture]
    return pictures[: plan.texts], learnt[: plan.learnt]


def score(student: Any, judged: list[list[Call]], scheduler: Any) -> Scores:
    """Score the noise that a student finds in each picture, by the names in Quality: (pictures, 1) each."""
    scores: dict[str, list[float]] = {}
    with torch.no_grad():
        for picture in judged:
            found = [(call, call.ask(student)) for call in picture]
            each = {
                "kl": [call.kl(noise, scheduler) for call, noise in found],
                "agreement": [(noise.sign() == call.noise.sign()).double().mean() for call, noise in found],
                "hidden": [cosine_similarity(noise, call.noise, dim=1).mean() for call, noise in found],
            }
            for name, numbers in each.items():
                scores.setdefault(name, []).append(float(torch.stack(numbers).mean()))
    return {name: torch.tensor(numbers, dtype=torch.float64)[:, None] for name, numbers in scores.items()}
