"""The card of a student: its metadata, what it is, how to load it, its evaluation, its limits, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from linearizer.plan.allocation import ROW_TITLES, StateSize
from linearizer.plan.plan import Plan
from linearizer.publish.card_parts import Card, public_text, table_markdown
from linearizer.publish.encoder_card import EncoderCard
from linearizer.report.parts import PART_VIEWS
from linearizer.report.prediction import find_correction
from linearizer.report.tables import Table, describe_heads
from linearizer.run.folder import Run, read_training
from linearizer.run.results import Part

MEASURED_AT_ONCE = {"language", "recall"}  # parts that every run measures; their tables are not folded
SNIPPET = """\
from transformers import $auto_class, AutoTokenizer

name = $name$revision
model = $auto_class.from_pretrained(name$pinned, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name$pinned, trust_remote_code=True)
text = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=40)
print(tokenizer.decode(text[0]))"""


def card_of(run: Run) -> Card:
    """Return the card of a run's student, of whichever kind it is."""
    return EncoderCard(run) if run.of_encoder else CausalCard(run)


class CausalCard(Card):
    """The card of the student of a causal language model."""

    template, task, snippet, auto_class = "causal_card.md", "text-generation", SNIPPET, "AutoModelForCausalLM"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.inspection)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The evaluation, without the folders of this machine."""
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
        own = public_text(self.run.plan.text)
        if (part := self.parts.get("language")) is not None and part.read is not None:
            text, student = part.read.text, find_student(part.result)
            about = ", kept from training" * (text == own)
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
                yield text, ", kept from training" * (text == own), f"recall after {gap}", loss


def find_student(result: Any) -> Any:
    return next(subject for subject in result.subjects if subject.name == "student")
