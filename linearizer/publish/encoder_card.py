"""The card of an encoder's student: what it is, how to load it, how near it is to its teacher, and its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, quality_table
from linearizer.encoders.encoder_run import STUDENT
from linearizer.encoders.kinds import kind_of
from linearizer.plan.encoder_inspection import LATENTS
from linearizer.publish.card_parts import Card, CitedTeacher, describe_origin, public_text, table_markdown
from linearizer.run.folder import Run

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


class EncoderCard(Card):
    """The card of the student of an encoder or a denoiser."""

    template = "encoder_card.md"

    def __init__(self, run: Run) -> None:
        self.encoder = EncoderRun(run)
        inspection = self.encoder.inspection
        super().__init__(run, inspection)
        self.snippet, self.auto_class = SNIPPETS[inspection.reads], inspection.auto_class
        self.library = kind_of(inspection).library
        features = "image-feature-extraction" if inspection.reads == "pictures" else "feature-extraction"
        self.task = TASKS.get(self.auto_class, features)

    def write_ways_to_load(self) -> dict[str, str]:
        """Write the code that loads the student from its folder, each way under its title."""
        place = self.run.checkpoint.absolute()
        ways = {"Load it": self.write_snippet(str(place))}
        if (place / "modules.json").is_file():
            load = f"SentenceTransformer({json.dumps(str(place))}, trust_remote_code=True)"
            ways["Load it for sentences"] = f"from sentence_transformers import SentenceTransformer\n\nmodel = {load}"
        return ways

    def describe(self) -> dict[str, str]:
        encoder, steps = self.encoder, self.encoder.plan.steps
        judged = (replace(each, text=public_text(each.text)) for each in encoder.judgements.values())
        tables = [table_markdown(quality_table(encoder, each)) for each in judged]
        return {
            "summary": describe_student(encoder, self.teacher),
            "evaluation": "\n\n".join(tables) or "The student was not evaluated.",
            "trained": f"trained its layers for {steps:,} steps" if steps else "trained nothing",
        }

    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        for judgement in self.encoder.judgements.values():
            text, student = public_text(judgement.text), judgement.rows[STUDENT]
            about = f", {describe_inputs(self.encoder, judgement.tokens)}"
            yield text, about, "KL to the teacher", student.kl.mean
            yield text, about, "agreement with the teacher", student.agreement.mean


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
