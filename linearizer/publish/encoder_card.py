"""The card of an encoder's student: what it is, how to load it, how near it is to its teacher, and its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, quality_table
from linearizer.encoders.encoder_run import STUDENT
from linearizer.encoders.kinds import kind_of
from linearizer.plan.encoder_inspection import LATENTS
from linearizer.publish.card_parts import Card, public_text
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

    def facts(self) -> dict[str, Any]:
        encoder = self.encoder
        judged = (replace(each, text=public_text(each.text)) for each in encoder.judgements.values())
        return {
            "encoder": encoder,
            "blocks": sorted((block for block, _ in encoder.ways.ways), key=math.prod),
            "slots": sorted(slots for _, slots in encoder.ways.ways),
            "globals": encoder.both_ways.first + encoder.both_ways.last,
            "choice": describe_choice(encoder),
            "tables": [quality_table(encoder, each) for each in judged],
            "steps": encoder.plan.steps,
        }

    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        for judgement in self.encoder.judgements.values():
            text, student = public_text(judgement.text), judgement.rows[STUDENT]
            about = f", {describe_inputs(self.encoder, judgement.tokens)}"
            yield text, about, "KL to the teacher", student.kl.mean
            yield text, about, "agreement with the teacher", student.agreement.mean
