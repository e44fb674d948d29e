"""The tables of the paper from this project's code, beside the published figures and with their rank correlation.

python -m tests.benchmarks.paper MODEL            tables 1, 2, 4, 5, 7, 11 and 12; --tables names some of them

MODEL: gpt2, EleutherAI/pythia-1b, a folder, demo, or tiny: a GPT-2 of the same shape, small and random, of which only
shapes and ranks mean anything. What the paper leaves open is an option; the defaults are its text where that is clear.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas
import torch

from linearizer.amounts import columns
from linearizer.evaluate.language import read_scores
from linearizer.evaluate.speed import Meter
from linearizer.evaluate.subjects import Subject
from linearizer.hub.models import find_model
from linearizer.method.by_freedoms import layer_units
from linearizer.method.checkpoint import make_layer_students, put_student_into
from linearizer.method.measure_run import measure_profile, profile_settings
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.quiet import quiet
from linearizer.student.attention_interface import attention_modules, observing
from linearizer.teacher.layers import layer_number
from linearizer.teacher.load import load_teacher_of
from linearizer.teacher.logits import logits_of
from linearizer.teacher.text import read_texts
from linearizer.train.distill import distill
from linearizer.train.losses import AttentionInputs, rows_loss
from linearizer.train.settings import TrainingSettings

PUBLISHED = json.loads((Path(__file__).with_suffix(".json")).read_text(encoding="utf-8"))
LOSSES = ("direct", "softmax", "l2")
STRATEGIES = {"Fix": "fix", "DoF": "dof", "DoF+clip": "dof-clip"}
HEADS_AT = 2.0**-8  # the λ of table 2


class Paper:
    """A model, and what the tables share: its profile, its students, and the time that each step took."""

    def __init__(self, arguments):
        self.arguments, self.trained = arguments, {}
        with tempfile.TemporaryDirectory() as folder:
            name = tiny_gpt2(folder) if arguments.model == "tiny" else arguments.model
            options = {name: getattr(arguments, name) for name in ("seed", "device", "dtype")}
            plan = Plan.of("paper", model=name, features=64, **options)
            self.teacher = load_teacher_of(plan)
        self.layers = self.teacher.inspection.layers
        shape = {"layers": len(self.layers), "heads": self.layers[0].query_heads}
        fitting = (each for each in (PUBLISHED["gpt2"], PUBLISHED["pythia-1b"]) if each.items() >= shape.items())
        self.published = next(fitting, {})
        self.features = arguments.features or self.published.get("features") or max(16, self.layers[0].key_dim)
        ridge = 2.0 ** -(arguments.ridge_exponent or self.published.get("ridge_exponent", 8))
        texts = self.read_texts()
        self.judged = texts[-min(arguments.judged, len(texts) - arguments.batch) :]
        self.learnt, begin = texts[: len(texts) - len(self.judged)], time.perf_counter()
        settings = replace(profile_settings(plan), reference=ridge, samples=arguments.samples)
        measuring = measure_profile(self.teacher.model, texts[: arguments.texts], self.layers, settings)
        self.profile = finish(measuring).profile
        self.seconds = time.perf_counter() - begin
        teacher = Subject("teacher", self.teacher.model)
        self.teacher_loss, self.teacher_seconds = self.loss_of(teacher), self.seconds_to_write(teacher)
        self.student = put_student_into(self.teacher.model, self.layers, self.allocation("Fix"), "prf", arguments.seed)

    def read_texts(self):
        arguments, teacher = self.arguments, self.teacher
        length = min(arguments.length, teacher.inspection.max_positions or arguments.length)
        count = max(arguments.steps * arguments.batch + arguments.judged, arguments.texts)
        how = {"least": arguments.batch + 1, "seed": arguments.seed, "model": teacher.model}
        return read_texts(arguments.text, teacher.tokenizer, length, count, **how)

    def allocation(self, name):
        """Share features out as a row of the paper's tables does."""
        return allocate_as_paper(self.profile, self.layers, self.features, STRATEGIES[name])

    def subject(self, name, loss, feature_map="prf"):
        """Make a student of the paper, and train it; return also how long that took."""
        if (name, loss) not in self.trained:
            allocation = self.allocation(name if name in STRATEGIES else "Fix")
            self.student.config.feature_map = feature_map
            heads = make_layer_students(self.student, self.layers, allocation, self.arguments.seed)
            subject, begin = Subject(name, self.student, allocation, heads), time.perf_counter()
            if loss is not None:
                options = {name: getattr(self.arguments, name) for name in ("steps", "batch", "seed")}
                settings = TrainingSettings(
                    loss=loss, decay="none", warmup=0, window_dropout=0.0, repeats=0.0, **options
                )
                with subject.at_work():
                    finish(distill(self.student, self.learnt, settings))
            self.trained[name, loss] = subject, time.perf_counter() - begin
        return self.trained[name, loss]

    def seconds_to_write(self, subject):
        """Time a few tokens after a text; return the seconds of 1,000."""
        meter = Meter(subject, self.layers, 60.0, self.arguments.seed)
        meter.time_texts(32, 1)
        return 1000 / meter.time_texts(self.judged.shape[1], 1).write_rate

    def loss_of(self, subject):
        return read_scores([subject], self.judged)[0].loss.mean().item()

    def kernel_errors(self, subject):
        """Return the mean squared error of the kernel in every layer, on text that was kept from training."""
        base, result = self.student.base, {}
        students = dict(zip(map(layer_number, attention_modules(base)), subject.heads, strict=True))

        def observe(module, q, k, v, scale, _):
            group = students[layer_number(module)].groups[0]
            loss, _ = rows_loss("l2", group, AttentionInputs(q, k, v, scale))
            result[layer_number(module)] = loss.item()

        with observing(base, observe):
            logits_of(base, self.judged[:2])
        return [error for _, error in sorted(result.items())]


