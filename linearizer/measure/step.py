"""."""

from __future__ import annotations

from safetensors.torch import save_file

from linearizer.measure.profile import asked_of, measure
from linearizer.model.logits import check_logits
from linearizer.model.teacher import Teacher, windows_of
from linearizer.progress import Steps
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.profile import Profile
from linearizer.run.stopping import interruptible, logged


def profile(run: Run, teacher: Teacher, token: str | None = None) -> Steps[Profile]:
    """Measure the teacher, unless this run has measured it."""
    if found := run.profile:
        return found
    run.write("inspection.json", teacher.inspection.to_json())
    with interruptible(run):
        windows = windows_of(run.plan, teacher, texts_needed(run.plan), token)[: run.plan.texts]
        check_logits(teacher.model, windows)
    steps = measure(teacher.model, windows, teacher.inspection.layers, asked_of(run.plan))
    measured = yield from logged(run, steps)
    with writing(run.folder / "state"):
        save_file(measured.samples.tensors(), run.folder / "state" / "samples.safetensors")
    run.write("profile.json", measured.profile.to_json())
    run.log("profiled", tokens=measured.profile.tokens)
    return measured.profile


def texts_needed(plan: Plan) -> int:
    """Count the texts that a run cannot do without: to measure or for one batch, and one more to judge by."""
    return max(plan.texts_measured, plan.batch if plan.trains else 0) + 1
