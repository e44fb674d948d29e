"""The order of the steps, written once: model -> profile -> allocation -> student -> training -> checkpoint.

Each step's product is stored in the run's folder, and a step whose product is there is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from linearizer.allocate.decide import check_dials, decide
from linearizer.allocate.step import allocate
from linearizer.errors import LinearizerError, RequestError
from linearizer.evaluate.environment import environment
from linearizer.evaluate.setup import Setup, assembled
from linearizer.evaluate.side_by_side import Comparison, compare
from linearizer.evaluate.step import JUDGING, judge, measure_parts
from linearizer.measure.head_prices import choose_pricing
from linearizer.measure.profile import profile_settings
from linearizer.measure.step import measure_teacher, min_texts
from linearizer.model import checkpoint
from linearizer.model.hub import Source, cache_folder, download_bytes, find_model
from linearizer.model.inspect import inspect_model
from linearizer.model.quiet import quiet
from linearizer.model.teacher import Teacher, load, load_config, texts_of
from linearizer.progress import Steps
from linearizer.publish.card import add_card
from linearizer.run.allocation import Allocation
from linearizer.run.disk import checkpoint_bytes, resume_bytes
from linearizer.run.evaluation_request import Request
from linearizer.run.files import check_room, remove
from linearizer.run.folder import Run, newest_request
from linearizer.run.head_bytes import Layer
from linearizer.run.inspection import Inspection
from linearizer.run.plan import Plan, with_absolute_paths
from linearizer.run.profile import Profile
from linearizer.run.results import Part
from linearizer.run.stopping import check, interruptible, reported
from linearizer.train.lora import check_peft
from linearizer.train.settings import training_settings
from linearizer.train.step import plan_with_steps, train


def inspect(model: str, token: str | None = None) -> Inspection:
    """Say what a model is and whether it can be linearized; no weight is downloaded."""
    source = find_model(model, token)
    return inspect_model(source, load_config(source, token))


def begin(
    folder: Path,
    plan: Plan,
    token: str | None = None,
    resume: bool = False,
    check_limits: Callable[[Plan, Inspection], None] = lambda plan, inspection: None,
) -> Run:
    """Begin a run, or open the run to resume; whatever can be refused before the work is refused here, and only here.

    plan.json holds what is decided here: the revision of the model, and whether prices are measured or estimated.
    """
    plan = with_absolute_paths(plan)
    if Run.is_begun(folder, resume):
        (run := Run(folder)).check_same(plan)
        return run
    source = find_model(plan.model, token)
    inspection = inspect_model(source, load_config(source, token))
    inspection.require_support()
    check_plan(plan, inspection.layers)
    check_limits(plan, inspection)
    model = f"{source.repo_id}@{source.revision}" if source.repo_id else plan.model
    run = Run(folder)
    try:
        run = Run.create(
            folder, replace(plan, model=model, prices=choose_pricing(plan, inspection)), inspection, asked=plan
        )
        check_disks(folder, plan, source, inspection)
    except LinearizerError:
        run.remove_unstarted()
        raise
    return run


def check_plan(plan: Plan, layers: tuple[Layer, ...]) -> None:
    """Refuse a plan that no work can serve."""
    check_dials(plan, layers)
    profile_settings(plan)
    settings = training_settings(plan)
    if plan.trains:
        check_peft(max(each.lora for each in settings))


def check_disks(folder: Path, plan: Plan, source: Source, inspection: Inspection) -> None:
    """Refuse a run that its own disk, or the disk of the models, has no room for."""
    needed = resume_bytes(plan, inspection) + checkpoint_bytes(plan, inspection)
    download, cache = download_bytes(source), cache_folder()
    cache = next(path for path in (cache, *cache.absolute().parents) if path.is_dir())
    if cache.stat().st_dev == folder.stat().st_dev:
        check_room(folder, needed + download)
    else:
        check_room(folder, needed)
        check_room(cache, download)


def reallocate(run: Run, plan: Plan) -> Allocation:
    """Decide anew, from what the run has measured; it becomes the run's own if no student was made yet."""
    allocation = decide(run, plan, run.layers)
    if not run.checkpoint.exists():
        with run.take_lock():
            changed = allocation != run.allocation
            told = {"strategy": allocation.strategy, "features_mean": allocation.features_mean, "changed": changed}
            run.log("allocated", **told)  # first: a kill after it can cost a training, and cannot cut one short
            if changed:  # another student, which a training of the one before says nothing of, and its time neither
                remove(run.folder / "state" / "training")
                remove(run.folder / "state" / "steps.json")
            run.write("plan.json", plan.to_json())
            run.write("allocation.json", allocation.to_json())
    return allocation


