"""The table that decides: recipes × budgets × seeds at equal bytes, beside their controls.

  python -m tests.benchmarks.quality            hours; what is finished is kept, and a second call goes on within a row
  python -m tests.benchmarks.quality --quick    minutes: ours, a few controls and rivals at one budget, one seed
  python -m tests.benchmarks.quality --length 4096   on texts of another length, in a table of its own
  python -m tests.benchmarks.quality --table    only write the table of what has been measured
  python -m tests.benchmarks.quality --anew …   measure again what had been measured by another version

Writes results/quality-MODEL.json (one record per row, budget and seed) and .md (the table).
gap is the student's loss less its teacher's; recall is what a student gains when a passage of 64 tokens comes a second
time, as a share of what its teacher gains; all on text that nothing was measured, priced or trained on.
"""

import argparse
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.errors import BudgetError, RequestError
from linearizer.evaluate.language import join_scores, read_scores, tail_of
from linearizer.evaluate.recall import measure_recall
from linearizer.evaluate.subjects import Subject, environment
from linearizer.hub.weight_files import digest
from linearizer.method import allocate_run, checkpoint
from linearizer.method.decide import allocate_alike, decide
from linearizer.method.measure_run import measure_teacher, profile_settings
from linearizer.method.substitute import exchange_students
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import cache_bytes, head_bytes, token_bytes
from linearizer.plan.plan import USUAL_TEXTS, Plan
from linearizer.plan.recipes import RECIPES
from linearizer.progress import finish, quiet
from linearizer.run.files import write_whole
from linearizer.student.update_rules import UPDATE_RULES
from linearizer.teacher import load as teacher_module
from linearizer.train import distill
from tests.benchmarks.ablation import without_far, without_window
from tests.benchmarks.duo import allocate_as_duo
from tests.benchmarks.kivi_control import caches_in_few_bits
from tests.benchmarks.quality_rows import ROWS, STEPS, is_control, share_of
from tests.benchmarks.quality_table import LENGTH, PASSAGE, RESULTS, Table, edges_of, gaps_of
from tests.benchmarks.rivals import RULES, Rival, foreseeing, tokens_within
from tests.benchmarks.shares import PRICES, price_heads, share_out, with_slots

