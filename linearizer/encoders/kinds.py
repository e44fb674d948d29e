"""The two kinds of runs in this room, the differences between them, and the kind of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from linearizer.encoders import denoiser_run, encoder_run
from linearizer.encoders.denoiser import Pipeline
from linearizer.encoders.encoder_folder import EncoderRun, check_budget
from linearizer.encoders.encoder_quality import Judgement
from linearizer.encoders.inspect_encoder import reads_both_ways
from linearizer.hub.models import find_model
from linearizer.plan.encoder_plan import LATENTS, EncoderInspection, EncoderPlan
from linearizer.progress import Steps
from linearizer.run.folder import Run
from linearizer.run.results import Request
from linearizer.teacher.load import load_config


@dataclass(frozen=True)
class Kind:
    """The steps of a run, and the words of its report."""

    inspect: Callable[[str, str | None], EncoderInspection]  # by a model and a token
    decide: Callable[[EncoderPlan, str | None], tuple[EncoderPlan, EncoderInspection]]
    make_and_judge: Callable[[EncoderRun, str | None], Steps[None]]
    evaluate: Callable[[EncoderRun, Request, bool, str | None], Steps[Judgement]]
    title: str  # of a model
    library: str  # that loads a student
    kl_of: str
    agrees: str  # the result on which student and teacher should agree

    def begin(self, folder: Path, plan: EncoderPlan, token: str | None = None, resume: bool = False) -> EncoderRun:
        """Begin a run, or open the run to resume; refuse here whatever can be refused before the work."""
        if Run.is_begun(folder, resume):
            (run := Run(folder)).check_same(plan)
        else:
            decided, inspection = self.decide(plan, token)
            check_budget(decided, inspection)
            run = Run.create(folder, decided, inspection, plan)
        return EncoderRun(run)


ENCODER = Kind(
    encoder_run.inspect,
    encoder_run.decide,
    encoder_run.make_and_judge,
    encoder_run.evaluate,
    "an encoder of {reads}",
    "transformers",
    "of the classes, or, where there are none, of which other text or picture is alike",
    "the same nearest neighbour",
)
DENOISER = Kind(
    denoiser_run.inspect,
    denoiser_run.decide,
    denoiser_run.make_and_judge,
    denoiser_run.evaluate,
    "a denoiser",
    "diffusers",
    "|ε - ε'|² / 2σ² of a step of DDPM, summed over the latents, a mean over the times of a picture",
    "the same sign of the noise",
)


def find_kind(model: str, token: str | None = None) -> Kind | None:
    """Return the kind of run for a model; None if it is causal."""
    if Pipeline.is_at(model):
        return DENOISER
    source = find_model(model, token)
    return ENCODER if source.head is None and reads_both_ways(load_config(source, token)) else None


def kind_of(inspection: EncoderInspection) -> Kind:
    return DENOISER if inspection.reads == LATENTS else ENCODER
