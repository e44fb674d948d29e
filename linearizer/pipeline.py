"""The table of contents: begin -> profile -> allocate -> make the student -> train -> judge -> save.

Each step stores its product in the folder of the run, and a step with a stored product is not repeated. Afterwards a
student is evaluated, and compared with its teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from linearizer import checks
from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.kinds import kind_of
from linearizer.encoders.layer_times import keep_times
from linearizer.errors import LinearizerError, ModelNotAvailable, RankEnded
from linearizer.evaluate.evaluate_run import JUDGING, judge, judge_share, measure_parts
from linearizer.evaluate.side_by_side import Reader, write_in_turns
from linearizer.evaluate.subjects import Setup, assembled, environment
from linearizer.hub.models import find_model, local_weight_files
from linearizer.method import checkpoint
from linearizer.method.allocate_run import allocate, price_share, try_share
from linearizer.method.choose import compare_share
from linearizer.method.decide import decide
from linearizer.method.initialise import initialise
from linearizer.method.measure_run import measure_teacher, profile_share
from linearizer.method.recorder import samples_of
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import ADJUSTABLE, Plan
from linearizer.progress import Progress, Steps, finish, quiet
from linearizer.publish.card import card_of
from linearizer.run.events import EventName
from linearizer.run.files import remove
from linearizer.run.folder import Run, newest_request
from linearizer.run.measured import CANDIDATES
from linearizer.run.results import Comparison, Request
from linearizer.run.stopping import YIELD_SECONDS, check_stop, interruptible, log_end
from linearizer.run.weight_digests import DIGESTS, write_digests
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.load import Teacher, load_config, load_teacher_of
from linearizer.teacher.picture_prompts import make_prompt
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.teacher.streaming import spreads, streams
from linearizer.train.distill import train, train_share


def inspect(model: str, token: str | None = None, text_only: bool = False) -> Inspection:
    """Inspect a model, and whether it can be linearized, without downloading weights; `text_only`: without pictures."""
    source = find_model(model, token)
    return inspect_model(source, load_config(source, token, text_only))


def begin(
    folder: str | Path,
    plan: Plan,
    token: str | None = None,
    resume: bool = False,
    check_limits: Callable[[Plan, Inspection], None] = lambda plan, inspection: None,
    adjustable: Collection[str] = (),
    here: bool = True,
) -> Run:
    """Begin a run, or open the run to resume. All refusals before the work happen here, and only here.

    This decides the revision of the model, the type to compute in, and the numbers of texts and of their tokens, and
    writes them into plan.json. The numbers shrink to the length of the source if the plan leaves them out, or if
    `adjustable` names them. If the run works elsewhere (not `here`), `settle` decides what depends on the machine.
    """
    folder, plan = Path(folder), checks.with_absolute_paths(plan)
    if Run.is_begun(folder, resume):
        (run := Run(folder)).check_same(plan)
        return run
    source = find_model(plan.model, token)
    config = load_config(source, token, plan.text_only)
    inspection = inspect_model(source, config)
    inspection.require_support()
    checks.check_plan(plan, inspection)
    check_limits(plan, inspection)
    model = source.pinned or plan.model
    dtype = checks.decide_dtype(plan, source, config) if here else plan.dtype
    left_out: dict[str, Any] = dict.fromkeys(adjustable)
    requested = replace(plan, **left_out)
    adjustable = [name for name in ADJUSTABLE if getattr(requested, name) is None]
    decided = replace(checks.fit_plan(plan, source, inspection, adjustable, token), model=model, dtype=dtype)
    run = Run.create(folder, decided, inspection, requested, settled=here)
    try:
        if here:
            checks.check_disks(folder, plan, source, inspection)
    except LinearizerError:
        run.remove()
        raise
    return run


def settle(run: Run, token: str | None = None) -> None:
    """Decide what depends on this machine, for a run that was begun on another machine."""
    if run.begun.settled:
        return
    plan, source = run.plan, find_model(run.plan.model, token)
    dtype = checks.decide_dtype(plan, source, load_config(source, token, run.inspection.tower_of is not None))
    checks.check_disks(run.folder, plan, source, run.inspection)
    run.settle(replace(plan, dtype=dtype))


def linearize(run: Run, token: str | None = None, locked: bool = False, ranks: Ranks = ALONE) -> Steps[None]:
    """Continue a run until it has its student; `locked`: the caller holds its lock.

    It works while its steps are taken, and waits for no other run: `workers.control.start` and the command line wait
    for their turn at the device. The other ranks call `follow`.
    """
    if not run.done:
        with logged_work(run, locked):
            if run.is_encoder_run:
                encoder = EncoderRun(run)
                yield from kind_of(encoder.inspection).make_and_judge(encoder, token)
                if not encoder.times:
                    yield from keep_times(encoder)
            else:
                settle(run, token)
                if not run.checkpoint.is_dir():
                    try:
                        yield from make_student(run, token, ranks)
                    except RankEnded:
                        check_stop(run)  # which another rank may have noticed first
                        raise
                elif not run.has_file(DIGESTS):  # the run was killed right after saving
                    write_digests(run)
            card_of(run).add()
            run.log(EventName.DONE)


def make_student(run: Run, token: str | None, ranks: Ranks = ALONE) -> Steps[None]:
    """Take all steps from the teacher to the checkpoint; do not repeat a step with a stored product."""
    checks.check_method(run.plan)
    weights = run.inspection, run.plan.dtype, run.plan.device
    if streams(*weights) or spreads(*weights):  # more processes do not read a disk faster, or no device is free
        ranks = ALONE
    ranks.hear(True)  # so the others load the teacher meanwhile
    with interruptible(run):
        teacher = load_teacher_of(run.plan, token, run.inspection)
    texts = ranks.hear(TextsOfRun.of(run, teacher, token, JUDGING.texts))
    yield from measure_teacher(run, teacher, texts, ranks)
    allocation = yield from allocate(run, teacher, texts, ranks)
    student = begin_student(run, teacher, allocation)
    yield from train(run, student, allocation, texts, ranks)
    made_with = {
        "text": run.plan.text,
        "learnt": texts.first_judged,
        "judged": len(texts.judged),
        "seed": run.plan.seed,
    }
    run.write_evaluation(made_with={**made_with, **environment(student)})
    yield from judge(setup_of(run, teacher, student, texts, ranks, token))
    check_stop(run)
    checkpoint.restore_type(student, teacher.stored)
    links = teacher.inspection.links and not run.plan.changes_weights
    files = local_weight_files(teacher.source) if links else ()
    remove(run.folder / DIGESTS)  # of an earlier checkpoint: a kill from here on must not leave them beside the new one
    checkpoint.save(student, teacher.tokenizer, run.checkpoint, files, teacher.stored, teacher.pictured)
    write_digests(run, files)


def begin_student(run: Run, teacher: Teacher, allocation: Allocation) -> LinearizedForCausalLM:
    """Put an untrained student into the layers of a teacher."""
    name = teacher.source.repo_id or Path(teacher.source.name).name  # do not publish the path of a folder
    origin = {"name": name, "revision": teacher.source.revision}
    origin |= {"file": teacher.inspection.gguf} if teacher.inspection.gguf else {}
    layers = teacher.inspection.layers
    how = run.plan.feature_map, run.plan.seed, origin, allocation.exact_until(layers)
    return checkpoint.put_student_into(teacher.model, layers, allocation, *how)


def setup_of(
    run: Run, teacher: Teacher, student: LinearizedForCausalLM, texts: TextsOfRun, ranks: Ranks, token: str | None
) -> Setup:
    """Put together what the new student of a run is judged with."""
    control = student
    if run.plan.changes_weights:  # the judged student is the saved one; the teacher and its window have their own
        checkpoint.round_to_type(student, teacher.stored)
        unchanged = load_teacher_of(run.plan, token, run.inspection).model
        layers, allocation = teacher.inspection.layers, run.require_allocation()
        exact_tokens = allocation.exact_until(layers)
        control = checkpoint.put_student_into(unchanged, layers, allocation, exact_tokens=exact_tokens)
    return Setup(run, student, control, teacher.tokenizer, control, None, texts.judged, ranks=ranks)


def follow(run: Run, ranks: Ranks, token: str | None = None) -> None:
    """Do this rank's shares of the work on a run, as rank 0 asks for them, until it asks for nothing more."""
    if not ranks.hear():
        return
    teacher = load_teacher_of(run.plan, token, run.inspection)
    texts: TextsOfRun = ranks.hear()

    @cache
    def student() -> LinearizedForCausalLM:
        made = begin_student(run, teacher, run.require_allocation())
        initialise(made, samples_of(run))
        return made

    shares: Mapping[EventName, Callable[..., Steps[Any]]] = {
        EventName.PROFILE: lambda: profile_share(run, teacher, texts.profiled, ranks),
        EventName.TRY: lambda students: try_share(run, teacher, texts.priced, students, ranks),
        EventName.PRICE: lambda sinks: price_share(run, teacher, texts.priced, sinks, ranks),
        EventName.CHECK: lambda allocations: compare_share(run, teacher, texts.compared, allocations, ranks),
        EventName.DISTILL: lambda number, begun: train_share(run, student(), texts, number, begun, ranks),
        EventName.EVALUATE: lambda: judge_share(setup_of(run, teacher, student(), texts, ranks, token)),
    }
    while request := ranks.hear():
        step, *details = request
        steps = shares[step](*details)
        if step == EventName.DISTILL:  # rank 0 decides after which step it stops
            finish(steps)
        else:
            work_on_share(run, steps)


