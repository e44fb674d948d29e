"""The run of an encoder: begin -> attend linearly -> distil -> save -> judge beside controls.

RUN/encoder.json     its plan, as decided
RUN/checkpoint/      the student, which transformers loads
RUN/quality.json     how close it is to its teacher, beside the student before its training and controls

What is finished is kept: a run that is resumed goes on after the last of these.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearizer.encoders.attention_both_ways import BothWays
from linearizer.encoders.distill_encoder import distil
from linearizer.encoders.encoder_inputs import (
    EncoderFiles,
    Inputs,
    list_pictures,
    load_encoder,
    load_files,
    read_pictures,
    read_texts_whole,
)
from linearizer.encoders.encoder_plan import EncoderPlan, spend_keys
from linearizer.encoders.encoder_quality import MergedTokens, Outputs, Quality, compare, read_outputs
from linearizer.encoders.inspect_encoder import EncoderInspection, inspect_encoder, reads_both_ways
from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from linearizer.errors import FolderError, RequestError, TextError
from linearizer.hub.models import Source, fetch, find_model
from linearizer.plan.json_products import parse_object, read_json
from linearizer.plan.options import differences
from linearizer.progress import Progress, Steps
from linearizer.quiet import quiet
from linearizer.run.files import replacing, write_whole, writing
from linearizer.teacher.devices import choose_device
from linearizer.teacher.load import load_config

PLAN, QUALITY, CHECKPOINT = "encoder.json", "quality.json", "checkpoint"
SENTENCES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*_*/config.json")
STUDENT, UNTRAINED, WINDOW, MERGED = "student", "before training", "window", "merged tokens"


@dataclass(frozen=True)
class EncoderRun:
    """The folder of an encoder's run, and what was decided before its work."""

    folder: Path
    plan: EncoderPlan
    source: Source
    inspection: EncoderInspection
    files: EncoderFiles

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    @property
    def tokens(self) -> int:
        """The tokens of a text or picture."""
        return self.plan.length or self.inspection.tokens

    @property
    def reads_texts(self) -> bool:
        return self.inspection.reads == "texts"

    @cached_property
    def both_ways(self) -> BothWays:
        """How the student attends."""
        axes = 1 if self.reads_texts else 2
        return spend_keys(self.plan.budget, axes, self.files.first, self.files.last, self.plan.slots)

    @property
    def quality(self) -> dict[str, Quality]:
        """How close the student and its controls are to the teacher, as far as they were judged."""
        path = self.folder / QUALITY
        return read_json(dict[str, Quality], path.read_text(encoding="utf-8")) if path.is_file() else {}


def is_encoder(model: str, token: str | None = None) -> bool:
    """Whether a model reads in both directions, so that its run is one of this room."""
    source = find_model(model, token)
    return source.head is None and reads_both_ways(load_config(source, token))


def inspect(model: str, token: str | None = None) -> EncoderInspection:
    """Inspect an encoder without downloading weights; refuse one that cannot be linearized."""
    source = find_model(model, token)
    return inspect_encoder(source, load_config(source, token))


def begin(folder: Path, plan: EncoderPlan, token: str | None = None, resume: bool = False) -> EncoderRun:
    """Begin a run, or open the run to resume; all that can be refused before the work is refused here."""
    with writing(folder):
        begun = (folder / PLAN).is_file()
    if begun and not resume:
        raise FolderError(f"{str(folder)!r} holds a run already: add --resume to go on with it, or name another folder")
    if not begun and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderError(f"{str(folder)!r} holds something else: name a folder that is new or empty")
    source = find_model(plan.model, token)
    inspection = inspect_encoder(source, load_config(source, token))
    plan = replace(plan, model=source.pinned or plan.model, length=decide_length(plan, inspection))
    if begun:
        kept = parse_object((folder / PLAN).read_text(encoding="utf-8"))
        if others := differences(asdict(plan), kept):
            raise RequestError(
                f"{str(folder)!r} was begun with another plan ({'; '.join(others)}): ask for the same, or name "
                "another folder"
            )
    run = EncoderRun(folder, plan, source, inspection, load_files(source, inspection, token))
    inspection.check_worth(plan.budget, run.tokens)
    _ = run.both_ways
    if not run.reads_texts:
        check_pictures(plan)
    if not begun:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, plan.to_json())
    return run


def decide_length(plan: EncoderPlan, inspection: EncoderInspection) -> int | None:
    """Return the tokens of a text; the size of a picture is its processor's."""
    if inspection.reads == "pictures":
        if plan.length is not None:
            raise RequestError("--length is for texts: the processor of the model decides how large a picture is")
        return None
    if plan.pictures is not None:
        raise RequestError(f"--pictures is for models of pictures, and {plan.model!r} reads texts: leave it out")
    if plan.length is not None and plan.length > inspection.tokens:
        raise RequestError(f"{plan.model!r} has {inspection.tokens} positions: ask for a --length of as many or fewer")
    return plan.length or inspection.tokens


