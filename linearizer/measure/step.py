"""Measures the teacher of a run: its profile, and the samples that students are initialised from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from linearizer.measure.profile import measure_profile, profile_settings
from linearizer.model.kept_texts import texts_of_run
from linearizer.model.logits import check_logits
from linearizer.model.safetensors import write_tensors
from linearizer.model.samples import SAMPLES
from linearizer.model.teacher import Teacher
from linearizer.progress import Steps
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.profile import Profile
from linearizer.run.stopping import interruptible, log_progress

FEW_TEXTS, MIN_LENGTH = 2, 32  # that defaults shrink to where a text is short


def measure_teacher(run: Run, teacher: Teacher, token: str | None = None) -> Steps[Profile]:
    """Measure the teacher, unless the run has its profile already."""
    if profile := run.profile:
        return profile
    with interruptible(run):
        texts = texts_of_run(run, teacher, min_texts(run.plan), token)[: run.plan.kept_texts]
        check_logits(teacher.model, texts)
    settings, keep_text = profile_settings(run.plan), bool(run.plan.offered_memories)
    steps = measure_profile(teacher.model, texts, teacher.inspection.layers, settings, keep_text=keep_text)
    measured = yield from log_progress(run, steps)
    write_tensors(run.folder / SAMPLES, measured.samples.tensors())
    run.write_product("profile.json", measured.profile.to_json())
    run.log(EventName.PROFILED, tokens=measured.profile.tokens)
    return measured.profile


def fit_to_text(plan: Plan, tokens: int, positions: int | None, yielding: Collection[str]) -> Plan:
    """Shrink the options that yield, first the number of texts and then their length, to a text of so many tokens."""

    def enough(plan: Plan) -> bool:
        return min_texts(plan) * plan.kept_length(positions) <= tokens

    fitted = plan
    while "texts" in yielding and not enough(fitted) and fitted.kept_texts > FEW_TEXTS:
        fitted = replace(fitted, texts=fitted.kept_texts - 1)
    if "length" in yielding and not enough(fitted):
        fitted = replace(fitted, length=max(MIN_LENGTH, tokens // min_texts(fitted) // 8 * 8))
    return fitted


def min_texts(plan: Plan) -> int:
    """Count the texts that a run needs at least: those to measure or of one batch, and one more to judge by."""
    return max(plan.texts_measured, plan.batch if plan.trains else 0) + 1
