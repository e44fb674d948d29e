"""The card of a student: what it is, what it kept, how to load it, its limits, and how it was made.

Names and texts that come from others are data: nothing in them becomes markup or metadata of its own.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import linearizer
from linearizer.amounts import smaller_from
from linearizer.model.hub import DEMO
from linearizer.publish.allocation_picture import draw
from linearizer.publish.card_metadata import LINK, Teacher, metadata, one_line, terms_of
from linearizer.publish.parts import PART_VIEWS
from linearizer.publish.tables import Table, made_with
from linearizer.run.allocation import Allocation
from linearizer.run.files import write_whole
from linearizer.run.folder import Run, Trained, trained
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.plan import Plan

PICTURE = "allocation.png"
JUDGED = {"language", "recall"}  # parts that every student is measured in when it is made
COMPARED = (
    "On text that was kept from training, one seed. The teacher is the same weights with softmax attention, through "
    "the same code. `window` is the control: a plain window with sinks that takes the student's bytes, in as many bits "
    "a number. Losses are in nats per token."
)
SNIPPET = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

name$revision
model = AutoModelForCausalLM.from_pretrained(name$pinned, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name$pinned, trust_remote_code=True)
text = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=40)
print(tokenizer.decode(text[0]))"""


def add_card(run: Run) -> None:
    """Put a card into the checkpoint of a run."""
    for name, content in card_files(run).items():
        write_whole(run.checkpoint / name, content)


def card_files(run: Run, repo_id: str | None = None) -> dict[str, bytes]:
    """Make the card and its picture; `repo_id` is where it will be read."""
    assert run.allocation is not None
    return {"README.md": card(run, repo_id).encode(), PICTURE: draw(run.allocation, run.layers)}


def card(run: Run, repo_id: str | None = None) -> str:
    """Write the card of a run's student."""
    allocation, layers, teacher = run.allocation, run.layers, Teacher.of(run)
    assert allocation is not None
    plan = public_plan(run.plan, teacher)
    parts, training = known(run.evaluation_parts), trained(run)
    title = repo_id.partition("/")[2] if repo_id else f"{teacher.name}, linearized"
    head = metadata(plan, teacher, title, parts).to_yaml(line_break="\n")
    body = Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(
        title=plain(title),
        summary=summary(allocation, layers, teacher, run.positions),
        alternative=f"Layers down, KV heads across. {in_words(allocation, layers, run.positions)}",
        allocation=listing(allocation),
        snippet=snippet(repo_id or "PATH/OF/THIS/FOLDER"),
        evaluation=evaluation(parts),
        limits=limits(allocation, training, bool(parts.keys() - JUDGED)),
        made=made(allocation, plan, training),
        again=again(training),
        version=linearizer.__version__,
        command=plan.command(),
        plan=json.dumps(asdict(plan), indent=1).replace("`", "\\u0060"),
        licence=licence(teacher),
    )
    return f"---\n{head.strip()}\n---\n{body}"


def snippet(name: str, revision: str | None = None) -> str:
    """Write the lines that load a student and let it write."""
    pinned = f"\nrevision = {json.dumps(revision)}" if revision else ""
    return Template(SNIPPET).substitute(
        revision=f" = {json.dumps(name)}{pinned}", pinned=", revision=revision" if revision else ""
    )


def public_plan(plan: Plan, teacher: Teacher) -> Plan:
    """Pin the teacher of a plan, and leave out where files lie on the machine that made the student."""
    model = f"{teacher.repo_id}@{teacher.revision}" if teacher.repo_id else teacher.name
    asked = {**asdict(plan), "model": model, "text": public_text(plan.text)}
    written: dict[str, Any] = {
        name: one_line(value) if isinstance(value, str) else value for name, value in asked.items()
    }
    return Plan(**written)


