"""The tables of the paper, from this project's code, beside the published figures and with their rank correlation.

python -m tests.benchmarks.paper MODEL            tables 1, 2, 4, 5, 7, 11 and 12; --tables names some of them
python -m tests.benchmarks.paper fit MODEL        which reading of algorithm 1 gives tables 2 and 1 best

MODEL: gpt2, EleutherAI/pythia-1b, a folder, demo, or tiny: a GPT-2 of the same shape, small and random, of which only
shapes and ranks mean anything. What the paper leaves open is an option; the defaults are its text where that is clear.
"""

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from linearizer.amounts import columns
from linearizer.evaluate.head_errors import spearman
from linearizer.evaluate.speed import Meter
from linearizer.evaluate.subjects import Subject, read_losses
from linearizer.hub.models import find_model
from linearizer.method.by_freedoms import allocate_by_freedoms
from linearizer.method.checkpoint import make_layer_students, put_student_into
from linearizer.method.measure_run import measure_profile
from linearizer.plan.plan import Plan
from linearizer.plan.profile import ProfileSettings
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
from tests.benchmarks.paper_fit import allocate_as_paper, fit, head_freedoms, shown

PUBLISHED = json.loads((Path(__file__).with_suffix(".json")).read_text(encoding="utf-8"))
TABLES = ("1", "2", "4", "5", "7", "11", "12")
LOSSES = ("direct", "softmax", "l2")


class Paper:
    """A model, and what the tables share: its profile, its students, what their training took and gave."""

    def __init__(self, arguments):
        self.arguments = arguments
        with tempfile.TemporaryDirectory() as folder:
            name = tiny_gpt2(folder) if arguments.model == "tiny" else arguments.model
            self.teacher = load_teacher_of(
                Plan.of("paper", model=name, features=64, device=arguments.device, dtype=arguments.dtype)
            )
        self.layers = self.teacher.inspection.layers
        shape = (len(self.layers), self.layers[0].query_heads)
        fitting = (
            name for name in ("gpt2", "pythia-1b") if shape == (PUBLISHED[name]["layers"], PUBLISHED[name]["heads"])
        )
        self.published = PUBLISHED.get(next(fitting, None), {})
        self.features = arguments.features or self.published.get("features") or max(16, self.layers[0].key_dim)
        self.ridge = 2.0 ** -(arguments.ridge_exponent or self.published.get("ridge_exponent", 8))
        length = min(arguments.length, self.teacher.inspection.max_positions or arguments.length)
        count = arguments.steps * arguments.batch + arguments.judged
        texts = read_texts(
            arguments.text,
            self.teacher.tokenizer,
            length,
            max(count, arguments.texts),
            least=arguments.batch + 1,
            seed=arguments.seed,
            model=self.teacher.model,
        )
        self.measured, self.judged = (
            texts[: arguments.texts],
            texts[-min(arguments.judged, len(texts) - arguments.batch) :],
        )
        self.learnt = texts[: len(texts) - len(self.judged)]
        self.trained = {}

    def begin(self):
        """Measure the teacher, and make it a student."""
        arguments, begin = self.arguments, time.perf_counter()
        self.profile = self.measure(
            arguments.normalise, arguments.gauge, arguments.sinks, arguments.samples, arguments.seed
        )
        self.seconds = time.perf_counter() - begin
        teacher = Subject("teacher", self.teacher.model)
        self.teacher_loss, self.teacher_seconds = self.loss_of(teacher), self.seconds_to_write(teacher)
        fix = self.allocation("Fix")
        self.student = put_student_into(self.teacher.model, self.layers, fix, "prf", arguments.seed)

    def measure(self, normalise, gauge, sinks, samples, seed):
        """Run algorithm 1 as far as the degrees of freedom."""
        how = {"normalise": normalise, "gauge": gauge, "sinks": sinks, "samples": samples, "seed": seed}
        ridges = tuple(2.0**-exponent for exponent in range(21))
        return finish(
            measure_profile(
                self.teacher.model, self.measured, self.layers, ProfileSettings(**how, per="query", ridges=ridges)
            )
        ).profile

    def dimensions(self, profile, over=None):
        """Features of every layer."""
        return [row[0].features for row in self.allocation("DoF", profile, over).heads if row]

    def allocation(self, name, profile=None, over=None):
        """Share features out as a row of the paper's tables does."""
        dof = {"max": "dof", "mean": "dof-mean"}[over or self.arguments.over]
        strategy = {"Fix": "fix", "DoF": dof, "DoF+clip": "dof-clip"}[name]
        profile = profile or self.profile
        profile = replace(profile, settings=replace(profile.settings, reference=self.ridge))
        allocate = allocate_as_paper if self.arguments.rounding == "paper" else allocate_by_freedoms
        return allocate(profile, self.layers, features=self.features, strategy=strategy)

    def subject(self, name, loss, feature_map="prf"):
        """Make a student of the paper, and train it; also note how long that took."""
        if (name, loss) not in self.trained:
            allocation = self.allocation(name if name in ("Fix", "DoF", "DoF+clip") else "Fix")
            self.student.config.feature_map = feature_map
            heads = make_layer_students(self.student, self.layers, allocation, self.arguments.seed)
            subject, begin = Subject(name, self.student, allocation, heads), time.perf_counter()
            if loss is not None:
                settings = TrainingSettings(
                    loss=loss, steps=self.arguments.steps, batch=self.arguments.batch, seed=self.arguments.seed,
                    decay=self.arguments.decay, warmup=self.arguments.warmup, window_dropout=0.0, repeats=0.0,
                )  # fmt: skip
                with subject.at_work():
                    finish(distill(self.student, self.learnt, settings))
            self.trained[name, loss] = subject, time.perf_counter() - begin
        return self.trained[name, loss]

    def rows(self):
        """All that tables 7 and 12 train: strategy × loss."""
        return itertools.product(("Fix", "DoF", "DoF+clip"), LOSSES)

    def seconds_to_write(self, subject):
        """Write a few tokens after a text, and reckon 1,000."""
        meter = Meter(subject, self.layers, 60.0, self.arguments.seed)
        meter.time_texts(32, 1)
        return 1000 / meter.time_texts(self.judged.shape[1], 1).write_rate

    def loss_of(self, subject):
        return read_losses([subject], self.judged)[0].mean().item()


