"""What the head of a card tells the Hub: the teacher and its terms, what the student is, and what it kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from linearizer.publish.evaluation_table import measures
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
        repo_id = found["name"].partition("@")[0] if found["revision"] else None
        name = repo_id or Path(found["name"]).name
        return Teacher(name, repo_id, found["revision"], found["gated"], found.get("terms", {}))


def metadata(plan: Plan, teacher: Teacher, title: str, rows: Sequence[dict[str, Any]]) -> ModelCardData:
    """Say to the Hub what the student is."""
    results = results_of(plan, rows)
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


def results_of(plan: Plan, rows: Sequence[dict[str, Any]]) -> list[EvalResult]:
    """Give the student's own measures as results that the Hub can list."""
    student = next((row for row in rows if row["name"] == "student"), None)
    where = plan.text.split(":")[1] if of_the_hub(plan.text) else plan.text
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=where,
            dataset_name=f"{plan.text}, kept from training",
            metric_type=re.sub(r"\W+", "_", one.name.lower()).strip("_"),
            metric_name=one.name,
            metric_value=round(one.value, 4),
        )
        for one in (measures(student) if student else ())
        if one.value is not None
    ]


def of_the_hub(text: str) -> bool:
    """Tell a data set that others find from one that only its owner has."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def one_line(text: str) -> str:
    """Keep what can be printed, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
