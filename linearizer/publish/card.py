"""The cards of students of causal language models and of encoders: the facts for a template, and the results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, quality_table
from linearizer.encoders.encoder_run import STUDENT
from linearizer.encoders.kinds import kind_of
from linearizer.plan.allocation import ROW_TITLES, StateSize
from linearizer.plan.plan import Plan
from linearizer.publish.card_parts import Card, public_text, table_markdown
from linearizer.report.parts import PART_VIEWS
from linearizer.report.prediction import find_correction
from linearizer.report.tables import Table, describe_heads
from linearizer.run.folder import Run, read_training
from linearizer.run.results import Part

TASKS = {  # pipelines of the Hub, by the class of transformers that loads a teacher
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
    "DiffusionPipeline": "text-to-image",
}
MEASURED_AT_ONCE = {"language", "recall"}  # parts that every run measures; the card does not fold their tables


def card_of(run: Run) -> Card:
    """Return the card of a run's student, of either kind."""
    return EncoderCard(run) if run.is_encoder_run else CausalCard(run)


class CausalCard(Card):
    """The card of the student of a causal language model."""

    template, task, auto_class = "causal_card.md", "text-generation", "AutoModelForCausalLM"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.inspection)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The evaluation, without folders of this machine."""
        return {
            name: replace(part, read=part.read and replace(part.read, text=public_text(part.read.text)))
            for name, part in self.run.results.items()
        }

    def facts(self) -> dict[str, Any]:
        run, allocation = self.run, self.run.require_allocation()
        state = StateSize.of(allocation, run.layers)
        return {
            "inspection": run.inspection,
            "allocation": allocation,
            "held": describe_heads(allocation),
            "state": state,
            "sizes": table_markdown(Table([ROW_TITLES, *state.rows()])),
            "parts": self.parts,
            "views": PART_VIEWS,
            "measured_at_once": MEASURED_AT_ONCE,
            "training": read_training(run),
            "plan": Plan(**self.public_plan()),
            "candidates": run.candidates,
            "correction": find_correction(run),
        }

    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        training_text = public_text(self.run.plan.text)
        if (part := self.parts.get("language")) is not None and part.read is not None:
            text, student = part.read.text, find_student(part.result)
            about = ", kept from training" * (text == training_text)
            yield text, about, "loss", student.loss.mean
            for name, each in (("KL to the teacher", student.kl), ("agreement with the teacher", student.agreement)):
                if each is not None:
                    yield text, about, name, each.mean
            for result in part.result.lengths[:-1]:
                if (kl := find_student(result).kl) is not None:
                    yield text, about, f"KL to the teacher over the first {result.length} tokens", kl.mean
        if (part := self.parts.get("recall")) is not None and part.read is not None:
            text = part.read.text
            for gap, loss in zip(part.result.gaps, find_student(part.result).second, strict=True):
                yield text, ", kept from training" * (text == training_text), f"recall after {gap}", loss


class EncoderCard(Card):
    """The card of the student of an encoder or a denoiser."""

    template = "encoder_card.md"

    def __init__(self, run: Run) -> None:
        self.encoder = EncoderRun(run)
        inspection = self.encoder.inspection
        super().__init__(run, inspection)
        self.reads, self.auto_class = inspection.reads, inspection.auto_class
        self.library = kind_of(inspection).library
        features = "image-feature-extraction" if self.reads == "pictures" else "feature-extraction"
        self.task = TASKS.get(self.auto_class, features)

    def write_ways_to_load(self) -> dict[str, str]:
        """Write the code that loads the student from its folder, by the titles of the ways."""
        place = self.run.checkpoint.absolute()
        ways = {"Load it": self.write_snippet(str(place))}
        if (place / "modules.json").is_file():
            load = f"SentenceTransformer({json.dumps(str(place))}, trust_remote_code=True)"
            ways["Load it for sentences"] = f"from sentence_transformers import SentenceTransformer\n\nmodel = {load}"
        return ways

    def facts(self) -> dict[str, Any]:
        encoder = self.encoder
        judged = (replace(judgement, text=public_text(judgement.text)) for judgement in encoder.judgements.values())
        return {
            "encoder": encoder,
            "blocks": sorted((block for block, _ in encoder.ways.ways), key=math.prod),
            "slots": sorted(slots for _, slots in encoder.ways.ways),
            "globals": encoder.both_ways.first + encoder.both_ways.last,
            "choice": describe_choice(encoder),
            "tables": [quality_table(encoder, judgement) for judgement in judged],
            "steps": encoder.plan.steps,
        }

    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        for judgement in self.encoder.judgements.values():
            text, student = public_text(judgement.text), judgement.rows[STUDENT]
            about = f", {describe_inputs(self.encoder, judgement.tokens)}"
            yield text, about, "KL to the teacher", student.kl.mean
            yield text, about, "agreement with the teacher", student.agreement.mean


def find_student(result: Any) -> Any:
    return next(subject for subject in result.subjects if subject.name == "student")
