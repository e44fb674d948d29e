"""The run of an encoder: decide -> price and choose -> attend linearly -> distil -> save -> judge beside controls.

encoder_folder.py describes its folder. Finished products are kept: a resumed run continues after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from linearizer.encoders.attention_both_ways import HeadsOfLayer
from linearizer.encoders.distill_encoder import distil
from linearizer.encoders.encoder_folder import BY_PRICE, EQUAL, PLAIN, QUALITY, WAYS, ChosenWays, EncoderRun
from linearizer.encoders.encoder_inputs import (
    Inputs,
    Shares,
    begin_of_text,
    is_dataset,
    list_pictures,
    load_encoder,
    load_files,
    read_pictures,
    read_texts_whole,
    share_out,
)
from linearizer.encoders.encoder_prices import choose_by_prices, list_offers, measure_prices
from linearizer.encoders.encoder_quality import Judgement, MergedTokens, Quality, describe_scores, read_outputs, score
from linearizer.encoders.inspect_encoder import inspect_encoder
from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from linearizer.encoders.sentence_files import check_modules, read_modules, read_sentence_files
from linearizer.encoders.stretch_positions import MOST_STRETCHED, stretch_positions
from linearizer.errors import FolderError, RequestError, TextError
from linearizer.evaluate.language import Units, owners_of
from linearizer.hub.models import Source, find_model
from linearizer.plan.encoder_plan import EncoderInspection, EncoderPlan
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.files import replacing
from linearizer.run.names import absolute_source
from linearizer.run.results import Request
from linearizer.run.stopping import log_progress
from linearizer.run.weight_digests import write_digests
from linearizer.teacher.devices import choose_device
from linearizer.teacher.load import load_config

STUDENT, UNTRAINED, MERGED, WINDOW = "student", "before training", "merged tokens", "window"
ALIKE = "all heads alike, before training"
PRICED, LEAST_PRICED = 16, 4  # texts on which ways to attend are priced; as many others decide between them
PRICED_TOKENS = 2**15  # of these texts: longer ones are fewer


def inspect(model: str, token: str | None = None) -> EncoderInspection:
    """Inspect an encoder without downloading weights; refuse one that cannot be linearized."""
    return inspect_source(find_model(model, token), token)


def inspect_source(source: Source, token: str | None) -> EncoderInspection:
    """Inspect an encoder; of its transformer sentence-transformers reads hidden states, whatever its config names."""
    is_headless = any(module.type.endswith(".Transformer") for module in read_modules(source, token))
    return inspect_encoder(source, load_config(source, token), "AutoModel" if is_headless else None)


def decide(plan: EncoderPlan, token: str | None = None) -> tuple[EncoderPlan, EncoderInspection]:
    """Decide the revision and the length that a plan leaves open; inspect its model with its tokenizer or processor."""
    source = find_model(plan.model, token)
    inspection = inspect_source(source, token)
    check_modules(source, token)
    length = decide_length(plan, inspection)
    files = load_files(source, inspection, token)
    if inspection.reads == "pictures":
        check_pictures(plan)
    inspection = replace(inspection, first=files.first, last=files.last)
    return replace(plan, model=source.pinned or plan.model, length=length), inspection


def decide_length(plan: EncoderPlan, inspection: EncoderInspection) -> int | None:
    """Return the tokens of a text; the size of a picture is its processor's."""
    if inspection.reads == "pictures":
        if plan.length is not None:
            raise RequestError("--length is for texts: the processor of the model decides how large a picture is")
        return None
    if plan.pictures is not None:
        raise RequestError(f"--pictures is for models of pictures, and {plan.model!r} reads texts: leave it out")
    most = inspection.tokens * (MOST_STRETCHED if inspection.stretches else 1)
    if plan.length is not None and plan.length > most:
        why = ", which are stretched to at most" if inspection.stretches else ":"
        raise RequestError(
            f"{plan.model!r} has {inspection.tokens} positions{why} {most:,}: ask for a --length of as many or fewer"
        )
    return plan.length or inspection.tokens


def check_pictures(plan: EncoderPlan) -> None:
    """Refuse a source with too few pictures to judge on and to learn from."""
    if plan.pictures is None:
        raise RequestError(f"{plan.model!r} reads pictures: name a folder or a data set of pictures with --pictures")
    if not is_dataset(plan.pictures):  # a data set is counted when it is read
        check_count(plan, sum(1 for _ in list_pictures(plan.pictures)))