BUDGETS, SEEDS = (64, 32, 128, 16), (0, 1, 2)
HELD, LEAST_TEXTS = 8, 4  # texts to judge by, and to measure at least
AHEAD = 160 * LENGTH  # tokens of text that belong to measuring and training
QUICK = ("best", "windows", "swa", "features", "h2o, 8 bits", "zsmerge, 8 bits", "cache, 2 bits")
UNTRAINED = ("best", "windows", "swa", "slots", "evict", "duo", "cache", *RULES)
LONGER = (2, 8)  # times the length, at which the bytes of a growing cache are stated, too


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the texts, and of what is priced for")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--budgets", nargs="*", type=int, default=list(BUDGETS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, help="where results go (default: results/quality-MODEL)")
    parser.add_argument(
        "--work", type=Path, default=Path("build") / "quality", help="what is measured once is kept here"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--anew", action="store_true")
    arguments = parser.parse_args(arguments)
    if arguments.quick:
        arguments.rows, arguments.budgets, arguments.seeds = list(QUICK), [64], [0]
    text = "" if arguments.text == "builtin" else "-" + re.sub(r"\W+", "-", arguments.text)
    length = f"-{arguments.length}" if arguments.length != LENGTH else ""
    name = Path(arguments.model).name + text + length + ("-quick" if arguments.quick else "")
    table = Table(arguments.out or RESULTS / f"quality-{name}", arguments.length)
    if not arguments.table:
        cells = [
            (row, budget, seed) for seed in arguments.seeds for row in arguments.rows for budget in arguments.budgets
        ]
        for cell in sorted(cells, key=lambda cell: (cell[0].split()[0].rstrip(",") not in UNTRAINED, cell[2])):
            if arguments.anew or not table.has(*cell):
                table.add(measure(arguments, *cell))
                table.write()
    print(table.write())


def measure(arguments, row, budget, seed):
    """Make one student, and put it and its teacher through the same text."""
    recipe, changes = ROWS[row]
    trains = {"steps": STEPS} if RECIPES[recipe].choices.get("steps") else {}
    length, texts = arguments.length, max(LEAST_TEXTS, USUAL_TEXTS * LENGTH // arguments.length)
    given = {"length": length, "target_length": length, "texts": texts, "text": arguments.text}
    given |= {**trains, **changes}
    record = {"row": row, "budget": budget, "seed": seed}
    try:
        plan = Plan.of(recipe, model=arguments.model, budget=budget, seed=seed, **given)
        with quiet():
            begun = time.perf_counter()
            run, teacher = prepared(arguments.work, plan, row)
            measuring = time.perf_counter() - begun
            held = held_out(plan, teacher)
            begun = time.perf_counter()
            student, allocation = made(run, teacher, row)
            record |= {"seconds": time.perf_counter() - begun, "measuring": measuring}
            original = own_teacher(plan, teacher, student, allocation)
            lengths = (length, *(times * length for times in LONGER if row.startswith("cache")))
            with controlled(student, teacher, allocation, row, budget, lengths) as remembered:
                record |= judged(student, held, original)
            record["teacher"] = judged_teacher(arguments.work, plan, original, held)
            record["state"] = remembered.pop(length)
            record["later"] = remembered
            record["paid"] = cache_bytes(teacher.inspection.layers, budget)
            for name, ablation in (("no far", without_far), ("no window", without_window)):
                if not is_control(row) and has_both(allocation) and row.partition(",")[0] not in UPDATE_RULES:
                    with ablation(student), torch.inference_mode():
                        record[name] = {"loss": score(student, held, original)[1].loss.mean().item()}
            record["made_with"] = environment(student)
        shutil.rmtree(run.folder)
    except BudgetError as error:
        record["refused"] = str(error)
    print(row, budget, seed, record.get("refused") or f"loss {record['loss']:.3f} KL {record['kl']:.4f}", flush=True)
    return record


def has_both(allocation):
    """Return whether some heads have a window and a far field."""
    return any(head.window and (head.slots or head.features) for heads in allocation.heads for head in heads)


def prepared(work, plan, row):
    """Open a run that has the measurements of its plan, which other plans may have asked for before."""
    seen = {name: getattr(plan, name) for name in ("model", "texts", "length")}
    fitted = {"fitted": True} if plan.memory else {}  # memories, to a text that the samples keep
    key = digest({}, json.dumps({**seen, **asdict(profile_settings(plan)), **fitted}))[:16]
    base, folder = work / f"{Path(plan.model).name}-{key}", work / "run"
    run, teacher = begun(folder, plan), teacher_module.load_teacher_of(plan)
    if not base.exists():
        finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
        shutil.copytree(folder, base)
    for name in ("profile.json", "inspection.json"):
        shutil.copy(base / name, folder / name)
    shutil.copytree(base / "state", folder / "state", dirs_exist_ok=True)
    if (share := share_of(row)) in PRICES:
        kept = base / f"shares-{share}-{plan.budget}.json"
        if not kept.exists():
            run.write_product("prices.json", price_heads(share, run, teacher).to_json())
            shutil.copy(folder / "prices.json", kept)
        shutil.copy(kept, folder / "prices.json")
    elif plan.strategy_spec.decided_by == "prices" and "uniform" not in row:
        texts = TextsOfRun.of(run, teacher).priced
        sinks = finish(allocate_run.choose_sinks(run, teacher, texts))  # how many are kept depends on the budget
        bits = "-".join(map(str, (plan.resolved_bits, *plan.fewer_bits)))
        prices = base / f"prices-{plan.strategy_spec.far_field}-{bits}-{sinks}-{plan.budget}.json"
        if prices.exists():
            shutil.copy(prices, folder / "prices.json")
        else:
            finish(allocate_run.price_heads(run, teacher, texts))
            shutil.copy(folder / "prices.json", prices)
    return run, teacher


def begun(folder, plan):
    """Open the run of this plan that was interrupted, or begin one in the place of another plan's."""
    try:
        return pipeline.begin(folder, plan, resume=True)
    except RequestError:
        shutil.rmtree(folder, ignore_errors=True)  # a refusal leaves none
        return pipeline.begin(folder, plan)


def made(run, teacher, row):
    """Allocate, and train what the plan trains."""
    plan, layers = run.plan, teacher.inspection.layers
    if "uniform" in row:
        allocation = allocate_alike(layers, plan, plan.resolved_sinks)
    elif share_of(row) in PRICES:
        allocation = share_out(run.prices, plan, layers)
    elif row.startswith("duo"):
        allocation = allocate_as_duo(run, teacher)
    else:
        allocation = decide(run, plan, layers)
    if row.startswith("slots"):
        allocation = with_slots(allocation, layers)
    teacher.model.float()
    student = pipeline.begin_student(run, teacher, allocation)
    finish(distill.train(run, student, allocation, TextsOfRun.of(run, teacher)))
    return student.eval(), allocation


def held_out(plan, teacher):
    """Take the same text for every row: what comes after all that is measured or trained on."""
    count = AHEAD // plan.resolved_length(None) + HELD
    return teacher_module.texts_of(replace(plan, seed=0), teacher, count, None)[-HELD:]


@contextmanager
def controlled(student, teacher, allocation, row, budget, lengths) -> Iterator[dict[int, int]]:
    """While this lasts, let a control that is no student of its own take the student's place; yield its bytes."""
    kind, rule = row.partition(",")[0], row.partition("(")[2].rstrip(")")
    layers = [layer for layer in teacher.inspection.layers if layer.native_window is None]
    if kind == "cache":
        (subject,) = caches_in_few_bits(student, teacher.inspection.layers, [int(row.split()[1])])
        heads, allocation = subject.heads, subject.allocation
    elif kind in RULES:
        shares = [
            [
                head_bytes(head, layer, allocation.sinks, 0) if share_of(row) else budget * token_bytes(layer)
                for head in own
            ]
            for own, layer in zip(filter(None, allocation.heads), layers, strict=True)
        ]
        heads = [
            Rival([tokens_within(bytes, layer, kind, 8) for bytes in own], kind, 8)
            for own, layer in zip(shares, layers, strict=True)
        ]
    elif rule:
        heads = [Rival([budget] * layer.kv_heads, rule) for layer in layers]
    else:
        yield {length: allocation.state_bytes(teacher.inspection.layers, length) for length in lengths}
        return
    oracle = foreseeing(student, heads) if kind == "kvzip" else nullcontext()
    with exchange_students(student, heads), oracle:
        yield {length: allocation.state_bytes(teacher.inspection.layers, length) for length in lengths}


@torch.inference_mode()
def judged(student, held, original, as_teacher=False):
    """Loss by position, divergence from the teacher in `original`, agreement, and loss on passages that come again."""
    expected, scores = score(student, held, original, as_teacher)
    gaps = gaps_of(held.shape[1])
    (recall,) = finish(measure_recall(subjects_of(student, original, as_teacher)[-1:], held, PASSAGE, gaps)).subjects
    edges = edges_of(held.shape[1])
    return {
        "loss": scores.loss.mean().item(),
        "by_position": [scores.loss[:, a:b].mean().item() for a, b in zip(edges, [*edges[1:], None], strict=True)],
        "kl": scores.kl.mean().item(),
        "agreement": scores.agreement.mean().item(),
        "tail": asdict(tail_of(scores, expected.loss)),
        "recall": [
            dict(gap=gap, first=first, second=second)
            for gap, first, second in zip(gaps, recall.first, recall.second, strict=True)
        ],
    }


def subjects_of(student, original, as_teacher=False):
    """Return the teacher, and the student unless that is the teacher."""
    teacher = Subject("teacher", original, softmax=True)
    return [teacher] if as_teacher else [teacher, Subject("student", student, Allocation("", 0, ()))]


def score(student, held, original, as_teacher=False):
    """Return what teacher and student say of every token."""
    subjects = subjects_of(student, original, as_teacher)
    found = [read_scores(subjects, ids) for ids in held.split(4)]
    return [join_scores([some[place] for some in found], 0) for place in (0, -1)]


def own_teacher(plan, teacher, student, allocation):
    """Return a model whose weights are the teacher's: the student itself, unless training changed it."""
    if not plan.changes_weights:
        return student
    return checkpoint.put_student_into(
        teacher_module.load_teacher_of(plan).model.float(), teacher.inspection.layers, allocation
    )


def judged_teacher(work, plan, original, held):
    """The same for the teacher, once for a text."""
    kept = work / f"teacher-{digest({'text': held}, plan.model)}.json"
    if not kept.exists():
        write_whole(kept, json.dumps(judged(original, held, original, as_teacher=True)))
    return json.loads(kept.read_text())


if __name__ == "__main__":
    main()