def check_pictures(plan: EncoderPlan) -> None:
    """Refuse a folder without pictures to judge on and some to learn from."""
    if plan.pictures is None:
        raise RequestError(f"{plan.model!r} reads pictures: name a folder of pictures with --pictures")
    count = sum(1 for _ in list_pictures(plan.pictures))
    least = plan.texts + min(plan.steps, 1) * plan.batch
    if count < least:
        raise TextError(f"{plan.pictures!r} has {count} pictures, and {least} are needed: add some, or ask for fewer")


def linearize(run: EncoderRun, token: str | None = None) -> Steps[dict[str, Quality]]:
    """Make the student of a run and judge it, from where the run stands."""
    with quiet():
        learnt, judged = read_inputs(run, token)
        if not run.checkpoint.is_dir():
            student = make_student(run, load_encoder(run.source, load_config(run.source, token), token))
            torch.manual_seed(run.plan.seed)
            if run.plan.steps:
                yield from distil(student, learnt, run.plan.batch)
            save(run, student, token)
        if not run.quality:
            rows = yield from judge(run, judged, token)
            write_whole(run.folder / QUALITY, json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1))
    return run.quality


def read_inputs(run: EncoderRun, token: str | None) -> tuple[list[Inputs], list[Inputs]]:
    """Read inputs to learn from, and later inputs to judge on, of which nothing was learnt."""
    plan, count = run.plan, run.plan.learnt + run.plan.texts
    if run.reads_texts:
        inputs = read_texts_whole(plan.text, run.files, run.tokens, count, token)
    else:
        inputs = read_pictures(str(plan.pictures), run.files, count)
    least = plan.texts + min(plan.steps, 1) * plan.batch
    if len(inputs) < least:
        raise TextError(
            f"{plan.text!r} has {len(inputs)} texts of {run.tokens} tokens, and {least} are needed: name a longer "
            "--text, or ask for a shorter --length or fewer --texts"
        )
    return inputs[: -plan.texts][: plan.learnt], inputs[-plan.texts :]


def make_student(run: EncoderRun, teacher: PreTrainedModel) -> LinearizedEncoder:
    """Let a teacher attend as the run decided; it changes in place."""
    how = run.both_ways
    config = LinearizedEncoderConfig(
        base=teacher.config,
        auto_class=run.inspection.auto_class,
        block=list(how.block),
        slots=how.slots,
        first=how.first,
        last=how.last,
        teacher={"name": run.source.repo_id or Path(run.source.name).name, "revision": run.source.revision},
    )
    return LinearizedEncoder.from_teacher(teacher.to(choose_device(run.plan.device)), config)


def save(run: EncoderRun, student: LinearizedEncoder, token: str | None = None) -> None:
    """Write weights, config, the student's code, and the files that read texts or pictures.

    Of a sentence encoder its pooling is kept, so that sentence-transformers loads the student as it loads the teacher.
    """
    with replacing(run.checkpoint) as unfinished:
        student.save_pretrained(unfinished)
        run.files.reader.save_pretrained(unfinished)
        content = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
        entry = content["auto_map"]["AutoModel"]  # transformers names the code under one class
        content["auto_map"] |= {run.inspection.auto_class: entry}
        (unfinished / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        originals = fetch(run.source, SENTENCES, token)
        for path in (path for pattern in SENTENCES for path in originals.glob(pattern) if path.is_file()):
            place = unfinished / path.relative_to(originals)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def load_student(folder: Path) -> LinearizedEncoder:
    """Load a student with the code of this package."""
    student, report = LinearizedEncoder.from_pretrained(folder, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise FolderError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: write the checkpoint again")
    return student.eval()


def judge(run: EncoderRun, inputs: Sequence[Inputs], token: str | None) -> Steps[dict[str, Quality]]:
    """Compare the student that was saved, itself before its training, and controls with the teacher."""
    device = choose_device(run.plan.device)
    teacher = load_encoder(run.source, load_config(run.source, token), token).to(device)
    names = [STUDENT, *([UNTRAINED] if run.plan.steps else []), WINDOW, MERGED]
    expected, rows = read_outputs(teacher, inputs), dict[str, Quality]()
    yield Progress("judge", 1, len(names) + 1, "models")
    for name in names:
        if name == STUDENT:
            student = load_student(run.checkpoint).to(device)
        elif UNTRAINED not in rows and WINDOW not in rows:
            student = make_student(run, teacher)
        rows[name] = judge_control(student, name, run.both_ways, inputs, expected)
        yield Progress("judge", len(rows) + 1, len(names) + 1, "models")
    return rows


def judge_control(
    student: LinearizedEncoder, name: str, how: BothWays, inputs: Sequence[Inputs], expected: Outputs
) -> Quality:
    """Compare a student with its teacher as it is, or with a control of as many keys in its place."""
    control: Any = how
    if name == WINDOW:
        control = spend_keys(int(how.keys), len(how.block), how.first, how.last, slots=False)
    elif name == MERGED:
        control = MergedTokens(int(how.keys))
    student.attend_with(control)
    return compare(expected, read_outputs(student, inputs), getattr(control, "keys", how.keys))
