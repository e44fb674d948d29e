"""The card of a student: its metadata, what it is, how to load it, its evaluation, its limits, and how it was made.

Names and texts from others are escaped: nothing in them becomes markup or metadata.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

import linearizer
from linearizer.amounts import count_in_words
from linearizer.hub.models import DEMO
from linearizer.plan.allocation import ROW_TITLES, Allocation, StateSize
from linearizer.plan.encoder_inspection import EncoderInspection
from linearizer.plan.head_bytes import Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.report.parts import PART_VIEWS
from linearizer.report.prediction import candidates_table, find_correction
from linearizer.report.tables import Table, describe_environment, describe_heads
from linearizer.report.verdict import judge_run
from linearizer.run.files import write_whole
from linearizer.run.folder import Run, Trained, read_training
from linearizer.run.names import HubName
from linearizer.run.results import Part

TAGS = ["linearizer", "linear-attention", "linearized", "custom_code"]
LINK = r"https?://[\w./~%#?=&:+@-]+"
MEASURED_AT_ONCE = {"language", "recall"}  # parts that every run measures; their tables are not folded
SUBJECTS_NOTE = (
    "The same code measured all subjects on the same text, which was not used for training, with one seed. The "
    "teacher has the same weights and softmax attention. `window` is the window control: a window with sinks that "
    "takes as many bytes as the student's state, with the bits a number that most of its heads have. Losses are in "
    "nats per token."
)
SNIPPET = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

name$revision
model = AutoModelForCausalLM.from_pretrained(name$pinned, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name$pinned, trust_remote_code=True)
text = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=40)
print(tokenizer.decode(text[0]))"""


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
    def of(teacher: Inspection | EncoderInspection) -> CitedTeacher:
        asked = HubName.of(teacher.name) if teacher.revision else None
        repo_id, file = (asked.repo_id, asked.file) if asked else (None, None)
        name = repo_id or Path(teacher.name).name
        return CitedTeacher(name, repo_id, teacher.revision, teacher.gated, teacher.terms, file)


def add_card(run: Run) -> None:
    """Put a card into the checkpoint of a run."""
    write_whole(run.checkpoint / "README.md", write_card(run))


def write_card(run: Run, repo_id: str | None = None) -> str:
    """Write the card of a run's student."""
    allocation, layers, teacher = run.require_allocation(), run.layers, CitedTeacher.of(run.inspection)
    plan = public_plan(run.plan, teacher)
    parts = {  # without the folders of this machine
        name: replace(part, read=part.read and replace(part.read, text=public_text(part.read.text)))
        for name, part in run.results.items()
    }
    training, again = read_training(run), "The same plan makes the same student again:"
    if training.early:
        again = f"The training was ended by hand. The same plan, not interrupted, trains all {training.asked:,} steps:"
    title = repo_id.partition("/")[2] if repo_id else f"{teacher.name}, linearized"
    head = build_metadata(plan, teacher, title, parts).to_yaml(line_break="\n")
    whole_plan = json.dumps(asdict(plan), indent=1).replace("`", "\\u0060")
    body = Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(
        title=escape_markdown(title),
        verdict="" if (verdict := judge_run(run)) is None else f"> {verdict.sentence}\n\n",
        summary=describe_student(allocation, layers, teacher) + describe_teacher(run.inspection),
        memory=table_markdown(Table([ROW_TITLES, *StateSize.of(allocation, layers).rows()])),
        allocation=folded("What every KV head keeps, exact window first", list_heads(allocation)),
        snippet=write_snippet(repo_id or "PATH/OF/THIS/FOLDER"),
        evaluation=write_evaluation(parts),
        limits=list_limits(allocation, training, parts, run.inspection.max_positions),
        made=describe_production(plan, training),
        chosen=describe_choice(run),
        again=again,
        version=linearizer.__version__,
        command=plan.command(),
        plan=folded("The whole plan", f"```json\n{whole_plan}\n```"),
        licence=describe_licence(teacher),
    )
    return f"---\n{head.strip()}\n---\n{body}"


