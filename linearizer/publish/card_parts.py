"""What the cards of all students have: metadata, how to load them, the plan, the licence, and Markdown.

Names and texts from others are escaped: nothing in them becomes markup or metadata.
"""

from __future__ import annotations

import html
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from huggingface_hub import EvalResult, ModelCardData

import linearizer
from linearizer.encoders.encoder_report import judge_any_run
from linearizer.hub.models import DEMO
from linearizer.plan.inspection import ModelFacts
from linearizer.report.tables import Table
from linearizer.run.files import write_whole
from linearizer.run.folder import Run
from linearizer.run.names import HubName

TAGS = ["linearizer", "linear-attention", "linearized", "custom_code"]
LINK = r"https?://[\w./~%#?=&:+@-]+"
LOCAL = ("/", ".", "~")  # beginnings of the folders of a machine


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
    def of(teacher: ModelFacts) -> CitedTeacher:
        asked = HubName.of(teacher.name) if teacher.revision else None
        repo_id, file = (asked.repo_id, asked.file) if asked else (None, None)
        name = repo_id or Path(teacher.name).name
        return CitedTeacher(name, repo_id, teacher.revision, teacher.gated, teacher.terms, file)


class Card(ABC):
    """The card of a run's student: the methods that are not here say what differs between kinds of students."""

    template: ClassVar[str]  # a file of this room
    task: str  # of the Hub
    snippet: str  # the code that loads the student and uses it
    auto_class: str  # that loads it
    library: str = "transformers"  # that this class is of

    def __init__(self, run: Run, inspection: ModelFacts) -> None:
        self.run, self.teacher = run, CitedTeacher.of(inspection)

    @abstractmethod
    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        """List the results of the student: the text, what is said of it, the name of the measure, and its value."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Write the fields of the template that differ."""

    def write_snippet(self, name: str, revision: str | None = None) -> str:
        """Write the Python code that loads the student by its name and uses it."""
        return Template(self.snippet).substitute(
            auto_class=self.auto_class,
            name=json.dumps(name),
            revision=f"\nrevision = {json.dumps(revision)}" if revision else "",
            pinned=", revision=revision" if revision else "",
        )

    def add(self) -> None:
        """Put the card into the checkpoint of the run."""
        write_whole(self.run.checkpoint / "README.md", self.write())

    def write(self, repo_id: str | None = None) -> str:
        title = repo_id.partition("/")[2] if repo_id else f"{self.teacher.name}, linearized"
        verdict, plan = judge_any_run(self.run), json.dumps(self.public_plan(), indent=1).replace("`", "\\u0060")
        body = Template((Path(__file__).parent / self.template).read_text(encoding="utf-8")).substitute(
            title=escape_markdown(title),
            verdict="" if verdict is None else f"> {verdict.sentence}\n\n",
            library=self.library,
            snippet=self.write_snippet(repo_id or "PATH/OF/THIS/FOLDER"),
            version=linearizer.__version__,
            plan=folded("The whole plan", f"```json\n{plan}\n```"),
            licence=describe_licence(self.teacher),
            **self.describe(),
        )
        head = self.build_metadata(title).to_yaml(line_break="\n")
        return f"---\n{head.strip()}\n---\n{body}"

    def public_plan(self) -> dict[str, Any]:
        """Pin the teacher of the plan, and remove the folders of this machine from it."""
        teacher, plan = self.teacher, asdict(self.run.any_plan)
        plan["model"] = (
            str(HubName(teacher.repo_id, teacher.revision, teacher.file)) if teacher.repo_id else teacher.name
        )
        plan |= {name: public_text(plan[name]) for name in ("text", "pictures") if plan.get(name)}
        return {name: one_line(value) if isinstance(value, str) else value for name, value in plan.items()}

    def build_metadata(self, title: str) -> ModelCardData:
        """Describe the student to the Hub."""
        plan = self.public_plan()
        learnt = plan.get("pictures") or plan["text"]
        results = [
            EvalResult(
                task_type=self.task,
                dataset_type=text.split(":")[1] if is_on_hub(text) else text,
                dataset_name=text + about,
                metric_type=re.sub(r"\W+", "_", name.lower()).strip("_"),
                metric_name=name,
                metric_value=round(value, 4),
            )
            for text, about, name, value in self.list_measures()
            if math.isfinite(value)
        ]
        return ModelCardData(
            base_model=self.teacher.repo_id,
            base_model_relation="finetune" if self.teacher.repo_id else None,
            pipeline_tag=self.task,
            library_name=self.library,
            tags=TAGS,
            datasets=[learnt.split(":")[1]] if is_on_hub(learnt) else None,
            model_name=one_line(title),
            eval_results=results or None,
            **public_terms(self.teacher),
        )


def describe_origin(teacher: CitedTeacher) -> str:
    """Name a teacher, and where it is found."""
    if teacher.repo_id:
        page, revision = f"https://huggingface.co/{teacher.repo_id}", teacher.revision or ""
        return f"[{escape_markdown(teacher.repo_id)}]({page}) at revision [`{revision[:12]}`]({page}/tree/{revision})"
    if teacher.name == DEMO:
        return "the demo model that comes with Linearizer"
    return f"{escape_markdown(teacher.name)}, a model in a local folder that is not on the Hub"


def describe_licence(teacher: CitedTeacher) -> str:
    """Describe the licence of the student, which is its teacher's."""
    terms = public_terms(teacher)
    name = terms.get("license_name") or terms.get("license")
    name = ", ".join(name) if isinstance(name, list) else name
    if not name:
        return "The card of the teacher states no licence: ask its author before you use or share the student."
    link = terms.get("license_link")
    at = f" (<{link}>)" if isinstance(link, str) and re.fullmatch(LINK, link) else ""
    gated = " The teacher is gated: users of the student must accept the terms on the teacher's page." * teacher.gated
    return f"The weights are the teacher's, and so is the licence: {escape_markdown(name)}{at}.{gated}"


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


def public_text(source: str) -> str:
    """Name a source of text or pictures without its folder."""
    kind, _, path = source.partition(":")
    if kind == "dataset" and path.startswith(LOCAL):  # a local folder: no id of the Hub begins so
        folder, colon, options = path.partition(":")
        return one_line(f"dataset:{Path(folder).name}{colon}{options}")
    if source.startswith(LOCAL):
        return one_line(Path(source).name)
    return one_line(f"file:{Path(path).name}" if kind == "file" else source)


def is_on_hub(text: str) -> bool:
    """Whether a text is a data set of the Hub, and not data that only its owner has."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def table_markdown(table: Table) -> str:
    """Write a table as Markdown."""
    head, *rows = [[escape_markdown(str(cell)) for cell in row] for row in table.rows]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, *map(escape_markdown, table.notes)])


def folded(title: str, content: str) -> str:
    """Fold Markdown under a title."""
    return f"<details><summary>{html.escape(title)}</summary>\n\n{content}\n\n</details>"


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown and HTML show it as it is."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(one_line(text), quote=False))


def one_line(text: str) -> str:
    """Keep the printable characters of a text, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
