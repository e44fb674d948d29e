"""The tables of the paper, on a model at hand: does choosing features by degrees of freedom (DoF) beat Fix?

  python -m tests.benchmarks.paper --model MODEL              what is finished is kept, and a second call goes on
  python -m tests.benchmarks.paper --steps 50 200 --seeds 0 1 2 --minutes 60
  python -m tests.benchmarks.paper --table                    only write the tables of what has been measured

The method is that of Nishikawa, Higuchi and Suzuki, NeurIPS 2025, arXiv:2507.03340: positive random features alone, C
to a KV head in the mean (the size of a head), no window, no sinks, no exact begin; Fix, DoF, or DoF + clip (at most the
size of a head) × the losses softmax, L2 and direct; learning rates .02 and .2. Performer's features stay as drawn, and
DiJiang's weights are trained by the loss direct. Texts are the built-in ones, and each is trained on once as long as
they last. Every number of steps is a training of its own, so that one sees when rows no longer change their order.
Where the paper printed a figure for the model, it stands beside ours. Writes results/paper-MODEL.json and .md.
"""

import argparse
import json
import shutil
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch

from linearizer import pipeline
from linearizer.evaluate.generation import write
from linearizer.evaluate.language import read_scores
from linearizer.evaluate.subjects import Subject
from linearizer.method import checkpoint
from linearizer.method.decide import decide
from linearizer.method.initialise import initialise
from linearizer.method.measure_run import measure_teacher
from linearizer.method.recorder import samples_of
from linearizer.method.texts import TextsOfRun
from linearizer.plan.plan import Plan
from linearizer.progress import finish, quiet
from linearizer.run.files import write_whole
from linearizer.teacher import load as teacher_module
from linearizer.teacher.layers import layer_number
from linearizer.teacher.observing import observing
from linearizer.train.distill import distill
from linearizer.train.losses import AttentionInputs, hidden_states, layer_loss
from linearizer.train.settings import TrainingSettings
from tests.benchmarks.paper_table import write_tables
from tests.benchmarks.quality import begun, score
from tests.benchmarks.quality_table import RESULTS

CHOICES, LOSSES = ("fix", "dof", "dof+clip"), ("softmax", "l2", "direct")
BASELINES = {"performer": 0, "dijiang": 1}  # whether the baseline trains
SHARES = (0.5, 1, 2, 4)  # of C, at which the error of untrained features is measured
JUDGED, AT_ONCE = 8, 2  # texts
WRITTEN = 100  # tokens, to time inference


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--features", type=int, help="C (default: the size of a head)")
    parser.add_argument("--steps", nargs="*", type=int, default=[50, 200])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--texts", type=int, help="to measure degrees of freedom on (default: as many as a run)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--losses", nargs="*", default=LOSSES, choices=LOSSES)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it stops, to be called again")
    parser.add_argument("--out", type=Path, help="where results go (default: results/paper-MODEL)")
    parser.add_argument("--work", type=Path, default=Path("build") / "paper", help="what is made once is kept here")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(arguments)
    out = given.out or RESULTS / f"paper-{Path(given.model).name.lower()}"
    if not given.table:
        Bench(given, out.with_suffix(".json")).measure()
    print(write_tables(out))


