"""The metadata at the head of a card: the teacher and its terms, what the student is, and its results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.names import HubName
from linearizer.run.results import Part

TAGS = ["linearizer", "linear-attention", "linearized", "custom_code"]
LINK = r"https?://[\w./~%#?=&:+@-]+"


@dataclass(frozen=True)
class CitedTeacher:
    """The teacher of a student, as far as the card names it."""

    name: str
    repo_id: str | None  # None: a local folder, which nobody else can find
    revision: str | None
    gated: bool
    terms: dict[str, Any]
    file: str | None = None  # of its weights, where it is one of several in a repository

    @staticmethod
    def of(run: Run) -> CitedTeacher:
        teacher = run.inspection
        asked = HubName.of(teacher.name) if teacher.revision else None
        repo_id, file = (asked.repo_id, asked.file) if asked else (None, None)
        name = repo_id or Path(teacher.name).name
        return CitedTeacher(name, repo_id, teacher.revision, teacher.gated, teacher.terms, file)


def build_metadata(plan: Plan, teacher: CitedTeacher, title: str, parts: Mapping[str, Part]) -> ModelCardData:
    """Describe the student to the Hub."""
    results = list_results(plan, parts)
    return ModelCardData(
        base_model=teacher.repo_id,
        base_model_relation="finetune" if teacher.repo_id else None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=TAGS,
        datasets=[plan.text.split(":")[1]] if is_on_hub(plan.text) else None,
        model_name=one_line(title),
        eval_results=results or None,
        **public_terms(teacher),
    )


def public_terms(teacher: CitedTeacher) -> dict[str, Any]:
    """Copy the teacher's licence and language; a relative link to its licence becomes absolute."""
    terms = {
        name: one_line(value) if isinstance(value, str) else [one_line(each) for each in value]
        for name, value in teacher.terms.items()
    }
    link = terms.pop("license_link", None)
    if isinstance(link, str) and re.fullmatch(LINK, link):
        terms["license_link"] = link
    elif teacher.repo_id and isinstance(link, str) and re.fullmatch(r"[\w./-]+", link):
        terms["license_link"] = f"https://huggingface.co/{teacher.repo_id}/blob/{teacher.revision}/{link}"
    return terms


def list_results(plan: Plan, parts: Mapping[str, Part]) -> list[EvalResult]:
    """List the student's finite results in the form of the Hub."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=text.split(":")[1] if is_on_hub(text) else text,
            dataset_name=f"{text}, kept from training" if text == plan.text else text,
            metric_type=re.sub(r"\W+", "_", name.lower()).strip("_"),
            metric_name=name,
            metric_value=round(value, 4),
        )
        for text, name, value in list_measures(parts)
        if math.isfinite(value)
    ]


def list_measures(parts: Mapping[str, Part]) -> Iterator[tuple[str, str, float]]:
    """List the results of the student: the text, the name of the measure, and its value."""
    if (part := parts.get("language")) is not None and part.read is not None:
        text, student = part.read.text, student_of(part.result.subjects)
        yield text, "loss", student.loss.mean
        for name, estimate in (("KL to the teacher", student.kl), ("agreement with the teacher", student.agreement)):
            if estimate is not None:
                yield text, name, estimate.mean
        for result in part.result.lengths[:-1]:
            if (kl := student_of(result.subjects).kl) is not None:
                yield text, f"KL to the teacher over the first {result.length} tokens", kl.mean
    if (part := parts.get("recall")) is not None and part.read is not None:
        for gap, loss in zip(part.result.gaps, student_of(part.result.subjects).second, strict=True):
            yield part.read.text, f"recall after {gap}", loss


def student_of(subjects: Sequence[Any]) -> Any:
    return next(subject for subject in subjects if subject.name == "student")


def is_on_hub(text: str) -> bool:
    """Tell a data set of the Hub from data that only its owner has."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def one_line(text: str) -> str:
    """Keep the printable characters of a text, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
