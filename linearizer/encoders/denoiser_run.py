"""The run of a denoiser: decide -> draw pictures with the teacher -> attend linearly -> distil -> save -> judge.

Its folder is like that of an encoder's run. Teacher and student get the same latents, noise, prompts and times: those
that the pipeline passes to its denoiser while drawing.
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
from linearizer.evaluate.language import Units
from linearizer.plan.encoder_plan import LATENTS, EncoderInspection, EncoderPlan
from linearizer.progress import Progress, Steps
from linearizer.run.files import replacing
from linearizer.run.results import Request
from linearizer.run.stopping import log_progress
from linearizer.teacher.devices import choose_device
from linearizer.teacher.text import read_for_length

TIMES = 4  # calls of the teacher for a picture
PROMPT = 200  # characters
Scores = dict[str, torch.Tensor]


def decide(plan: EncoderPlan, token: str | None = None) -> tuple[EncoderPlan, EncoderInspection]:
    """Inspect the model of a plan, and make its path absolute."""
    if plan.length is not None or plan.pictures is not None:
        raise RequestError("--length and --pictures are not for pipelines: they draw pictures of their usual size")
    plan = replace(plan, model=str(Pipeline.find(plan.model).folder.absolute()))
    return plan, inspect(plan.model)


@dataclass(frozen=True)
class Watch:
    """Records the shapes of the queries of each layer; it attends to nothing."""

    shapes: list[torch.Size] = field(default_factory=list)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any) -> torch.Tensor:
        self.shapes.append(query.shape)
        return value


def inspect(model: str, token: str | None = None) -> EncoderInspection:
    """Describe a denoiser from one of its steps; operations are counted without self-attention."""
    pipeline = Pipeline.find(model)
    denoiser = pipeline.load_denoiser()
    diffuser = pipeline.load_with(denoiser)
    check_scheduler(model, diffuser.scheduler)
    try:
        watch, (call, *_) = Watch(), draw_calls(diffuser, denoiser, "", 0, 1)
    except Exception as error:  # pipelines of diffusers raise errors of many types
        raise UnsupportedModel(
            f"{model!r} cannot be linearized, because it draws no picture of a prompt or a class alone "
            f"({first_line(error)}): name a pipeline that does"
        ) from error
    with torch.no_grad():
        denoiser.attend_with(watch)
        with FlopCounterMode(display=False) as counter:
            call.ask(denoiser)
    if not watch.shapes:
        raise UnsupportedModel(f"{model!r} cannot be linearized, because no layer of it reads the whole picture")
    tokens = max(shape[2] for shape in watch.shapes)
    rows, heads, _, dim = next(shape for shape in watch.shapes if shape[2] == tokens)
    return EncoderInspection(
        name=model,
        architecture=pipeline.kind,
        model_type=pipeline.part,
        auto_class="DiffusionPipeline",
        reads=LATENTS,
        layers=sum(shape[2] == tokens for shape in watch.shapes),
        heads=heads,
        head_dim=dim,
        tokens=tokens,
        parameters=sum(x.numel() for x in denoiser.parameters()),
        layer_parameters=counter.get_total_flops() // (2 * rows * tokens),
    )


def make_and_judge(encoder: EncoderRun, token: str | None = None) -> Steps[None]:
    """Make the student of a run and its control, a window, and judge them; continue after the last product."""
    plan, pipeline, device = encoder.plan, Pipeline.find(encoder.plan.model), choose_device(encoder.plan.device)
    teacher = pipeline.load_denoiser()
    diffuser = pipeline.load_with(teacher).to(device)
    judged, learnt = yield from log_progress(encoder.run, draw_shares(plan, diffuser, teacher, token))
    groups = [learnt[begin : begin + plan.batch] for begin in range(0, len(learnt), plan.batch)]

    def load(folder: Path) -> Any:
        return replace(pipeline, folder=folder).load_denoiser().to(device)

    def make_student(way: Any) -> Any:
        student = load(pipeline.folder)
        student.attend_with(way)
        return student

    def loss_on(group: Sequence[Call], initial: Any) -> torch.Tensor:
        return torch.stack([call.kl(call.ask(student), diffuser.scheduler) for call in group]).mean()

    for folder, (layer, *_) in missing_students(encoder):
        student = make_student(way := layer.ways[0])
        if plan.steps:
            yield from log_progress(encoder.run, train_layers(student, groups, loss_on))
        with replacing(folder) as unfinished:
            pipeline.write_denoiser(unfinished, student, way)
            if folder == encoder.run.checkpoint:
                pipeline.write_others(unfinished)
    if not encoder.judgements:
        over = Units(torch.arange(plan.texts)[:, None])
        scored = partial(score, judged=judged, scheduler=diffuser.scheduler)
        rows = yield from log_progress(encoder.run, compare(encoder, over, load, make_student, scored))
        keep_judgement(encoder, Judgement(plan.text, encoder.tokens, plan.texts, "pictures", over.count, rows))


def evaluate(encoder: EncoderRun, request: Request, again: bool, token: str | None = None) -> Steps[Judgement]:
    """Refuse to judge a denoiser again: it is judged by the calls for the pictures of its run."""
    raise RequestError("a denoiser is judged by its run alone: begin another run to judge it on other prompts")


def draw_shares(
    plan: EncoderPlan, diffuser: Any, teacher: Any, token: str | None
) -> Steps[tuple[list[list[Call]], list[Call]]]:
    """Draw pictures for two sets of prompts: return the calls of each to judge on, and the calls to learn from."""
    count = plan.texts + -(-plan.learnt // TIMES)
    documents = islice(read_for_length(plan.text, 1, token=token), count)
    prompts = [document.strip()[:PROMPT].partition("\n")[0] for document in documents]
    judged, to_learn = prompts[: plan.texts], prompts[plan.texts :]
    if len(judged) < plan.texts or (plan.steps and not to_learn):
        needed = plan.texts + plan.least
        raise TextError(f"{plan.text!r} has {len(prompts)} prompts, and {needed} are needed: ask for fewer --texts")
    pictures = list[list[Call]]()
    for number, prompt in enumerate(islice(chain(judged, cycle(to_learn)), count)):
        pictures.append(draw_calls(diffuser, teacher, prompt, plan.seed + number, TIMES))
        yield Progress("profile", number + 1, count, "pictures")
    learnt = [call for picture in pictures[plan.texts :] for call in picture]
    return pictures[: plan.texts], learnt[: plan.learnt]


def score(student: Any, judged: list[list[Call]], scheduler: Any) -> Scores:
    """Score the noise that a student finds in each picture, by the fields of Quality: (pictures, 1) each."""
    scores: dict[str, list[float]] = {}
    with torch.no_grad():
        for picture in judged:
            pairs = [(call, call.ask(student)) for call in picture]
            measures = {
                "kl": [call.kl(noise, scheduler) for call, noise in pairs],
                "agreement": [(noise.sign() == call.noise.sign()).double().mean() for call, noise in pairs],
                "hidden": [cosine_similarity(noise, call.noise, dim=1).mean() for call, noise in pairs],
            }
            for name, numbers in measures.items():
                scores.setdefault(name, []).append(float(torch.stack(numbers).mean()))
    return {name: torch.tensor(numbers, dtype=torch.float64)[:, None] for name, numbers in scores.items()}
