"""The card of a student: its metadata, what it is, how to load it, its evaluation, its limits, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from linearizer.amounts import count_in_words
from linearizer.plan.allocation import ROW_TITLES, Allocation, StateSize
from linearizer.plan.head_bytes import Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.publish.card_parts import (
    Card,
    CitedTeacher,
    describe_origin,
    escape_markdown,
    folded,
    public_text,
    table_markdown,
)
from linearizer.publish.encoder_card import EncoderCard
from linearizer.report.parts import PART_VIEWS
from linearizer.report.prediction import candidates_table, find_correction
from linearizer.report.tables import Table, describe_environment, describe_heads
from linearizer.run.folder import Run, Trained, read_training
from linearizer.run.results import Part

MEASURED_AT_ONCE = {"language", "recall"}  # parts that every run measures; their tables are not folded
SUBJECTS_NOTE = (
    "The same code measured all subjects on the same text, which was not used for training, with one seed. The "
    "teacher has the same weights and softmax attention. `window` is the window control: a window with sinks that "
    "takes as many bytes as the student's state, with the bits a number that most of its heads have. Losses are in "
    "nats per token."
)
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

    template, task, snippet, auto_class = "card.md", "text-generation", SNIPPET, "AutoModelForCausalLM"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.inspection)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The evaluation, without the folders of this machine."""
        return {
            name: replace(part, read=part.read and replace(part.read, text=public_text(part.read.text)))
            for name, part in self.run.results.items()
        }

    def describe(self) -> dict[str, str]:
        run, plan = self.run, Plan(**self.public_plan())
        allocation, layers = run.require_allocation(), run.layers
        training, again = read_training(run), "The same plan makes the same student again:"
        if training.early:
            steps = f"{training.asked:,}"
            again = f"The training was ended by hand. The same plan, not interrupted, trains all {steps} steps:"
        return {
            "summary": describe_student(allocation, layers, self.teacher) + describe_teacher(run.inspection),
            "memory": table_markdown(Table([ROW_TITLES, *StateSize.of(allocation, layers).rows()])),
            "allocation": folded("What every KV head keeps, exact window first", list_heads(allocation)),
            "evaluation": write_evaluation(self.parts),
            "limits": list_limits(allocation, training, self.parts, run.inspection.max_positions),
            "made": describe_production(plan, training),
            "chosen": describe_choice(run),
            "again": again,
            "command": plan.command(),
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


def find_student(result: Any) -> Any:
    return next(subject for subject in result.subjects if subject.name == "student")
