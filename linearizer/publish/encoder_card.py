"""The card of an encoder's student: what it is, how to load it, how near it is to its teacher, and its limits."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

import linearizer
from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, judge_encoder, quality_table
from linearizer.encoders.encoder_run import STUDENT
from linearizer.encoders.kinds import kind_of
from linearizer.plan.encoder_inspection import LATENTS, EncoderInspection
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.publish.card import (
    TAGS,
    CitedTeacher,
    describe_licence,
    describe_origin,
    escape_markdown,
    folded,
    is_on_hub,
    one_line,
    public_terms,
    public_text,
    table_markdown,
)
from linearizer.run.files import write_whole

TASKS = {  # pipelines of the Hub, by the class of transformers that loads a teacher
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
    "DiffusionPipeline": "text-to-image",
}
SNIPPETS = {
    "texts": """\
from transformers import $auto_class, AutoTokenizer

name = $name$revision
model = $auto_class.from_pretrained(name$pinned, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name$pinned)
out = model(**tokenizer("A long text", return_tensors="pt"))""",
    "pictures": """\
from PIL import Image
from transformers import $auto_class, AutoImageProcessor

name = $name$revision
model = $auto_class.from_pretrained(name$pinned, trust_remote_code=True)
processor = AutoImageProcessor.from_pretrained(name$pinned)
out = model(**processor(images=Image.open("picture.jpg"), return_tensors="pt"))""",
    LATENTS: """\
from diffusers import $auto_class

pipeline = $auto_class.from_pretrained($name, trust_remote_code=True)""",
}


def add_card(encoder: EncoderRun) -> None:
    """Put a card into the checkpoint of a run."""
    write_whole(encoder.checkpoint / "README.md", write_card(encoder))


def write_card(encoder: EncoderRun, repo_id: str | None = None) -> str:
    """Write the card of a run's student."""
    teacher = CitedTeacher.of(encoder.inspection)
    title = repo_id.partition("/")[2] if repo_id else f"{teacher.name}, linearized"
    verdict = judge_encoder(encoder)
    judged = [replace(each, text=public_source(each.text)) for each in encoder.judgements.values()]
    tables = [table_markdown(quality_table(encoder, each)) for each in judged]
    plan = public_plan(encoder.plan, teacher)
    whole_plan = json.dumps(plan, indent=1).replace("`", "\\u0060")
    body = Template((Path(__file__).parent / "encoder_card.md").read_text(encoding="utf-8")).substitute(
        title=escape_markdown(title),
        verdict="" if verdict is None else f"> {verdict.sentence}\n\n",
        library=kind_of(encoder.inspection).library,
        summary=describe_student(encoder, teacher),
        snippet=write_snippet(encoder, repo_id or "PATH/OF/THIS/FOLDER"),
        evaluation="\n\n".join(tables) or "The student was not evaluated.",
        trained=f"trained its layers for {encoder.plan.steps:,} steps" if encoder.plan.steps else "trained nothing",
        version=linearizer.__version__,
        plan=folded("The whole plan", f"```json\n{whole_plan}\n```"),
        licence=describe_licence(teacher),
    )
    return f"---\n{build_metadata(encoder, teacher, title).to_yaml(line_break=chr(10)).strip()}\n---\n{body}"


