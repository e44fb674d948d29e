"""How far a student is from itself in other dtypes, and from its teacher: python -m tests.benchmarks.dtypes RUN ….

Slots merge the pairs that cost least, so that a rounding may choose another pair, and what follows differs by more than
the rounding. A teacher has no such steps: how far it is from itself says what rounding alone does. KL in nats, the mean
over tokens of texts that were kept from training, with half of a 95% interval over texts; and how often the likeliest
token is the same. Writes results/dtypes-cpu.json.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch

from linearizer.amounts import columns
from linearizer.evaluate.setup import environment
from linearizer.method.checkpoint import load_student
from linearizer.pipeline import training_and_judging_texts
from linearizer.run.names import find_run
from linearizer.student.attention_interface import attending
from linearizer.teacher.load import load_teacher_of
from linearizer.teacher.logits import kl_of

RESULTS = Path(__file__).parent / "results" / "dtypes-cpu.json"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
EXACT = "float32"  # what others are compared with


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for name in arguments.runs for row in measure(find_run(name))]
    print(columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)]))
    found = {
        "date": date.today().isoformat(),
        "command": f"python -m tests.benchmarks.dtypes {' '.join('RUN' for _ in arguments.runs)}",
        "made_with": environment(load_student(find_run(arguments.runs[0]), dtype=torch.float32)),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(run):
    """Give a row for teacher and student in each dtype."""
    teacher = load_teacher_of(run.plan, None, run.inspection)
    ids, logits = training_and_judging_texts(run, run.plan, teacher, None)[1], {}
    for dtype in DTYPES:
        student, name = load_student(run, dtype=dtype), str(dtype).removeprefix("torch.")
        logits["student", name] = read(student, ids)
        with attending(student.base, "sdpa"):
            logits["teacher", name] = read(student.base, ids)
    made = {"budget": run.plan.budget}
    return [
        {
            **made,
            "subject": subject,
            "dtype": dtype,
            f"KL of itself in {EXACT}": far(logits[subject, EXACT], found),
            f"agrees with itself in {EXACT}": agreement(logits[subject, EXACT], found),
            f"KL of the teacher in {EXACT}": far(logits["teacher", EXACT], found),
            "agrees with it": agreement(logits["teacher", EXACT], found),
        }
        for (subject, dtype), found in sorted(logits.items())
    ]


def read(model, ids):
    """Give the logits of all tokens in double precision, a text at a time."""
    return torch.cat([model(input_ids=text[None], use_cache=False).logits.double() for text in ids])


def far(exact, found):
    """Give the mean KL, and 95% of its error over texts."""
    texts = kl_of(exact, found).mean(-1)
    return f"{texts.mean():.2e} ± {1.96 * texts.std() / len(texts) ** 0.5:.0e}"


def agreement(exact, found):
    return f"{(exact.argmax(-1) == found.argmax(-1)).double().mean():.2%}"


if __name__ == "__main__":
    main()