def public_text(source: str) -> str:
    """Name a source of text without the folder that it is in."""
    kind, _, path = source.partition(":")
    if kind == "dataset" and path.startswith(("/", ".", "~")):  # of this machine: no id of the Hub begins so
        place, colon, more = path.partition(":")
        return one_line(f"dataset:{Path(place).name}{colon}{more}")
    return one_line(f"file:{Path(path).name}" if kind == "file" else source)


def summary(allocation: Allocation, layers: Sequence[Layer], teacher: Teacher, positions: int) -> str:
    """Say in a paragraph what this is."""
    if teacher.repo_id:
        page = f"https://huggingface.co/{teacher.repo_id}"
        origin = f"[{plain(teacher.repo_id)}]({page}) at revision [`{(teacher.revision or '')[:12]}`]({page}/tree/"
        origin += f"{teacher.revision})"
    elif teacher.name == DEMO:
        origin = "the demo model that comes with Linearizer"
    else:
        origin = f"{plain(teacher.name)}, a model in a local folder that is not on the Hub"
    heads = [head for row in allocation.heads for head in row]
    kept = ["a few exact tokens at the start"] * bool(allocation.sinks)
    kept += ["an exact window"] * any(head.window for head in heads)
    kept += ["features that stand for all older tokens"] * any(head.features for head in heads)
    kept += ["slots that older tokens are merged into"] * any(head.slots for head in heads)
    bits = ", in 8 bits a number with an exponent for every vector" if allocation.bits == 8 else ""
    return (
        f"This is {origin}, with its attention exchanged: instead of a cache of the keys and values of every token, KV "
        f"heads keep {listed(kept)}{bits}. {in_words(allocation, layers, positions)}"
    )


def in_words(allocation: Allocation, layers: Sequence[Layer], positions: int) -> str:
    """Say what the student's state is and costs."""
    heads = [head for row in allocation.heads for head in row]
    whole = sum(head.softmax for head in heads)
    held = f"{allocation.state_bytes(layers, positions):,} bytes"
    begin = smaller_from(allocation.breakeven_tokens(layers), allocation.saved(layers))
    if whole:
        state = f"{whole} of {len(heads)} KV heads were left softmax and grow with the text: its state takes {held} "
        state += f"after {positions:,} tokens"
    else:
        state = f"Its state takes {held}, whatever the length of the text"
    larger = (
        f"the teacher's cache is the larger one {begin}"
        if begin != "never"
        else ("it is never smaller than the teacher's cache")
    )
    mean = f" Mean features per KV head: {allocation.features_mean:.1f}." if any(h.features for h in heads) else ""
    return f"{state}; {larger}.{mean} It was shared out by the strategy {plain(allocation.strategy)}."


def listing(allocation: Allocation) -> str:
    """List what the heads hold, a layer a line."""
    rows = ["| layer | KV heads |", "|---|---|"]
    for index, heads in enumerate(allocation.heads):
        rows.append(f"| {index} | {' · '.join(map(kind, heads)) or 'bounded by the teacher itself: stays as it is'} |")
    return "\n".join(rows)


def kind(head: Head) -> str:
    """Say what a head holds besides sinks."""
    if head.softmax:
        return "softmax"
    far = (f"{count} {name}" for count, name in ((head.features, "features"), (head.slots, "slots")) if count)
    return " + ".join([str(head.window)] * bool(head.window) + [*far]) or "nothing"


