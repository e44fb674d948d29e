"""Measures the teacher of a run: its profile, and the samples that students are initialised from."""

from __future__ import annotations

from linearizer.measure.profile import measure_profile, profile_settings
from linearizer.model.logits import check_logits
from linearizer.model.safetensors import write_tensors
from linearizer.model.samples import SAMPLES
from linearizer.model.teacher import Teacher, texts_of
from linearizer.progress import Steps
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.profile import Profile
from linearizer.run.stopping import interruptible, log_progress


def measure_teacher(run: Run, teacher: Teacher, token: str | None = None) -> Steps[Profile]:
    """Measure the teacher, unless the run has its profile already."""
    if profile := run.profile:
        return profile
    with interruptible(run):
        texts = texts_of(run.plan, teacher, min_texts(run.plan), token)[: run.plan.texts]
        check_logits(teacher.model, texts)
    steps = measure_profile(teacher.model, texts, teacher.inspection.layers, profile_settings(run.plan))
    measured = yield from log_progress(run, steps)
    write_tensors(run.folder / SAMPLES, measured.samples.tensors())
    run.write_product("profile.json", measured.profile.to_json())
    run.log(EventName.PROFILED, tokens=measured.profile.tokens)
    return measured.profile


def min_texts(plan: Plan) -> int:
    """Count the texts that a run needs at least: those to measure or of one batch, and one more to judge by."""
    return max(plan.texts_measured, plan.batch if plan.trains else 0) + 1