def describe_student(encoder: EncoderRun, teacher: CitedTeacher) -> str:
    """Describe in one paragraph what the student is."""
    ways, how = encoder.ways, encoder.both_ways
    blocks, slots = sorted((block for block, _ in ways.ways), key=math.prod), sorted(slots for _, slots in ways.ways)
    sizes = from_to(*(" × ".join(map(str, block)) for block in (blocks[0], blocks[-1])))
    shared = f"all others share {from_to(str(slots[0]), str(slots[-1]))} slots"
    text = (
        f"This is {describe_origin(teacher)}, with its attention replaced: every token sees exactly the tokens of its "
        f"own block of {sizes} and of the blocks around it, and {how.first + how.last} global tokens; "
        f"{shared if slots[-1] else 'no others'}. A token sees {encoder.keys:.4g} keys, a mean over all heads, however "
        "many tokens there are, so time is linear in the tokens."
    )
    if chosen := describe_choice(encoder):
        text += f" How each head attends was chosen by measurement ({chosen})."
    if encoder.stretched:
        text += (
            f" The teacher has {encoder.inspection.tokens:,} positions. They were stretched to {encoder.tokens:,} by "
            "interpolation, and the student is compared with the teacher on these positions: a teacher that was "
            "trained on longer texts may serve better."
        )
    return text


def from_to(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def write_snippet(encoder: EncoderRun, name: str, revision: str | None = None) -> str:
    """Write the Python code that loads a student and lets it read."""
    return Template(SNIPPETS[encoder.inspection.reads]).substitute(
        auto_class=encoder.inspection.auto_class,
        name=json.dumps(name),
        revision=f"\nrevision = {json.dumps(revision)}" if revision else "",
        pinned=", revision=revision" if revision else "",
    )


def ways_to_load(encoder: EncoderRun) -> dict[str, str]:
    """Write the code that loads the student of a run from its folder, each way under its title."""
    place = str(encoder.checkpoint.absolute())
    ways = {"Load it": write_snippet(encoder, place)}
    if (encoder.checkpoint / "modules.json").is_file():
        load = f"SentenceTransformer({json.dumps(place)}, trust_remote_code=True)"
        ways["Load it for sentences"] = f"from sentence_transformers import SentenceTransformer\n\nmodel = {load}"
    return ways


def public_plan(plan: EncoderPlan, teacher: CitedTeacher) -> dict[str, Any]:
    """Remove the folders of this machine from a plan."""
    model = plan.model if teacher.repo_id else teacher.name
    return {
        **asdict(plan),
        "model": one_line(model),
        "text": public_text(plan.text),
        "pictures": plan.pictures and public_source(plan.pictures),
    }


def public_source(source: str) -> str:
    """Name a text or a folder of pictures without the folder that it lies in."""
    return one_line(Path(source).name) if source.startswith(("/", ".", "~")) else public_text(source)


def build_metadata(encoder: EncoderRun, teacher: CitedTeacher, title: str) -> ModelCardData:
    """Describe the student to the Hub."""
    plan, inspection = encoder.plan, encoder.inspection
    source = plan.pictures or plan.text
    return ModelCardData(
        base_model=teacher.repo_id,
        base_model_relation="finetune" if teacher.repo_id else None,
        pipeline_tag=pipeline_of(inspection),
        library_name=kind_of(inspection).library,
        tags=TAGS,
        datasets=[source.split(":")[1]] if is_on_hub(source) else None,
        model_name=one_line(title),
        eval_results=list_results(encoder) or None,
        **public_terms(teacher),
    )


def pipeline_of(inspection: EncoderInspection) -> str:
    features = "image-feature-extraction" if inspection.reads == "pictures" else "feature-extraction"
    return TASKS.get(inspection.auto_class, features)


def list_results(encoder: EncoderRun) -> list[EvalResult]:
    """List the student's results in the form of the Hub."""
    results = []
    for judgement in encoder.judgements.values():
        source, student = public_source(judgement.text), judgement.rows[STUDENT]
        named = {"KL to the teacher": student.kl, "agreement with the teacher": student.agreement}
        results += [
            EvalResult(
                task_type=pipeline_of(encoder.inspection),
                dataset_type=source.split(":")[1] if is_on_hub(source) else source,
                dataset_name=f"{source}, {describe_inputs(encoder, judgement.tokens)}",
                metric_type=name.lower().replace(" ", "_"),
                metric_name=name,
                metric_value=round(estimate.mean, 4),
            )
            for name, estimate in named.items()
        ]
    return results
