"""Resumes and deletes a run wherever it works: in a process of this machine, or in jobs of the Hub."""

from __future__ import annotations

from collections.abc import Callable

from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE as HUB_JOB
from linearizer.run.hub_job import read_hub_job
from linearizer.workers import control


def resume_run(
    run: Run,
    token: str | None = None,
    *,
    yes: bool = False,
    agree: str = "add --yes",
    begin: Callable[..., None] = control.start,
) -> None:
    """Resume a run; if it is done, resume the evaluation of its student.

    `yes` agrees to the maximum cost of another job; the error of a run that needs one says how to `agree`.
    """
    if run.done and (evaluation := control.status(run).evaluation) is not None and evaluation.state != "done":
        control.evaluate(run, token=token, begin=begin)
    elif run.done or read_hub_job(run) is None:
        begin(run, token)
    else:
        from linearizer.workers.hub_jobs import resume_in_job

        resume_in_job(run, token, yes=yes, agree=agree)


def delete_run(run: Run, token: str | None = None) -> None:
    """Delete a run that is not running, and the files of its jobs on the Hub unless its own are too damaged."""
    if run.has_file(HUB_JOB) and not run.is_locked:
        from linearizer.workers.hub_jobs import forget_in_bucket

        forget_in_bucket(run, token)
    control.delete(run)