def check_count(plan: EncoderPlan, count: int) -> None:
    """Refuse fewer pictures than a plan needs."""
    if count < plan.texts + plan.least:
        raise TextError(
            f"{plan.pictures!r} has {count} pictures, and {plan.texts + plan.least} are needed: add some, or ask for "
            "fewer"
        )


def make_and_judge(encoder: EncoderRun, token: str | None = None) -> Steps[None]:
    """Make the student of a run and its control, a window, and judge them; continue after the last product."""
    shares = read_shares(encoder, encoder.plan, token)
    learnt = Random(encoder.plan.seed).sample(shares.learnt, len(shares.learnt))  # else the last document would decide
    if not encoder.run.has_file(WAYS):
        chosen = yield from choose_ways(encoder, learnt, token)
        encoder.run.write_product(WAYS, chosen.to_json())
    for folder, layers in missing_students(encoder):
        student = make_student(encoder, load_teacher(encoder, token), layers)
        torch.manual_seed(encoder.plan.seed)
        if encoder.plan.steps:
            inputs = learnt[: encoder.plan.learnt]
            yield from log_progress(encoder.run, distil(student, inputs, encoder.plan.batch))
        save(encoder, student, folder, token)
    write_digests(encoder.run)
    if not encoder.judgements:
        yield from judge_and_keep(encoder, shares, encoder.plan, token)