def tiny_gpt2(folder):
    """Save a random GPT-2 of 12 layers and 12 heads that reads the demo model's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=4096, n_embd=192, n_layer=12, n_head=12, n_positions=256, initializer_range=0.1,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_model("demo").folder).save_pretrained(folder)
    return folder


def numbered(values):
    return {str(number + 1): value for number, value in enumerate(values)}


def gridded(rows):
    return {f"{layer}.{head}": value for layer, row in numbered(rows).items() for head, value in numbered(row).items()}


def table_1(paper):
    """Features of every layer."""
    return numbered(paper.dimensions(paper.profile)), numbered(paper.published.get("table 1", []))


def table_2(paper):
    """Degrees of freedom of every head, at λ = 2^-8."""
    return gridded(head_freedoms(paper.profile)), gridded(paper.published.get("table 2", []))


def table_4(paper):
    """Seconds to write 1,000 tokens; beside them the teacher's, which the paper's reviewers asked for."""
    ours = {"teacher": paper.teacher_seconds}
    for name in ("Fix", "DoF", "DoF+clip"):
        ours[name] = paper.seconds_to_write(paper.subject(name, None)[0])
    return ours, paper.published.get("table 4", {})


def table_5(paper):
    """Milliseconds of training for one text, by loss."""
    texts = paper.arguments.steps * paper.arguments.batch
    return {loss: 1000 * paper.subject("Fix", loss)[1] / texts for loss in LOSSES}, paper.published.get("table 5", {})


def table_7(paper):
    """Next-token loss."""
    ours = {"teacher": paper.teacher_loss}
    for name, loss in paper.rows():
        ours[f"{name} {loss}"] = paper.loss_of(paper.subject(name, loss)[0])
    ours["DiJiang"] = paper.loss_of(paper.subject("DiJiang", "softmax", "dijiang")[0])
    ours["Performer"] = paper.loss_of(paper.subject("Performer", None, "performer")[0])
    return ours, paper.published.get("table 7", {})


def table_11(paper):
    """Squared error of the kernel by layer, trained for it; ours is a share of the largest value, so ranks count."""
    ours, published = {}, {}
    for name in ("Fix", "DoF"):
        ours |= {
            f"{name}.{layer}": error for layer, error in kernel_errors(paper, paper.subject(name, "l2")[0]).items()
        }
        published |= {
            f"{name}.{n}": value for n, value in numbered(paper.published.get("table 11", {}).get(name, [])).items()
        }
    return ours, published


def table_12(paper):
    """Seconds of training; published: minutes."""
    return {f"{n} {loss}": paper.subject(n, loss)[1] for n, loss in paper.rows()}, paper.published.get("table 12", {})


def kernel_errors(paper, subject):
    """Mean squared error of the kernel in every layer, on text that was kept from training."""
    students = dict(zip((layer_number(m) for m in attention_modules(paper.student.base)), subject.heads, strict=True))
    result = {}

    def observe(module, q, k, v, scale, _):
        group = students[layer_number(module)].groups[0]
        loss, _ = rows_loss("l2", group, AttentionInputs(q, k, v, scale), 1.0)
        result[str(layer_number(module) + 1)] = loss.item()

    with observing(paper.student.base, observe):
        logits_of(paper.student.base, paper.judged[:2])
    return result


def compared(ours, published):
    """Lay both out, with their rank correlation; where keys have two parts, as a grid."""
    same = [key for key in ours if key in published]
    ranks = spearman([ours[key] for key in same], [published[key] for key in same])
    note = (
        "nothing published for this shape"
        if not same
        else f"rank correlation {'–' if ranks is None else f'{ranks:.3f}'}"
    )
    if all("." in key for key in ours):
        lines = sorted({key.split(".")[0] for key in ours}, key=lambda name: (len(name), name))
        tops = list(dict.fromkeys(key.split(".")[1] for key in ours))
        rows = [("", *tops)]
        for line in lines:
            rows.append((line, *(shown(ours.get(f"{line}.{top}")) for top in tops)))
            if same:
                rows.append(("  published", *(shown(published.get(f"{line}.{top}")) for top in tops)))
        return f"{columns(rows)}\n{note}"
    return (
        columns([("", "ours", "published"), *((key, shown(ours[key]), shown(published.get(key))) for key in ours)])
        + "\n"
        + note
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="[fit] MODEL")
    parser.add_argument("--tables", default=",".join(TABLES), help="1,2,4,5,7,11,12")
    parser.add_argument("--seeds", type=int, default=1, help="of a fit: how many, from --seed on")
    parser.add_argument("--text", default="builtin", help="the paper: a tenth of Wikipedia (dataset:…)")
    parser.add_argument("--length", type=int, default=1024, help="tokens; the paper: 1024 (GPT-2), 2048 (Pythia)")
    parser.add_argument("--texts", type=int, default=8, help="T of algorithm 1, which the paper does not give")
    parser.add_argument("--samples", type=int, default=2048, help="J, which it does not give; a fit tries half, too")
    parser.add_argument("--features", type=int, help="C (default: as published, or the head size)")
    parser.add_argument("--ridge-exponent", type=int, help="n of λ = 2^-n (default: as published, or 8)")
    parser.add_argument(
        "--normalise",
        choices=("trace", "J", "none"),
        default="trace",
        help="of the Gram matrix, which is printed as none: then all heads saturate",
    )
    parser.add_argument(
        "--gauge", choices=("raw", "centred"), default="raw", help="keys as they are, or less their mean"
    )
    parser.add_argument("--sinks", type=int, default=0, help="first tokens that are not sampled")
    parser.add_argument("--over", choices=("max", "mean"), default="max", help="of a layer's heads")
    parser.add_argument("--rounding", choices=("paper", "tiles"), default="paper")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="the paper: 128 (GPT-2), 64 (Pythia)")
    parser.add_argument(
        "--decay", choices=("none", "cosine", "linear"), default="none", help="of learning rates; not given"
    )
    parser.add_argument("--warmup", type=int, default=0, help="steps; not given")
    parser.add_argument("--judged", type=int, default=8, help="texts that losses are taken on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    arguments = parser.parse_args(arguments)
    *command, arguments.model = arguments.words
    if command not in ([], ["fit"]):
        parser.error(f"{' '.join(command)!r} is no command: write fit MODEL, or MODEL alone")
    with quiet():
        paper = Paper(arguments)
        if command:
            print(fit(paper))
            return
        show_tables(paper)


def show_tables(paper):
    arguments, result = paper.arguments, {}
    paper.begin()
    published = paper.published.get("algorithm 1", "–")
    print(f"{arguments.model}: C = {paper.features}, λ = {paper.ridge:g}")
    print(f"algorithm 1: {paper.seconds:.1f} s, published {published}")
    for name in arguments.tables.split(","):
        table = globals()[f"table_{name}"]
        ours, published = table(paper)
        result[name] = {"ours": ours, "published": published}
        print(f"\ntable {name}: {table.__doc__}\n{compared(ours, published)}")
    if arguments.out:
        choices = {name: str(value) for name, value in vars(arguments).items()}
        arguments.out.write_text(json.dumps({"asked": choices, "tables": result}, indent=1))


if __name__ == "__main__":
    main()