class Bench:
    """The cells that have been measured, and all that they share."""

    def __init__(self, given, file):
        self.given, self.file, self.end = given, file, time.monotonic() + 60 * given.minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        self.cells = json.loads(file.read_text()) if file.exists() else {}
        if self.cells.setdefault("facts", self.facts()) != self.facts():
            raise SystemExit(f"{file} was measured with {self.cells['facts']}: ask for the same, or name another --out")

    def measure(self):
        """Measure what is missing, cell by cell; the cheapest first."""
        given = self.given
        asked = {"freedoms": self.freedoms, "teacher": self.judge_teacher}
        asked |= {f"error/{share}": lambda share=share: self.error_of(share) for share in SHARES}
        asked |= {f"speed/{choice}": lambda choice=choice: self.time_inference(choice) for choice in CHOICES}
        for steps in sorted(given.steps):
            for seed in given.seeds:
                rows = [(choice, loss) for loss in given.losses for choice in CHOICES]
                rows += [(name, "direct" if trains else "none") for name, trains in BASELINES.items()]
                asked |= {
                    f"{choice}/{loss}/{steps}/{seed}": lambda c=choice, x=loss, n=steps, s=seed: self.train(c, x, n, s)
                    for choice, loss in rows
                }
        for name, compute in asked.items():
            if name in self.cells or time.monotonic() > self.end:
                continue
            with quiet():
                self.cells[name] = compute()
            write_whole(self.file, json.dumps(self.cells, indent=0))
            print(f"{name}: {self.cells[name].get('loss', '')}", flush=True)

    @property
    def teacher(self):
        """A teacher that no student was put into yet."""
        return teacher_module.load_teacher_of(self.plan_of("fix"))

    @cached_property
    def features(self):
        return self.given.features or max(layer.key_dim for layer in pipeline.inspect(self.given.model).layers)

    def plan_of(self, choice, seed=0, features=None):
        """Return the paper's plan, or that of a baseline."""
        baseline = {"strategy": "fix", "feature_map": choice} if choice in BASELINES else {}
        options = {"strategy": choice.partition("+")[0], "length": self.given.length, "batch": self.given.batch}
        options |= {"features": features or self.features, "seed": seed, "dtype": "float32", "steps": 0}
        options |= {"texts": self.given.texts}
        return Plan.of("paper", model=self.given.model, **{**options, **baseline})

    def measured(self, plan):
        """Open a run of a plan with the profile of its seed, which is measured once."""
        run, kept = begun(self.given.work / "run", plan), self.given.work / self.file.stem / str(plan.seed)
        if not (kept / "seconds.json").exists():
            teacher, begun_at = self.teacher, time.perf_counter()
            finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
            shutil.copytree(run.folder / "state", kept / "state", dirs_exist_ok=True)
            shutil.copy(run.folder / "profile.json", kept)
            write_whole(kept / "seconds.json", json.dumps(time.perf_counter() - begun_at))
        shutil.copytree(kept / "state", run.folder / "state", dirs_exist_ok=True)
        shutil.copy(kept / "profile.json", run.folder)
        return run

    def facts(self):
        """Say what all cells have in common."""
        given = self.given
        return {"features": self.features, "batch": given.batch, "length": given.length, "texts": given.texts}

    def freedoms(self):
        """Return N(λ) of each query head at the λ of the paper's table, and the features of layers by C."""
        run = self.measured(self.plan_of("dof"))
        profile, seconds = run.profile, self.given.work / self.file.stem / "0" / "seconds.json"
        heads = [
            [
                profile.settings.at_reference(each)
                for each in (layer.query_freedoms or [h.freedoms for h in layer.heads])
            ]
            for layer in profile.layers
        ]
        chosen = {choice: self.features_of(run, choice) for choice in CHOICES}
        return {"heads": heads, "chosen": chosen, "seconds": json.loads(seconds.read_text())}

    def features_of(self, run, choice):
        """Return the features of a head by layer."""
        rows = self.allocate(run, choice).heads
        return [fmean(head.features for head in row) for row in rows if row]

    def allocate(self, run, choice):
        """Allocate as the paper does: clipped features are not given to other layers."""
        layers = pipeline.inspect(self.given.model).layers
        allocation = decide(run, run.plan.changed(strategy=self.plan_of(choice).strategy), layers)
        if choice != "dof+clip":
            return allocation
        rows = zip(allocation.heads, layers, strict=True)
        clipped = (tuple(replace(h, features=min(h.features, at.key_dim)) for h in row) for row, at in rows)
        return replace(allocation, heads=tuple(clipped))

    def student_of(self, run, choice):
        """Make an untrained student, whose features hold all of a text."""
        teacher, plan = self.teacher, run.plan
        how = self.allocate(run, choice), plan.feature_map, plan.seed
        student = checkpoint.put_student_into(teacher.model.float(), teacher.inspection.layers, *how)
        initialise(student, samples_of(run))
        return student.eval(), teacher

    def texts(self, plan, teacher, trained):
        """Return texts to train on, and texts to judge by, which are the same for all cells and were not measured."""
        first = plan.texts_measured
        count = first + JUDGED + trained
        texts = teacher_module.texts_of(replace(plan, seed=0), teacher, count, None, min(count, first + JUDGED + 1))
        return texts[first + JUDGED :], texts[first : first + JUDGED]

    def judge_teacher(self):
        """Return the teacher's own loss."""
        teacher, plan = self.teacher, self.plan_of("fix")
        _, judged = self.texts(plan, teacher, 0)
        subject = Subject("teacher", teacher.model.float().eval())
        with torch.inference_mode():
            (scores,) = read_scores([subject], judged)
        return {"loss": scores.loss.mean().item(), "tokens_per_second": speed_of(subject, judged)}

    def train(self, choice, loss, steps, seed):
        """Train one student by one loss, and judge it."""
        run = self.measured(self.plan_of(choice, seed))
        student, teacher = self.student_of(run, choice)
        texts, judged = self.texts(run.plan, teacher, steps * self.given.batch)
        settings = None if loss == "none" else self.settings_of(loss, steps, seed)
        begun_at = time.perf_counter()
        if settings is not None:
            finish(distill(student, texts, settings))
        seconds = (time.perf_counter() - begun_at) / (steps * self.given.batch)
        with torch.inference_mode():
            _, scores = score(student, judged, student)  # its own weights are still the teacher's
        found = {"loss": scores.loss.mean().item(), "kl": scores.kl.mean().item(), "seconds_a_text": seconds}
        return found | {"layers": self.errors_of(student, judged), "trained": len(texts)}

    def time_inference(self, choice):
        """Return the tokens that a student of a choice writes in a second."""
        run = self.measured(self.plan_of(choice))
        student, teacher = self.student_of(run, choice)
        return {"tokens_per_second": speed_of(Subject("student", student), self.texts(run.plan, teacher, 0)[1])}

    def settings_of(self, loss, steps, seed):
        batch = self.given.batch
        return TrainingSettings(loss, steps, batch, warmup=0, window_dropout=0.0, repeats=0.0, seed=seed)

    def error_of(self, share):
        """Return the errors of untrained features, a share of C in every head."""
        run = self.measured(self.plan_of("fix", features=max(16, round(self.features * share))))
        student, teacher = self.student_of(run, "fix")
        _, judged = self.texts(run.plan, teacher, 0)
        return {"layers": self.errors_of(student, judged), "features": run.plan.features}

    def errors_of(self, student, texts):
        """Return by loss the errors of all layers: of the kernel (L2), and the KL of attention rows (softmax)."""
        found = {"l2": {}, "softmax": {}}

        def observe(module, query, key, value, scale, _):
            inputs = AttentionInputs(query, key, value, scale)
            for loss, of_layers in found.items():
                excess = layer_loss(loss, module.student, inputs, None).excess
                of_layers.setdefault(layer_number(module), []).append(excess.item())

        with torch.no_grad(), observing(student, observe):
            for ids in texts.split(AT_ONCE):
                hidden_states(student, ids)
        return {loss: [fmean(of_layers[index]) for index in sorted(of_layers)] for loss, of_layers in found.items()}


def speed_of(subject, texts):
    """Time the writing of some tokens after a text."""
    prompt = texts[:1, : max(1, texts.shape[1] - WRITTEN)]
    write(subject, prompt, 2, None)
    begun_at = time.perf_counter()
    write(subject, prompt, WRITTEN, None)
    return WRITTEN / (time.perf_counter() - begun_at)


if __name__ == "__main__":
    main()