def choose_ways(encoder: EncoderRun, inputs: Sequence[Inputs], token: str | None) -> Steps[ChosenWays]:
    """Choose how each head attends: by prices, all alike, or as a window, whichever has the lowest kl on other texts.

    All heads attend alike if there are too few texts to price and to choose on, and with pictures: in the mean over a
    picture the changes of all heads add up to far more than prices predict, so prices choose badly.
    """
    plan, equal = encoder.plan, encoder.uniform_layers(encoder.both_ways)
    count = min(PRICED, max(LEAST_PRICED, PRICED_TOKENS // encoder.tokens), len(inputs) // 2)
    if count < LEAST_PRICED or encoder.inspection.reads != "texts":
        return ChosenWays.of(EQUAL, equal, {})
    way, held_out = encoder.both_ways, inputs[count : 2 * count]
    offers = list_offers(plan.budget, way.first, way.last, plan.slots, encoder.tokens)
    teacher = load_teacher(encoder, token)
    expected = read_outputs(teacher, held_out)
    student = make_student(encoder, teacher, equal)
    prices = yield from log_progress(encoder.run, measure_prices(student, inputs[:count], offers, plan.seed))
    candidates = {
        BY_PRICE: choose_by_prices(prices, offers, plan.budget, encoder.tokens),
        EQUAL: equal,
        PLAIN: encoder.uniform_layers(encoder.plain_window),
    }
    kl = dict[str, float]()
    for name, layers in candidates.items():
        student.attend_with(layers)
        kl[name] = float(score(expected, read_outputs(student, held_out))["kl"].mean())
        yield Progress("check", len(kl), len(candidates), "students")
    best = min(kl, key=lambda name: kl[name])
    encoder.run.log(EventName.CHECKED, kept=best, kl=kl)
    return ChosenWays.of(best, candidates[best], kl)


def missing_students(encoder: EncoderRun) -> list[tuple[Path, list[HeadsOfLayer]]]:
    """List the checkpoints still to make: the student, and a window trained in the same way."""
    ways = [(encoder.run.checkpoint, encoder.ways.layers)]
    if encoder.plan.steps and not encoder.is_window:
        ways.append((encoder.window, encoder.uniform_layers(encoder.plain_window)))
    return [(folder, layers) for folder, layers in ways if not folder.is_dir()]


def evaluate(encoder: EncoderRun, request: Request, again: bool, token: str | None = None) -> Steps[Judgement]:
    """Judge the student of a run on other texts, or on the beginnings of the run's texts."""
    plan = plan_of_request(encoder, request)
    requested = source_of(plan), plan.length or encoder.tokens, plan.texts
    stored = {(x.text, x.tokens, x.inputs): x for x in encoder.judgements.values()}
    if requested in stored and not again:
        return stored[requested]
    return (yield from judge_and_keep(encoder, read_shares(encoder, plan, token), plan, token))


def judge_and_keep(encoder: EncoderRun, shares: Shares, plan: EncoderPlan, token: str | None) -> Steps[Judgement]:
    """Judge the student on a plan's texts or pictures, and store the judgement."""
    judgement = yield from log_progress(encoder.run, judge(encoder, shares, plan, token))
    keep_judgement(encoder, judgement)
    return judgement


def keep_judgement(encoder: EncoderRun, judgement: Judgement) -> None:
    """Store a judgement, in place of an earlier one on the same texts."""
    judgements = {**encoder.judgements, judgement.name: judgement}
    encoder.run.write_product(QUALITY, json.dumps({name: asdict(each) for name, each in judgements.items()}, indent=1))


def plan_of_request(encoder: EncoderRun, request: Request) -> EncoderPlan:
    """Return the plan of what to read; refuse options for causal models only, and what the student cannot read."""
    base, inspection, usual = encoder.plan, encoder.inspection, Request()
    served = ("text", "length", "texts") if inspection.reads == "texts" else ("texts",)
    requested, defaults = asdict(request), asdict(usual)
    if unserved := [name for name in requested if requested[name] != defaults[name] and name not in served]:
        raise RequestError(
            f"--{unserved[0].replace('_', '-')} is not for the student of this encoder: it is judged by "
            f"{', '.join(f'--{name}' for name in served)}"
        )
    if inspection.reads == "pictures":
        plan, limit = replace(base, texts=request.texts), encoder.tokens
    else:
        length, text = request.length or encoder.tokens, absolute_source(request.text or base.text)
        limit = max(encoder.tokens, inspection.tokens)
        plan = replace(base, text=text, length=length, texts=request.texts)
        inspection.check_worth(base.budget, length)
    if source_of(plan) == source_of(base) and (plan.texts > base.texts or (plan.length or 0) > encoder.tokens):
        raise RequestError(
            f"{str(encoder.run.folder)!r} kept {base.texts} {inspection.reads} of {encoder.tokens:,} tokens from its "
            "training: ask for fewer or shorter ones, or name another --text"
        )
    if (plan.length or 0) > limit:
        raise RequestError(f"{str(encoder.run.folder)!r} reads {limit:,} tokens at most: ask for a smaller --length")
    return plan


def source_of(plan: EncoderPlan) -> str:
    """Return the source of a plan's text or pictures."""
    return plan.pictures or plan.text


def read_shares(encoder: EncoderRun, plan: EncoderPlan, token: str | None) -> Shares:
    """Read inputs to learn from, and others, which were not learnt from, to judge on.

    From the run's source, shorter texts are beginnings of the texts that the run judges on.
    """
    files = load_files(find_model(plan.model, token), encoder.inspection, token)
    is_run_source = source_of(plan) == source_of(encoder.plan)
    full_plan = encoder.plan if is_run_source else replace(plan, steps=0)
    learnt = max(full_plan.learnt, 2 * PRICED * (encoder.inspection.reads == "texts")) if is_run_source else 0
    if encoder.inspection.reads == "texts":
        length = full_plan.length or encoder.tokens
        documents = read_texts_whole(full_plan.text, files, length, learnt, full_plan.texts, token)
        count = sum(map(len, documents))
        if count < (needed := full_plan.texts + full_plan.least):
            raise TextError(
                f"{full_plan.text!r} has {count} texts of {length} tokens, and {needed} are needed: "
                "name a longer --text, or ask for a shorter --length or fewer --texts"
            )
        shares = share_out(documents, learnt, full_plan.texts, full_plan.least)
    else:
        pictures = read_pictures(str(full_plan.pictures), files, learnt + full_plan.texts, token)
        check_count(full_plan, len(pictures))
        numbers = torch.arange(full_plan.texts)[:, None]
        shares = Shares(pictures[: -full_plan.texts][:learnt], pictures[-full_plan.texts :], numbers)
    judged = [begin_of_text(inputs, plan.length, files.last) for inputs in shares.judged[: plan.texts]]
    return replace(shares, judged=judged, documents=shares.documents[: plan.texts])


def load_teacher(encoder: EncoderRun, token: str | None = None) -> PreTrainedModel:
    """Load the teacher of a run; for texts longer than its positions, interpolate these."""
    source = find_model(encoder.plan.model, token)
    teacher = load_encoder(source, load_config(source, token), encoder.inspection.auto_class, token)
    if encoder.stretched:
        stretch_positions(teacher, encoder.tokens)
    return teacher.to(choose_device(encoder.plan.device))


def make_student(encoder: EncoderRun, teacher: PreTrainedModel, layers: Sequence[HeadsOfLayer]) -> LinearizedEncoder:
    """Turn a teacher, in place, into a student with these layers."""
    source = encoder.inspection
    origin: dict[str, Any] = {"name": source.repo_id or Path(source.name).name, "revision": source.revision}
    origin |= {"positions": source.tokens} if encoder.stretched else {}
    ways = asdict(ChosenWays.of("", layers, {}))
    kwargs = {name: ways[name] for name in ("ways", "heads", "first", "last")}
    config = LinearizedEncoderConfig(teacher.config, source.auto_class, **kwargs, teacher=origin)
    return LinearizedEncoder.from_teacher(teacher, config)


def save(encoder: EncoderRun, student: LinearizedEncoder, folder: Path, token: str | None = None) -> None:
    """Write weights, config, the student's code, and its tokenizer or processor.

    A sentence encoder keeps its pooling, so that sentence-transformers loads the student like the teacher.
    """
    source = find_model(encoder.plan.model, token)
    reader = load_files(source, encoder.inspection, token).reader
    with replacing(folder) as unfinished:
        student.save_pretrained(unfinished)
        if encoder.stretched:
            reader.model_max_length = encoder.tokens
        reader.save_pretrained(unfinished)
        content = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
        entry = content["auto_map"]["AutoModel"]  # transformers names the code under one class
        content["auto_map"] |= {encoder.inspection.auto_class: entry}
        (unfinished / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        stretched = encoder.tokens if encoder.stretched else None
        for name, content in read_sentence_files(source, stretched, token):
            place = unfinished / name
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)


def load_student(folder: Path) -> LinearizedEncoder:
    """Load a student with the code of this package."""
    try:
        LinearizedEncoderConfig.from_pretrained(folder).read_ways()
    except (IndexError, TypeError, ValueError) as error:
        raise FolderError(f"the config of {folder} does not say how heads attend: make the student again") from error
    student, report = LinearizedEncoder.from_pretrained(folder, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise FolderError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: write the checkpoint again")
    return student.eval()


def judge(encoder: EncoderRun, shares: Shares, plan: EncoderPlan, token: str | None) -> Steps[Judgement]:
    """Compare the students of an encoder with their teacher."""
    teacher, inputs = load_teacher(encoder, token), shares.judged
    drawn, owners = owners_of(shares.documents)
    expected, over = read_outputs(teacher, inputs), Units(owners)
    untrained = make_student(encoder, teacher, encoder.ways.layers)

    def attend_with(way: Any) -> LinearizedEncoder:
        untrained.attend_with(way)
        return untrained

    def load(folder: Path) -> LinearizedEncoder:
        return load_student(folder).to(teacher.device)

    rows = yield from compare(
        encoder, over, load, attend_with, lambda model: score(expected, read_outputs(model, inputs))
    )
    drawn = drawn if encoder.inspection.reads == "texts" else "pictures"
    return Judgement(source_of(plan), plan.length or encoder.tokens, len(inputs), drawn, over.count, rows)


def compare(
    encoder: EncoderRun,
    over: Units,
    load: Callable[[Path], Any],
    attend_with: Callable[[Any], Any],
    scored: Callable[[Any], dict[str, torch.Tensor]],
) -> Steps[dict[str, Quality]]:
    """Compare the saved student, the untrained student, and controls with the teacher."""
    way, ways, rows = encoder.both_ways, encoder.ways, dict[str, tuple[float, dict[str, torch.Tensor]]]()
    controls: dict[str, tuple[float, Any]] = {STUDENT: (encoder.keys, way if ways.chosen == EQUAL else ways.layers)}
    if encoder.plan.steps:
        controls[UNTRAINED] = controls[STUDENT]
    if ways.chosen != EQUAL:
        controls[ALIKE] = way.keys, way
    controls[MERGED] = int(way.keys), MergedTokens(int(way.keys))
    if not encoder.is_window:
        controls[WINDOW] = encoder.plain_window.keys, encoder.plain_window
    for name, (keys, attention) in controls.items():
        saved = {STUDENT: encoder.run.checkpoint, WINDOW: encoder.window}.get(name)
        student = load(saved) if saved is not None and saved.is_dir() else attend_with(attention)
        rows[name] = keys, scored(student)
        yield Progress("evaluate", len(rows), len(controls), "models")
    return {name: describe_scores(keys, scores, rows[STUDENT][1], over) for name, (keys, scores) in rows.items()}
