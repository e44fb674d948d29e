"""The cards of students of causal language models and of encoders: the facts for a template, and the results.

A template escapes whatever it shows, except Markdown, so that names and texts from others become neither markup nor
metadata.
"""

from __future__ import annotations

import html
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import linearizer
from linearizer.amounts import count_in_words
from linearizer.encoders.encoder_folder import EncoderRun
from linearizer.encoders.encoder_report import describe_choice, describe_inputs, judge_any_run, quality_table
from linearizer.encoders.encoder_run import STUDENT
from linearizer.encoders.kinds import kind_of
from linearizer.plan.allocation import ROW_TITLES, StateSize
from linearizer.plan.inspection import ModelFacts
from linearizer.plan.plan import Plan
from linearizer.report.head_needs import needs_of, needs_table
from linearizer.report.parts import PART_VIEWS
from linearizer.report.tables import Table, describe_environment, describe_heads
from linearizer.report.verdict import candidates_table, find_correction
from linearizer.run.events import EventName, newest_events
from linearizer.run.files import write_whole
from linearizer.run.folder import Run
from linearizer.run.names import HubName
from linearizer.run.results import Part
from linearizer.run.training_end import read_training

TAGS = ["linearizer", "linear-attention", "linearized", "custom_code"]
LINK = r"https?://[\w./~%#?=&:+@-]+"
LOCAL = ("/", ".", "~")  # beginnings of the names of local folders
TASKS = {  # pipelines of the Hub, by the class of transformers that loads a teacher
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
    "DiffusionPipeline": "text-to-image",
}
MEASURED_AT_ONCE = {"language", "recall"}  # parts that every run measures; the card does not fold their tables


class Markdown(str):
    """A text that is shown as it is."""


@dataclass(frozen=True)
class CitedTeacher:
    """The teacher of a student, as the card cites it."""

    name: str
    repo_id: str | None  # None: a local folder, which nobody else can find
    revision: str | None
    gated: bool
    terms: dict[str, Any]  # its licence and language
    file: str | None = None  # of its weights, if the repository has several

    @staticmethod
    def of(teacher: ModelFacts) -> CitedTeacher:
        hub_name = HubName.of(teacher.name) if teacher.revision else None
        repo_id, file = (hub_name.repo_id, hub_name.file) if hub_name else (None, None)
        terms = public_terms(teacher.terms, f"{repo_id}/blob/{teacher.revision}" if repo_id else None)
        return CitedTeacher(repo_id or Path(teacher.name).name, repo_id, teacher.revision, teacher.gated, terms, file)


def public_terms(terms: dict[str, Any], place: str | None) -> dict[str, Any]:
    """Copy a teacher's licence and language; make a link to the licence that is relative to `place` absolute."""
    copied: dict[str, Any] = {
        name: one_line(value) if isinstance(value, str) else [one_line(item) for item in value]
        for name, value in terms.items()
    }
    link = copied.pop("license_link", None)
    if isinstance(link, str) and re.fullmatch(LINK, link):
        copied["license_link"] = link
    elif place and isinstance(link, str) and re.fullmatch(r"[\w./-]+", link):
        copied["license_link"] = f"https://huggingface.co/{place}/{link}"
    return copied