def allocate_as_paper(profile, layers, features, strategy):
    """Round features to whole numbers as the paper does, not to tiles: they may exceed their mean a little."""
    rows = [layer_units(profile, index, layer, strategy.removesuffix("-clip")) for index, layer in enumerate(layers)]
    shares = [unit.features_at(0.0) for row in rows for unit in row]
    mean = math.fsum(shares) / len(shares)
    heads = []
    for row, layer in zip(rows, layers, strict=True):
        most = layer.key_dim if strategy == "dof-clip" else math.inf
        counts = [min(max(1, round(features * unit.features_at(0.0) / mean)), most) for unit in row]
        heads.append(tuple(Head(0, count) for unit, count in zip(row, counts, strict=True) for _ in range(unit.heads)))
    return Allocation(strategy, 0, tuple(heads))


def tiny_gpt2(folder):
    """Save a random GPT-2 of 12 layers and 12 heads that reads the demo model's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=4096, n_embd=192, n_layer=12, n_head=12, n_positions=256, initializer_range=0.1,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_model("demo").folder).save_pretrained(folder)
    return folder


def numbered(values, name=""):
    return {f"{name}{number + 1}": value for number, value in enumerate(values)}


def gridded(rows):
    return {key: value for number, row in enumerate(rows) for key, value in numbered(row, f"{number + 1}.").items()}


def table_1(paper, published):
    """Features of every layer."""
    return numbered(row[0].features for row in paper.allocation("DoF").heads if row), numbered(published or [])


def table_2(paper, published):
    """Degrees of freedom of every head, at λ = 2^-8."""
    place = paper.profile.settings.ridges.index(HEADS_AT)
    rows = [[curve[place] for curve in layer.query_freedoms] for layer in paper.profile.layers if layer.heads]
    return gridded(rows), gridded(published or [])


def table_4(paper, published):
    """Seconds to write 1,000 tokens; beside them the teacher's, which the paper's reviewers asked for."""
    students = {name: paper.seconds_to_write(paper.subject(name, None)[0]) for name in STRATEGIES}
    return {"teacher": paper.teacher_seconds, **students}, published


def table_5(paper, published):
    """Milliseconds of training for one text, by loss."""
    texts = paper.arguments.steps * paper.arguments.batch
    return {loss: 1000 * paper.subject("Fix", loss)[1] / texts for loss in LOSSES}, published


def table_7(paper, published):
    """Next-token loss."""
    students = {f"{name} {loss}": paper.subject(name, loss) for name, loss in product(STRATEGIES, LOSSES)}
    students["DiJiang"] = paper.subject("DiJiang", "softmax", "dijiang")
    students["Performer"] = paper.subject("Performer", None, "performer")
    losses = {name: paper.loss_of(subject) for name, (subject, _) in students.items()}
    return {"teacher": paper.teacher_loss, **losses}, published


def table_11(paper, published):
    """Squared error of the kernel by layer, trained for it; ours is a share of the largest value, so ranks count."""
    ours, theirs = {}, {}
    for name in ("Fix", "DoF"):
        ours |= numbered(paper.kernel_errors(paper.subject(name, "l2")[0]), f"{name}.")
        theirs |= numbered((published or {}).get(name, []), f"{name}.")
    return ours, theirs


def table_12(paper, published):
    """Seconds of training; published: minutes."""
    return {f"{n} {loss}": paper.subject(n, loss)[1] for n, loss in product(STRATEGIES, LOSSES)}, published


TABLES = {"1": table_1, "2": table_2, "4": table_4, "5": table_5, "7": table_7, "11": table_11, "12": table_12}


def compared(ours, published):
    """Lay both out, with their rank correlation; where keys have two parts, as a grid."""
    same = [key for key in ours if key in published]
    note = "nothing published for this shape"
    if same:
        ranks = pandas.DataFrame([[ours[key], published[key]] for key in same]).corr("spearman").iloc[0, 1]
        note = f"rank correlation {ranks:.3f}"
    if all("." in key for key in ours):
        names, tops = (list(dict.fromkeys(key.split(".")[part] for key in ours)) for part in (0, 1))
        rows = [("", *tops)]
        for name in names:
            for label, values in ((name, ours), ("  published", published))[: 2 if same else 1]:
                rows.append((label, *(shown(values.get(f"{name}.{top}")) for top in tops)))
    else:
        rows = [("", "ours", "published"), *((key, shown(ours[key]), shown(published.get(key))) for key in ours)]
    return f"{columns(rows)}\n{note}"


def shown(value):
    """Write a number with four digits, and nothing as nothing."""
    return "" if value is None else f"{value:.4g}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--text", default="builtin", help="the paper: a tenth of Wikipedia (dataset:…)")
    parser.add_argument("--length", type=int, default=1024, help="tokens; the paper: 1024 (GPT-2), 2048 (Pythia)")
    parser.add_argument("--texts", type=int, default=8, help="T of algorithm 1, which the paper does not give")
    parser.add_argument("--samples", type=int, default=2048, help="J, which it does not give")
    parser.add_argument("--features", type=int, help="C (default: as published, or the head size)")
    parser.add_argument("--ridge-exponent", type=int, help="n of λ = 2^-n (default: as published, or 8)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="the paper: 128 (GPT-2), 64 (Pythia)")
    parser.add_argument("--judged", type=int, default=8, help="texts that losses are taken on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args(arguments)
    with quiet():
        paper, result = Paper(arguments), {}
        print(f"{arguments.model}: C = {paper.features}, λ = {paper.profile.settings.reference:g}")
        print(f"algorithm 1: {paper.seconds:.1f} s, published {paper.published.get('algorithm 1', '–')}")
        for name in arguments.tables:
            ours, published = TABLES[name](paper, paper.published.get(f"table {name}", {}))
            result[name] = {"ours": ours, "published": published}
            print(f"\ntable {name}: {TABLES[name].__doc__}\n{compared(ours, published)}")
    if arguments.out:
        options = {name: str(value) for name, value in vars(arguments).items()}
        arguments.out.write_text(json.dumps({"asked": options, "tables": result}, indent=1))


if __name__ == "__main__":
    main()