def known(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give what `linearizer evaluate` found; where texts lie on this machine is left out."""
    return {part: without_folders(found) for part, found in parts.items() if part in PART_VIEWS}


def evaluation(parts: dict[str, dict[str, Any]]) -> str:
    """Show the parts of an evaluation as tables; those of parts that were asked for later are folded."""
    if not parts:
        return "It was not evaluated."
    shown = [COMPARED]
    for part, found in parts.items():
        view = PART_VIEWS[part]
        shown += [f"### {view.title}", view.question]
        tables = "\n\n".join(markdown(own) for own in view.tables(found))
        notes = "\n".join(f"- {plain(note)}" for note in made_with(found))
        numbers = f"{tables}\n\n{notes}"
        folded = f"<details><summary>In numbers</summary>\n\n{numbers}\n\n</details>"
        shown.append(numbers if part in JUDGED else folded)
    return "\n\n".join(shown)


def markdown(found: Table) -> str:
    """Lay out a table for a card."""
    head, *rows = [[plain(str(cell)) for cell in row] for row in found.rows]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, *map(plain, found.notes)])


def without_folders(found: Any) -> Any:
    """Name files of texts without the folders that they are in."""
    if isinstance(found, dict):
        return {name: without_folders(value) for name, value in found.items()}
    if isinstance(found, list):
        return [without_folders(value) for value in found]
    return public_text(found) if isinstance(found, str) else found


def made(allocation: Allocation, plan: Plan, training: Trained) -> str:
    """Say what was done."""
    done = ["measured how many degrees of freedom each KV head uses"]
    done += ["measured what each head costs the model"] * (plan.rules.decided_by == "prices")
    done += ["learned gates that say which heads need their whole cache"] * (plan.rules.decided_by == "gates")
    done += ["shared out the budget"]
    featured = any(head.features for row in allocation.heads for head in row)
    steps = f"{training.done:,} of {training.asked:,} steps" if training.early else f"{training.done:,} steps"
    done += [f"trained the features to attend as the teacher does, for {steps}"] * bool(training.done and featured)
    adapted = f"Beside the teacher's own weights, adapters of rank {plan.lora} on q, k, v and o were trained"
    weights = adapted if plan.lora and training.done else "The teacher's weights are as they were"
    return f"{listed(done)}. {weights}"


def again(training: Trained) -> str:
    """Say what comes of the same plan, asked for again."""
    if training.early:
        return f"Somebody ended the training by hand. The same plan, left alone, trains all {training.asked:,} steps:"
    return "The same plan makes the same again:"


def limits(allocation: Allocation, training: Trained, examined: bool) -> str:
    """Say what not to expect."""
    said = [
        "A state of fixed size cannot hold everything: exact recall from further back than the window is weaker than "
        "the teacher's, as the table says.",
        "A state cannot forget tokens, so assisted decoding is refused.",
        "Everything that is to be said against the teacher (errors, bias, unsafe text) is to be said against this.",
    ]
    if not examined:
        said.insert(
            1,
            "The evaluation is small: a first impression on one kind of text, no benchmark, and no measure of what the "
            "teacher can do besides, or of speed.",
        )
    if any(head.softmax for row in allocation.heads for head in row):
        said.insert(1, "The KV heads that were left softmax keep their whole cache: the state grows with the text.")
    if not training.done and any(head.features for row in allocation.heads for head in row):
        said.insert(0, "Its features were not trained.")
    if training.early:
        said.insert(0, f"Its training was ended at {training.done:,} of {training.asked:,} steps.")
    return "\n".join(f"- {line}" for line in said)


def licence(teacher: Teacher) -> str:
    """Say under what terms the student stands: its teacher's."""
    terms = terms_of(teacher)
    name = terms.get("license_name") or terms.get("license")
    name = ", ".join(name) if isinstance(name, list) else name
    if not name:
        return "The card of the teacher states no licence: ask its author before you use or share this."
    link = terms.get("license_link")
    at = f" (<{link}>)" if isinstance(link, str) and re.fullmatch(LINK, link) else ""
    gated = " The teacher is gated: who uses this accepts the terms that the teacher's page asks for." * teacher.gated
    return f"The weights are the teacher's, and so is the licence: {plain(name)}{at}.{gated}"


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence."""
    return " and ".join([", ".join(parts[:-1])] * bool(parts[:-1]) + [*parts[-1:]]) or "nothing"


def plain(text: str) -> str:
    """Write text so that Markdown and HTML show it as it is."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(one_line(text), quote=False))


def code(text: str) -> str:
    """Write text for a code span, which must not end in it."""
    return one_line(text).replace("`", "'").replace("|", "¦")