def work_on_share(run: Run, steps: Steps[Any]) -> None:
    """Take steps until the run is to stop."""
    with interruptible(run, YIELD_SECONDS):
        finish(steps, lambda progress: check_stop(run))


def reallocate(run: Run, plan: Plan) -> Allocation:
    """Allocate another budget from the measurements of a run; change the run unless its student exists."""
    allocation = decide(run, plan, run.layers)
    if not run.checkpoint.exists():
        with run.take_lock():
            changed = allocation != run.allocation
            details = {"strategy": allocation.strategy, "features_mean": allocation.features_mean, "changed": changed}
            # first: a kill after this can repeat a training, but not end it early
            run.log(EventName.ALLOCATED, **details)
            if changed:  # another student needs another training
                remove(run.folder / "state" / "training")
                remove(run.folder / CANDIDATES)
                remove(run.folder / "allocation.json")  # whatever fails from here on, none of another plan is used
            run.write_product("plan.json", plan.to_json())
            run.write_product("allocation.json", allocation.to_json())
    return allocation


def evaluate_run(
    run: Run, request: Request, measure_again: tuple[str, ...] = (), token: str | None = None, locked: bool = False
) -> Steps[dict[str, Any]]:
    """Evaluate the student of a run; `measure_again` names parts to measure again although their results are stored.

    The student of an encoder is judged as a whole: again if `measure_again` names any part.
    """
    run, measured = run.evaluating, dict[str, Any]()
    with logged_work(run, locked):
        if run.is_encoder_run:
            encoder = EncoderRun(run)
            judgement = yield from kind_of(encoder.inspection).evaluate(encoder, request, bool(measure_again), token)
            measured = {judgement.name: judgement}
        else:
            with assembled(run, token) as setup:
                measured = yield from measure_parts(setup, request, measure_again)
        card_of(run).add()
        run.log(EventName.DONE)
    return measured