def shared_texts(plan: Plan, teacher: Teacher, token: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Take texts to train on, and others to judge by: what follows all that was trained on, measured or priced."""
    wanted, least = plan.steps * plan.batch, min_texts(plan)
    texts = texts_of(plan, teacher, max(wanted, plan.texts_measured) + JUDGING.texts, token, least=least)
    judged = min(JUDGING.texts, len(texts) - least + 1)
    return texts[:-judged][:wanted], texts[-judged:]


def measure_only(run: Run, token: str | None = None, held: bool = False) -> Steps[Profile]:
    """Take a run as far as its profile."""
    with working(run, held):
        with interruptible(run):
            teacher = load(run.plan, token, run.inspection)
        found = yield from measure_teacher(run, teacher, token)
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
        teacher = load(run.plan, token, run.inspection)
    layers = teacher.inspection.layers
    yield from measure_teacher(run, teacher, token)
    allocation = run.allocation or (yield from allocate(run, teacher, token))
    run.write("allocation.json", allocation.to_json())
    run.log("allocated", strategy=allocation.strategy, features_mean=allocation.features_mean)
    name = teacher.source.repo_id or Path(teacher.source.name).name  # where a folder lies is nobody's business
    origin = {"name": name, "revision": teacher.source.revision}
    student = checkpoint.linearize(teacher.model, layers, allocation, run.plan.feature_map, run.plan.seed, origin)
    with interruptible(run):
        plan = plan_with_steps(run, teacher, student, token)
        learnt, judged = shared_texts(plan, teacher, token)
    yield from train(run, plan, student, allocation, learnt)
    made_with = {"text": run.plan.text, "learnt": len(learnt), "judged": len(judged), "seed": run.plan.seed}
    run.write_evaluation(made_with={**made_with, **environment(student)})
    control = student
    if plan.lora:  # adapters changed the student's weights: the teacher and its window have their own
        control = checkpoint.linearize(load(run.plan, token, run.inspection).model, layers, allocation)
    yield from judge(run, Setup(run, student, control, teacher.tokenizer, control.base, None, judged))
    check(run)
    checkpoint.save(student, teacher.tokenizer, run.checkpoint)


def compare_run(
    run: Run, prompt: str, new_tokens: int, seed: int, sample: bool, token: str | None = None
) -> Steps[Comparison]:
    """Let the teacher and the student of a run continue a prompt."""
    if not run.checkpoint.is_dir():
        raise RequestError(f"{str(run.folder)!r} has no student yet: `linearizer run --resume` makes it")
    with quiet():
        teacher = load(run.plan, token, run.inspection)
        student = checkpoint.load(run.checkpoint, dtype=teacher.model.dtype).to(teacher.model.device)
        return (yield from compare(teacher.model, student, teacher.tokenizer, prompt, new_tokens, seed, sample))


@contextmanager
def working(run: Run, held: bool = False) -> Iterator[None]:
    """Hold a run while it is worked on, unless it is held already, and log how that began and ended."""
    from linearizer.model.quiet import quiet

    with nullcontext() if held else run.take_lock(), quiet(), reported(run):
        run.log("started")
        yield
        run.clear_request("stop")


def resume_evaluation(run: Run, token: str | None = None) -> Steps[dict[str, Part]]:
    """Go on with what was last asked for, as the log says; the caller holds the run."""
    with reported(run.evaluating):
        asked, again, done = newest_request(run)
        request = Request.of(asked)
    anew = tuple(part for part in request.chosen if again and part not in done)
    return (yield from evaluate(run, request, anew, token, held=True))


def evaluate(
    run: Run, request: Request, anew: tuple[str, ...] = (), token: str | None = None, held: bool = False
) -> Steps[dict[str, Part]]:
    """Evaluate a finished run; `anew` names parts that are measured although they are there as they were asked."""
    run = run.evaluating
    with working(run, held), assembled(run, token) as setup:
        parts = yield from measure_parts(run, setup, request, anew)
        add_card(run)
        run.log("done")
    return parts
