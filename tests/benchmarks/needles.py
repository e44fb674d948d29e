"""How many numbers of six digits a teacher, a student and a window of the same bytes find in long texts.

  python -m tests.benchmarks.needles                  of the default of SmolLM2 at a budget of 256, which is made first
  python -m tests.benchmarks.needles RUN RUN          of two runs; where a folder holds none, the default is made there
  python -m tests.benchmarks.needles --rows student --count 2 --texts file:novel.txt

The row "twice" is the student where it reads each text twice, as `linearizer read` does. Use the command to judge a
change of what heads hold, merge or are priced by: KL over prose does not see digits, so a student can come closer to
its teacher and lose every number. Each number is hidden alone in a text, at one of five depths, and asked for at the
text's end; it is found where every digit is the likeliest, which is what greedy writing says. Beside the counts
stands the loss of the digits in nats a token, which shows a change before a number is lost or found. What the teacher
says is kept, so a second call takes the time of students and windows alone.
"""

import argparse
from collections import deque
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.amounts import columns
from linearizer.evaluate.recall import DEPTHS
from linearizer.evaluate.subjects import Setup, assembled, read_end, read_into_cache
from linearizer.hub.weight_files import digest
from linearizer.method.allocate_run import allocate
from linearizer.method.measure_run import measure_teacher
from linearizer.method.texts import TextsOfRun
from linearizer.plan.plan import Plan
from linearizer.progress import finish, quiet
from linearizer.run.folder import Run
from linearizer.teacher.load import load_teacher_of
from linearizer.teacher.logits import losses_of
from linearizer.teacher.read_twice import read_twice, request_of
from linearizer.teacher.text import read_texts
from linearizer.train.distill import train
from tests.benchmarks.real_judging import hide_number, kept_of
from tests.benchmarks.real_texts import WORK, documents_to_judge, real_model

ROWS = ("teacher", "student", "window")
TWICE = "twice"  # the student, which reads each text twice


def main(arguments=None):
    given = arguments_of(__doc__, (*ROWS, TWICE)).parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    for folder in given.runs or [given.work / f"needles-{given.budget}"]:
        with student_of(folder, given) as setup:
            print(f"{folder}: of {given.length:,} tokens\n{columns(ask_all(setup, given))}", flush=True)


def arguments_of(about, rows=ROWS):
    """Return the options of a command that asks a teacher, a student and a window in long texts."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs, or new ones")
    parser.add_argument("--rows", nargs="*", choices=rows, default=list(rows))
    parser.add_argument("--model", help="of new runs, in the place of SmolLM2")
    parser.add_argument("--budget", type=int, default=256, help="of new runs")
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME=VALUE", help="options of new runs: texts=2 …")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--count", type=int, default=4, help="numbers at each depth, each in another text")
    parser.add_argument("--texts", help="what numbers are hidden in, in the place of our documents: file:PATH …")
    parser.add_argument("--work", type=Path, default=WORK, help="what is made once is kept here")
    return parser


@contextmanager
def student_of(folder, given):
    """Load the student of a run, or make the default without judging it; what is measured for it is kept."""
    if Run(folder).checkpoint.is_dir():
        with assembled(Run.open(folder)) as setup:
            yield setup
        return
    options = {name: int(value) for name, _, value in (pair.partition("=") for pair in given.run)}
    model = given.model or str(real_model(given.work))
    plan = Plan.of("best", **{"model": model, "budget": given.budget, "dtype": "float32", "seed": 0, **options})
    with quiet():
        run = pipeline.begin(folder, plan, resume=True)
        teacher = load_teacher_of(run.plan)
        texts = TextsOfRun.of(run, teacher)
        finish(measure_teacher(run, teacher, texts))
        allocation = finish(allocate(run, teacher, texts))
        student = pipeline.begin_student(run, teacher, allocation)
        finish(train(run, student, allocation, texts))
    yield Setup(run, student.eval(), student, teacher.tokenizer, student, None, texts.judged)


def ask_all(setup, given):
    """Return a line for every subject: at each depth and together, numbers found of asked, and the loss of digits."""
    lines = [["", *(f"{depth:.0%}" for depth in DEPTHS), "all"]]
    texts = texts_to_hide_in(setup.tokenizer, given)
    subjects = dict(zip(ROWS, setup.subjects(given.length), strict=True))
    for row in given.rows:
        subject = subjects.get(row, subjects["student"])
        asked = [
            ask_or_recall(setup, subject, text, number, given.work, row == TWICE) for number, text in enumerate(texts)
        ]
        lines.append([row, *in_words(torch.stack(asked))])
    return lines


def ask_or_recall(setup, subject, text, number, work, twice):
    """Ask a subject for the numbers of a text; a teacher only once."""

    def ask():
        return ask_in_text(subject, text, setup.tokenizer, number, twice)

    if subject.allocation is not None:
        return ask()
    plan = setup.run.plan
    return kept_of(work / "needles" / digest({"text": text}, f"{plan.model} {plan.dtype} {number}")[:24], ask)


def texts_to_hide_in(tokenizer, given):
    """Return texts (1, tokens) that numbers are hidden in."""
    if given.texts:
        return read_texts(given.texts, tokenizer, given.length, given.count).split(1)
    documents = documents_to_judge(tokenizer, given.length, given.count, work=given.work)
    return [document.ids for document in documents]


@torch.inference_mode()
def ask_in_text(subject, text, tokenizer, number, twice=False):
    """Ask a subject for a number at each depth of a text: (depths, found and loss). What is alike is read once."""
    cache, read, answers = subject.fresh_cache(), 0, []
    for place, depth in enumerate(DEPTHS):
        hidden = hide_number(text, depth, tokenizer, 10 * number + place)
        if twice:
            read, cache = hidden.ids.shape[1] - hidden.key - hidden.value, subject.fresh_cache()
            with subject.prepared() as model:
                deque(read_twice(model, request_of(tokenizer), hidden.ids[:, :read], cache), 0)
        else:
            read_into_cache(subject, text[:, read : hidden.place], cache)
            read = hidden.place
        rest = hidden.ids[:, read:]
        logits = read_end(subject, rest, rest.shape[1] - hidden.value - 1, deepcopy(cache))[:, :-1]
        digits = rest[:, -hidden.value :].to(logits.device)
        found = (logits.argmax(-1) == digits).all()
        answers.append(torch.stack([found.double(), losses_of(logits, digits).double().mean()]).cpu())
    return torch.stack(answers)


def in_words(asked):  # (texts, depths, found and loss)
    """Write found of asked and the loss, at each depth and at all depths."""
    cells = [*asked.unbind(1), asked.flatten(0, 1)]
    return [f"{int(cell[:, 0].sum())}/{len(cell)} {cell[:, 1].mean():.2f}" for cell in cells]


if __name__ == "__main__":
    main()