def describe_teacher(inspection: Inspection) -> str:
    """Describe a teacher that is a mixture, a text tower or quantised, and what its student is compared with."""
    sentences = []
    if inspection.resting:
        active, total = count_in_words(inspection.active), count_in_words(inspection.parameters)
        sentences.append(f" Its experts are the teacher's: {active} of {total} parameters work for a token.")
    if inspection.tower_of:
        sentences.append(f" Its teacher is the text tower of {inspection.tower_of}: it reads no pictures.")
    if inspection.quantised:
        held = "stay so" if inspection.packed else "were expanded"
        kind = escape_markdown(", ".join(filter(None, (inspection.gguf, inspection.quantised))))
        sentences.append(
            f" Its teacher's weights are quantised ({kind}) and {held}: all that is said of the teacher here is said "
            "of the quantised model."
        )
    return "".join(sentences)


def write_snippet(name: str, revision: str | None = None) -> str:
    """Write the Python code that loads a student and generates text."""
    pinned = f"\nrevision = {json.dumps(revision)}" if revision else ""
    return Template(SNIPPET).substitute(
        revision=f" = {json.dumps(name)}{pinned}", pinned=", revision=revision" if revision else ""
    )


def public_plan(plan: Plan, teacher: CitedTeacher) -> Plan:
    """Pin the teacher of a plan, and remove the folders of this machine from it."""
    model = str(HubName(teacher.repo_id, teacher.revision, teacher.file)) if teacher.repo_id else teacher.name
    fields = {**asdict(plan), "model": model, "text": public_text(plan.text)}
    public: Any = {name: one_line(value) if isinstance(value, str) else value for name, value in fields.items()}
    return Plan(**public)


def public_text(source: str) -> str:
    """Name a source of text without its folder."""
    kind, _, path = source.partition(":")
    if kind == "dataset" and path.startswith(("/", ".", "~")):  # a local folder: no id of the Hub begins so
        folder, colon, options = path.partition(":")
        return one_line(f"dataset:{Path(folder).name}{colon}{options}")
    return one_line(f"file:{Path(path).name}" if kind == "file" else source)


def describe_student(allocation: Allocation, layers: Sequence[Layer], teacher: CitedTeacher) -> str:
    """Describe in one paragraph what the student is."""
    size = StateSize.of(allocation, layers)
    return (
        f"This is {describe_origin(teacher)}, with its attention replaced: instead of caching the keys and values of "
        "every token, a KV head keeps the first tokens and an exact window, and features, slots or a memory that stand "
        "for older tokens. "
        f"The strategy {escape_markdown(allocation.strategy)} made of them {describe_heads(allocation)}. The state "
        f"takes {size.in_words}; it is {size.beside_cache}."
    )


def describe_origin(teacher: CitedTeacher) -> str:
    """Name a teacher, and where it is found."""
    if teacher.repo_id:
        page, revision = f"https://huggingface.co/{teacher.repo_id}", teacher.revision or ""
        return f"[{escape_markdown(teacher.repo_id)}]({page}) at revision [`{revision[:12]}`]({page}/tree/{revision})"
    if teacher.name == DEMO:
        return "the demo model that comes with Linearizer"
    return f"{escape_markdown(teacher.name)}, a model in a local folder that is not on the Hub"


def list_heads(allocation: Allocation) -> str:
    """List what the heads hold, one line per layer."""
    unchanged = "unchanged: the teacher itself has a window here"
    held = (" · ".join(head.in_brief for head in heads) or unchanged for heads in allocation.heads)
    return table_markdown(Table([("layer", "KV heads"), *enumerate(held)]))