class Card(ABC):
    """The card of a run's student; subclasses add what differs between kinds of students."""

    template: ClassVar[str]  # a file of this room
    task: str  # of the Hub: what the student does
    judged: str = ""  # the task that it is judged by, if it is another
    auto_class: str  # that loads the student
    library: str = "transformers"  # that this class is of
    reads: str = "texts"  # or pictures, or latents

    def __init__(self, run: Run, inspection: ModelFacts) -> None:
        self.run, self.teacher = run, CitedTeacher.of(inspection)

    @abstractmethod
    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        """List the results of the student: the text, a remark about it, the name of the measure, and its value."""

    @property
    @abstractmethod
    def weight_change(self) -> str:
        """How the student's weights were made from the teacher's, in words; empty: they are unchanged."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Collect the facts that the template shows."""

    def write_snippet(self, name: str, revision: str | None = None) -> str:
        """Write the Python code that loads and uses the student of this name."""
        pinned = json.dumps(revision) if revision else ""
        code = ENVIRONMENT.get_template("snippet.md").render(card=self, name=json.dumps(name), revision=pinned)
        return code.rstrip()

    def add(self) -> None:
        """Put the card into the checkpoint of the run."""
        write_whole(self.run.checkpoint / "README.md", self.write())

    def write(self, repo_id: str | None = None) -> str:
        title = repo_id.partition("/")[2] if repo_id else f"{self.teacher.name}, linearized"
        body = ENVIRONMENT.get_template(self.template).render(
            title=title,
            verdict=judge_any_run(self.run),
            teacher=self.teacher,
            library=self.library,
            change=self.weight_change,
            snippet=self.write_snippet(repo_id or "PATH/OF/THIS/FOLDER"),
            version=linearizer.__version__,
            plan_json=json.dumps(self.public_plan(), indent=1).replace("`", "\\u0060"),
            **self.facts(),
        )
        head = self.build_metadata(title).to_yaml(line_break="\n")
        return f"---\n{head.strip()}\n---\n{body}"

    def public_plan(self) -> dict[str, Any]:
        """Return the plan, with its teacher's revision and without folders of this machine."""
        teacher, plan = self.teacher, asdict(self.run.any_plan)
        plan["model"] = (
            str(HubName(teacher.repo_id, teacher.revision, teacher.file)) if teacher.repo_id else teacher.name
        )
        plan |= {name: public_text(plan[name]) for name in ("text", "pictures") if plan.get(name)}
        return {name: one_line(value) if isinstance(value, str) else value for name, value in plan.items()}

    def build_metadata(self, title: str) -> ModelCardData:
        """Describe the student to the Hub."""
        plan = self.public_plan()
        source = plan.get("pictures") or plan["text"]
        results = [
            EvalResult(
                task_type=self.judged or self.task,
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
            # the Hub knows four relations, and none of them is true of a teacher with unchanged weights
            base_model_relation="finetune" if self.teacher.repo_id and self.weight_change else None,
            pipeline_tag=self.task,
            library_name=self.library,
            tags=TAGS,
            datasets=[source.split(":")[1]] if is_on_hub(source) else None,
            model_name=one_line(title),
            eval_results=results or None,
            **self.teacher.terms,
        )


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
    """Whether a text is a data set of the Hub, not local data."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def table_markdown(table: Table) -> Markdown:
    """Write a table as Markdown."""
    head, *rows = [[escape_markdown(str(cell)) for cell in row] for row in table.rows]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return Markdown("\n\n".join([text, *map(escape_markdown, table.notes)]))


def escape_markdown(text: str) -> str:
    """Escape a text so that Markdown and HTML show it unchanged."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(one_line(text), quote=False))


def one_line(text: str) -> str:
    """Keep the printable characters of a text, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def show(value: object) -> str:
    """Write a value that a template shows."""
    return value if isinstance(value, Markdown) else escape_markdown(str(value))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    finalize=show,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {
    "raw": Markdown,
    "table": table_markdown,
    **{function.__name__: function for function in (candidates_table, count_in_words, describe_environment)},
}


def card_of(run: Run) -> Card:
    """Return the card of a run's student, of either kind."""
    return EncoderCard(run) if run.is_encoder_run else CausalCard(run)


class CausalCard(Card):
    """The card of the student of a causal language model."""

    template, task, auto_class = "causal_card.md", "text-generation", "AutoModelForCausalLM"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.inspection)
        if run.inspection.reads_pictures:
            self.task, self.judged = "image-text-to-text", self.task
            self.auto_class = "AutoModelForImageTextToText"

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The evaluation, without folders of this machine."""
        return {
            name: replace(part, read=part.read and replace(part.read, text=public_text(part.read.text)))
            for name, part in self.run.results.items()
        }

    @property
    def weight_change(self) -> str:
        plan, trained = self.run.plan, read_training(self.run)
        if not plan.changes_weights or not trained.done or not trained.keeps_adapters:
            return ""
        if plan.resolved_lora:
            gain = f" ({trained.gain_in_words})" * bool(trained.gain_in_words)
            return f"adapters of rank {plan.resolved_lora} on q, k, v and o were trained and merged into them{gain}"
        return "two matrices of each layer were fitted to the teacher's outputs by least squares"

    def facts(self) -> dict[str, Any]:
        run, allocation = self.run, self.run.require_allocation()
        state = StateSize.of(allocation, run.layers)
        return {
            "inspection": run.inspection,
            "allocation": allocation,
            "held": describe_heads(allocation),
            "state": state,
            "exact": allocation.exact_until(run.layers),
            "sizes": table_markdown(Table([ROW_TITLES, *state.rows()])),
            "parts": self.parts,
            "views": PART_VIEWS,
            "measured_at_once": MEASURED_AT_ONCE,
            "training": read_training(run),
            "plan": Plan(**self.public_plan()),
            "candidates": run.candidates,
            "correction": find_correction(run),
            "needs": needs_table(needs_of(run, allocation)),
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

    @property
    def weight_change(self) -> str:
        encoder = self.encoder
        changes = ["the table of positions was interpolated"] if encoder.stretched else []
        if encoder.plan.steps:
            newest = next(newest_events(self.run.log_file, EventName.DISTILL), {"total": encoder.plan.steps})
            steps = newest["total"]  # fewer than planned if the source was short
            undone = "which is undone if it did not lower the error on other inputs"
            changes.append(f"the layers were distilled for {steps:,} steps, {undone}")
        return "; ".join(changes)

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
        }

    def list_measures(self) -> Iterator[tuple[str, str, str, float]]:
        for judgement in self.encoder.judgements.values():
            text, student = public_text(judgement.text), judgement.rows[STUDENT]
            about = f", {describe_inputs(self.encoder, judgement.tokens)}"
            yield text, about, "KL to the teacher", student.kl.mean
            yield text, about, "agreement with the teacher", student.agreement.mean


def find_student(result: Any) -> Any:
    return next(subject for subject in result.subjects if subject.name == "student")