def resume_evaluation(run: Run, token: str | None = None) -> Steps[Any]:
    """Resume the last requested evaluation; the caller holds the lock of the run."""
    with log_end(run.evaluating):
        request, again, done = newest_request(run)
    measure_again = tuple(part for part in request.chosen if again and part not in done)
    return (yield from evaluate_run(run, request, measure_again, token, locked=True))


def compare_run(
    run: Run,
    prompt: str,
    new_tokens: int,
    seed: int,
    sample: bool,
    raw: bool = False,
    pictures: Sequence[Any] = (),
) -> Steps[Comparison]:
    """Answer a prompt with the teacher, the student and a plain window of a run; `raw`: continue it instead.

    They see `pictures`, files or pictures of PIL, before the prompt.
    """
    with assembled(run) as setup, quiet():
        if setup.teacher is None:
            raise ModelNotAvailable(setup.alone or "the teacher is not available: nothing can be compared")
        processor = checkpoint.load_processor_of(run) if pictures else None
        said = make_prompt(setup.tokenizer, processor, prompt, pictures, raw=raw)
        readers = [Reader.of(subject) for subject in setup.subjects(len(said.tokens) + new_tokens - 1)]
        how = new_tokens, seed, sample, said.pictures
        for update in write_in_turns(readers, setup.tokenizer, prompt, said.tokens, *how):
            if isinstance(update, Comparison):
                yield Progress("compare", update.student.tokens, new_tokens, "tokens")
    assert isinstance(update, Comparison), "the last value has the complete texts"
    return update


@contextmanager
def logged_work(run: Run, locked: bool = False) -> Iterator[None]:
    """Lock a run for the context, unless the caller holds its lock, and log the start and the end of the work."""
    with nullcontext() if locked else run.take_lock(), quiet(), log_end(run):
        run.log(EventName.STARTED)
        yield
        run.clear_request("stop")
