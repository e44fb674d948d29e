"""What the head of a card tells the Hub: the teacher and its terms, what the student is, and what it kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from linearizer.run.folder import Run
from linearizer.run.plan import Plan

TAGS = ["linearizer", "linear-attention", "linearized", "custom_code"]
LINK = r"https?://[\w./~%#?=&:+@-]+"


@dataclass(frozen=True)
class Teacher:
    """What a student was made from, as far as its card says."""

    name: str
    repo_id: str | None  # None: a local folder, which nobody else can find
    revision: str | None
    gated: bool
    terms: dict[str, Any]

    @staticmethod
    def of(run: Run) -> Teacher:
        found = run.inspection
        repo_id = found.name.partition("@")[0] if found.revision else None
        return Teacher(repo_id or Path(found.name).name, repo_id, found.revision, found.gated, found.terms)


def metadata(plan: Plan, teacher: Teacher, title: str, parts: Mapping[str, Mapping[str, Any]]) -> ModelCardData:
    """Say to the Hub what the student is."""
    results = results_of(plan, parts)
    return ModelCardData(
        base_model=teacher.repo_id,
        base_model_relation="finetune" if teacher.repo_id else None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=TAGS,
        datasets=[plan.text.split(":")[1]] if of_the_hub(plan.text) else None,
        model_name=one_line(title),
        eval_results=results or None,
        **terms_of(teacher),
    )


def terms_of(teacher: Teacher) -> dict[str, Any]:
    """Take over licence and language; a link to a file beside the teacher is made one that works elsewhere."""
    terms = {
        name: one_line(said) if isinstance(said, str) else [one_line(each) for each in said]
        for name, said in teacher.terms.items()
    }
    link = terms.pop("license_link", None)
    if isinstance(link, str) and re.fullmatch(LINK, link):
        terms["license_link"] = link
    elif teacher.repo_id and isinstance(link, str) and re.fullmatch(r"[\w./-]+", link):
        terms["license_link"] = f"https://huggingface.co/{teacher.repo_id}/blob/{teacher.revision}/{link}"
    return terms


def results_of(plan: Plan, parts: Mapping[str, Mapping[str, Any]]) -> list[EvalResult]:
    """Give the student's own measures as results that the Hub can list; what is not finite is left out."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=text.split(":")[1] if of_the_hub(text) else text,
            dataset_name=f"{text}, kept from training" if text == plan.text else text,
            metric_type=re.sub(r"\W+", "_", name.lower()).strip("_"),
            metric_name=name,
            metric_value=round(value, 4),
        )
        for text, name, value in measures(parts)
        if math.isfinite(value)
    ]


def measures(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """List what was measured of the student: on what text, the measure's name, and its value."""
    if (language := parts.get("language")) is not None:
        text, student = language["text"], of_student(language)
        yield text, "loss", student["loss"]["mean"]
        ends = [*(f"{edge - 1}" for edge in language["edges"][1:]), ""]
        if len(ends) > 1:
            for begin, end, loss in zip(language["edges"], ends, student["by_position"], strict=True):
                yield text, f"loss at positions {begin}–{end}" if end else f"loss at positions {begin} and later", loss
        for name, key in (("KL to the teacher", "kl"), ("agreement with the teacher", "agreement")):
            if student[key] is not None:
                yield text, name, student[key]["mean"]
    if (recall := parts.get("recall")) is not None:
        for gap, loss in zip(recall["gaps"], of_student(recall)["second"], strict=True):
            yield recall["text"], f"recall after {gap}", loss


def of_student(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(one for one in part["subjects"] if one["name"] == "student")


def of_the_hub(text: str) -> bool:
    """Tell a data set that others find from one that only its owner has."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def one_line(text: str) -> str:
    """Keep what can be printed, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
