"""Rivals by their authors: kvpress's presses at the bytes of a student, on documents of others.

  python -m venv PRESSES && PRESSES/bin/pip install kvpress     it needs an older transformers than we do
  python -m tests.benchmarks.presses RUN --python PRESSES/bin/python
  python -m tests.benchmarks.presses --budget 64 --length 2048 --documents 6 --python …

A document's first LENGTH tokens are read, and what comes after them is judged by the KL to the model with its whole
cache, with intervals of 95% over the documents. A press reads with the whole cache, prunes it once to the bytes of the
student, and keeps all that follows; student and window never hold more than these bytes. A press keeps 16 bits a
number; the rows of twice as many tokens are what it would keep in 8 bits that cost nothing. Options are those of
needles.py; what presses said is kept. Writes results/presses-MODEL.md unless --out names another.
"""

import json
import subprocess
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_file

from linearizer.amounts import columns
from linearizer.evaluate.language import Units, scores_of
from linearizer.evaluate.subjects import read_end
from linearizer.hub.weight_files import digest
from linearizer.run.files import write_whole
from tests.benchmarks.needles import ROWS, arguments_of, student_of
from tests.benchmarks.quality_table import RESULTS
from tests.benchmarks.real_texts import documents_to_judge

SCRIPT = Path(__file__).with_name("presses_of_others.py")


def main(arguments=None):
    parser = arguments_of(__doc__)
    parser.set_defaults(count=24)
    parser.add_argument("--python", help="of the environment that has kvpress; without it presses are left out")
    parser.add_argument("--presses", nargs="*", help="names of presses_of_others.py (default: all)")
    parser.add_argument("--following", type=int, default=128, help="tokens that are judged")
    parser.add_argument("--out", type=Path, help="where the table goes (default: results/presses-MODEL.md)")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    for folder in given.runs or [given.work / f"needles-{given.budget}"]:
        with student_of(folder, given) as setup:
            out = given.out or RESULTS / f"presses-{Path(setup.run.plan.model).name.lower()}.md"
            table = judge_all(setup, given)
            write_whole(out, table)
            print(table, flush=True)


def judge_all(setup, given):
    """Return the table of a run: presses, window and student, from the farthest of the model to the nearest."""
    longest = given.length + given.following
    documents = documents_to_judge(setup.tokenizer, longest, given.count, given.texts, given.work)
    ids = torch.cat([document.ids for document in documents])
    rows = [(name, kl, agreement, "") for name, kl, agreement in judge_subjects(setup, ids, given)]
    kept = setup.run.plan.budget
    if given.python:
        for name, texts in ask_presses(setup.run.plan.model, ids, [kept, 2 * kept], given).items():
            press, count = name.split() if " " in name else (name, given.length)
            values = [torch.tensor([text[each] for text in texts]).double() for each in ("kl", "agreement")]
            rows.append((press, *values, f"{int(count):,}"))
    owners = Units(torch.arange(len(ids))[:, None].expand(-1, given.following - 1))
    lines = [["", "tokens kept", "KL", "95%", "agrees"]]
    for name, kl, agreement, count in sorted(rows, key=lambda row: -row[1].mean()):
        found = owners.estimate(kl)
        low, high = found.interval
        lines.append(
            [name, count, f"{found.mean:.4f}", f"{low:.4f} to {high:.4f}", f"{fmean(agreement.flatten().tolist()):.1%}"]
        )
    about = f"{given.following} tokens after {given.length:,}, {len(ids)} documents; a budget of {kept:,} tokens"
    return f"{about}\n\n{columns(lines)}\n"


def judge_subjects(setup, ids, given):
    """Yield the name, KL and agreement of student and window, token by token."""
    subjects, found = setup.subjects(given.length), {row: [] for row in ROWS[1:]}
    for text in ids.split(1):
        following = text[:, given.length + 1 :]
        logits = [read_end(subject, text, given.length, subject.fresh_cache())[:, :-1] for subject in subjects]
        for row, own in zip(ROWS[1:], logits[1:], strict=True):
            found[row].append(scores_of(own, logits[0], following.to(own.device)))
    for row, scores in found.items():
        yield row, torch.cat([each.kl for each in scores]), torch.cat([each.agreement for each in scores])


def ask_presses(model, ids, kept, given):
    """Let kvpress's own environment judge its presses; a second call goes on where the first was stopped."""
    key = digest({"ids": ids}, f"{model} {given.length} {kept}")[:16]
    texts, out = given.work / f"presses-{key}.safetensors", given.work / f"presses-{key}.json"
    save_file({"ids": ids}, texts)
    command = [given.python, str(SCRIPT), model, str(texts), str(out), "--length", str(given.length)]
    command += ["--kept", *map(str, kept), *(["--presses", *given.presses] if given.presses else [])]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


if __name__ == "__main__":
    main()