def write_evaluation(parts: Mapping[str, Part]) -> str:
    """Write the parts of an evaluation as tables; the tables of parts that were requested later are folded."""
    if not parts:
        return "The student was not evaluated."
    shown = [SUBJECTS_NOTE]
    for name, part in parts.items():
        view = PART_VIEWS[name]
        shown += [f"### {view.title}", view.question]
        tables = "\n\n".join(table_markdown(table) for table in view.tables(part))
        notes = "\n".join(f"- {escape_markdown(note)}" for note in describe_environment(part))
        numbers = f"{tables}\n\n{notes}"
        shown.append(numbers if name in MEASURED_AT_ONCE else folded("In numbers", numbers))
    return "\n\n".join(shown)


def table_markdown(table: Table) -> str:
    """Write a table as Markdown."""
    head, *rows = [[escape_markdown(str(cell)) for cell in row] for row in table.rows]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, *map(escape_markdown, table.notes)])


def describe_production(plan: Plan, training: Trained) -> str:
    """Describe how the student was made, and what became of its teacher's weights."""
    steps = f"{training.done:,} of {training.asked:,} steps" if training.early else f"{training.done:,} steps"
    trained = f", and trained it for {steps}" if training.done else ""
    weights = "The teacher's weights are unchanged"
    if training.done and plan.kept_lora:
        weights += f"; adapters of rank {plan.kept_lora} on q, k, v and o were trained"
    elif training.done and plan.changes_weights:
        weights += ", but for the two matrices of each layer that were fitted to the teacher's by least squares"
    return f"measured every KV head, divided the budget{trained}. {weights}"


def describe_choice(run: Run) -> str:
    """Describe what was predicted and measured of the student, and why its allocation was kept."""
    if (candidates := run.candidates) is None:
        return ""
    correction = find_correction(run)
    line = "" if correction is None else f"{correction.in_words}.\n\n"
    return f"{line}{folded(candidates.why, table_markdown(candidates_table(candidates)))}\n\n"


def folded(title: str, content: str) -> str:
    """Fold Markdown under a title."""
    return f"<details><summary>{html.escape(title)}</summary>\n\n{content}\n\n</details>"


def list_limits(allocation: Allocation, training: Trained, parts: Mapping[str, Part], positions: int | None) -> str:
    """List the limits of this student; those of all students stand in the template."""
    heads = [head for row in allocation.heads for head in row]
    limits = [f"The training was ended at {training.done:,} of {training.asked:,} steps."] * training.early
    limits += ["The features were not trained."] * (not training.done and any(head.features for head in heads))
    whole = any(head.softmax for head in heads)
    limits += ["Some KV heads keep their whole cache, so the state grows with the text."] * whole
    small = "The evaluation is small: one kind of text, no benchmark, no other ability of the teacher, and no speed."
    limits += [small] * (not parts.keys() - MEASURED_AT_ONCE)
    dtypes = sorted({part.made_with.dtype for part in parts.values()})
    limits += [f"It was judged in {' and '.join(dtypes)}: in another dtype it is another model."] * bool(dtypes)
    if positions is not None:
        limits.append(f"Its teacher was made for {positions:,} tokens: the student reads longer texts with a warning.")
    return "".join(f"- {line}\n" for line in limits)


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


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown and HTML show it as it is."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(one_line(text), quote=False))


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
        text, student = part.read.text, find_student(part.result)
        yield text, "loss", student.loss.mean
        for name, estimate in (("KL to the teacher", student.kl), ("agreement with the teacher", student.agreement)):
            if estimate is not None:
                yield text, name, estimate.mean
        for result in part.result.lengths[:-1]:
            if (kl := find_student(result).kl) is not None:
                yield text, f"KL to the teacher over the first {result.length} tokens", kl.mean
    if (part := parts.get("recall")) is not None and part.read is not None:
        for gap, loss in zip(part.result.gaps, find_student(part.result).second, strict=True):
            yield part.read.text, f"recall after {gap}", loss


def find_student(result: Any) -> Any:
    return next(subject for subject in result.subjects if subject.name == "student")


def is_on_hub(text: str) -> bool:
    """Whether a text is a data set of the Hub, and not data that only its owner has."""
    return text.startswith("dataset:") and "/" in text.split(":")[1]


def one_line(text: str) -> str:
    """Keep the printable characters of a text, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
