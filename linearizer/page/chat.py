"""A teacher and its student in memory: they write side by side, and the student reads a text and answers from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearizer.errors import FaultError, LinearizerError, RequestError
from linearizer.page import limits, zerogpu
from linearizer.page.visitors import Visitor, is_example, on_space
from linearizer.plan.json_products import parse_json
from linearizer.plan.options import options_of
from linearizer.plan.plan import Plan
from linearizer.plan.state_size import Reading, StateSize
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import MemoryPrompt
    from linearizer.progress import Progress
    from linearizer.run.results import Comparison, Side
    from linearizer.student.cache import LinearizedCache

COMPARISON_SECONDS = 120  # that ZeroGPU lends its device to a comparison, or to the reading of a document
DOCUMENT = Path("state", "document.safetensors")  # of a run: the state of its student after the document it read last
DOCUMENT_FACTS = DOCUMENT.with_suffix(".json")
SAMPLE_PROMPTS = {  # of the kinds that the demo model knows, by their titles
    "A story": "The old man sat by the fire, and after a long silence he said that",
    "A manual": "The for statement is used to iterate over",
    "A speech": "Fellow citizens, we meet today to",
}
WORD, PASSAGE = "A word hidden 4 × the state back", "A passage again after 8 × the state"
MEMORY_PROMPTS = {WORD: 4, PASSAGE: 8}  # times the state that a prompt goes back
MIN_DISTANCE = 64  # tokens that it goes back at least
BEGINNING = 40  # characters of a document that name it


@dataclass(frozen=True)
class Pair:
    """A teacher and its student in memory."""

    run_key: tuple[Path, str]
    teacher: Any
    student: Any
    tokenizer: Any


COMPARISON_LOCK = threading.Lock()  # one pair in memory, and one comparison at a time
LOADED_PAIRS: list[Pair] = []


@zerogpu.with_device(COMPARISON_SECONDS)
def compare_models(
    visitor: Visitor, name: str, prompt: str, tokens: int, seed: int, sample: bool, as_chat: bool = False
) -> Iterator[Comparison]:
    """Let the teacher and the student of a run continue a prompt, or answer it in a chat, side by side."""
    from linearizer.evaluate.side_by_side import write_in_turns

    run = require_student(visitor.find_run(name))
    check_prompt(prompt, tokens, seed)
    with loaded_pair(run, visitor) as pair:
        state = StateSize.of(run.require_allocation(), run.layers)
        prompt = write_turn(pair.tokenizer, prompt) if as_chat else prompt
        check_room(run, pair.tokenizer, prompt, tokens)
        yield from write_in_turns(pair.teacher, pair.student, pair.tokenizer, state, prompt, tokens, seed, sample)


def make_memory_prompt(visitor: Visitor, name: str, kind: str, tokens: int) -> tuple[MemoryPrompt, int]:
    """Make a prompt that needs memory, of the kind that has this title, and count the tokens of the run's state.

    It goes back as many times the state as its kind says, as far as the model reads before it writes `tokens`.
    """
    from linearizer.evaluate import side_by_side
    from linearizer.hub.models import find_model
    from linearizer.teacher.load import load_tokenizer

    run, times = require_student(visitor.find_run(name)), MEMORY_PROMPTS[kind]
    tokenizer = load_tokenizer(find_model(run.plan.model, visitor.token), visitor.token)
    room, state = prompt_room(run) - tokens, StateSize.of(run.require_allocation(), run.layers).breakeven or 0
    make = side_by_side.hide_word if kind == WORD else side_by_side.repeat_passage
    return make(tokenizer, max(MIN_DISTANCE, min(times * state, room * 7 // 8))), state


def write_turn(tokenizer: Any, prompt: str) -> str:
    """Write a prompt as the turn of a user, where the model has a chat template."""
    if not tokenizer.chat_template:
        return prompt
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return text.removeprefix(tokenizer.bos_token or "")  # which the tokenizer adds


@zerogpu.with_device(COMPARISON_SECONDS)
def read_document(visitor: Visitor, name: str, text: str) -> Iterator[Progress | Reading]:
    """Let the student of a run read a document, whose state takes the place of an earlier one.

    The last value is what it has read. The state lies in the run's folder, where `linearizer ask --state` finds it.
    """
    from linearizer.serve import kept_state

    run = require_student(visitor.find_own_run(name))
    if on_space() and len(text) > limits.MAX_DOCUMENT_CHARACTERS:
        raise RequestError(
            f"a document of {len(text):,} characters is more than this Space reads "
            f"({limits.MAX_DOCUMENT_CHARACTERS:,}): {limits.ELSEWHERE}"
        )
    with loaded_pair(run, visitor) as pair:
        cache = pair.student.empty_cache()
        yield from kept_state.read_text(pair.student, pair.tokenizer, text, cache)
        reading = save_document(run, cache, " ".join(text.split())[:BEGINNING])
    yield reading


def save_document(run: Run, cache: LinearizedCache, begins: str | None = None) -> Reading:
    """Write the state of a document, and what the page says of it: a new document has a new beginning."""
    from linearizer.serve import kept_state

    kept_state.save_state(cache, run.folder / DOCUMENT)
    tokens, state = cache.get_seq_length(), StateSize.of(run.require_allocation(), run.layers)
    # from shapes, as everything on the page is counted
    reading = Reading(tokens, state.student_bytes(tokens), state.teacher_bytes(tokens))
    if begins is None:
        begins = run.parse_file(str(DOCUMENT_FACTS), parse_json, again=False)["begins"]
    run.write(str(DOCUMENT_FACTS), json.dumps({**asdict(reading), "begins": begins}))
    return reading


@zerogpu.with_device(COMPARISON_SECONDS)
def ask_document(
    visitor: Visitor, name: str, prompt: str, tokens: int, seed: int, sample: bool, keep: bool = False
) -> Iterator[str]:
    """Let the student continue a prompt after the document that it read; yield the text so far.

    The state stays, or has read prompt and answer, too, with `keep`, until they are taken back.
    """
    from linearizer.serve import kept_state

    run = find_reader(visitor, name)
    check_prompt(prompt, tokens, seed)
    with loaded_pair(run, visitor) as pair:
        check_room(run, pair.tokenizer, prompt, tokens)
        cache, text = kept_state.load_state(pair.student, run.folder / DOCUMENT), ""
        if keep:
            cache.begin_turn()
        try:
            for piece in kept_state.write_answer(pair.student, pair.tokenizer, prompt, cache, tokens, seed, sample):
                text += piece
                yield text
        except LinearizerError:
            raise
        except Exception as error:  # models of others raise errors of many types
            raise FaultError(f"writing broke off ({type(error).__name__}): try again, with fewer tokens") from error
        if keep:
            save_document(run, cache)


@zerogpu.with_device(COMPARISON_SECONDS)
def take_back_answer(visitor: Visitor, name: str) -> Reading:
    """Return the state of a document to before the prompt and the answer that it kept last."""
    from linearizer.serve import kept_state

    run = find_reader(visitor, name)
    with loaded_pair(run, visitor) as pair:
        cache = kept_state.load_state(pair.student, run.folder / DOCUMENT)
        kept_state.take_back_turn(cache)
        return save_document(run, cache)


def find_reader(visitor: Visitor, name: str) -> Run:
    """Open a run whose student has read a document."""
    run = require_student(visitor.find_run(name))
    if not run.has_file(str(DOCUMENT)):
        raise RequestError("this student has read no document yet: give it a document, and press Read")
    return run


def has_student(run: Run) -> bool:
    """Whether a run has a student, or is the example, whose student is made again."""
    return run.checkpoint.is_dir() or is_example(run)


def require_student(run: Run) -> Run:
    if not has_student(run):
        raise RequestError("this run has no student yet: wait until it is done, or end its training")
    return run


def check_prompt(prompt: str, tokens: int, seed: int) -> None:
    """Refuse, before models are loaded, a prompt that says nothing, and what is too long for a page."""
    options_of(Plan)["seed"].check(seed)
    if not prompt.strip():
        raise RequestError("the prompt is empty: write what is to be continued")
    too_long = on_space() and len(prompt) > limits.MAX_DOCUMENT_CHARACTERS
    if too_long or not 1 <= tokens <= limits.MAX_COMPARED_TOKENS:
        raise RequestError(
            f"a prompt of {len(prompt)} characters and {tokens} tokens cannot be compared here: give a shorter prompt, "
            f"and ask for 1 to {limits.MAX_COMPARED_TOKENS} tokens"
        )


def prompt_room(run: Run) -> int:
    """Count the tokens that are read and written here: a model's positions, or the limit of a Space."""
    return min(run.positions, limits.MAX_PROMPT_TOKENS) if on_space() else run.positions


def check_room(run: Run, tokenizer: Any, prompt: str, tokens: int) -> None:
    """Refuse a prompt that is longer than what is read here."""
    count, room = len(tokenizer(prompt, verbose=False)["input_ids"]), prompt_room(run) - tokens
    if count > room:
        raise RequestError(
            f"a prompt of {count:,} tokens is more than is read here before {tokens} are written ({room:,}): give a "
            "shorter prompt, or ask for fewer tokens"
        )


def explain_speed(run: Run, teacher: Side, student: Side) -> str:
    """Explain why the student writes more slowly than its teacher; empty where it does not."""
    from linearizer.student.kernel_in_c import find_compiler

    if not student.tokens_per_second or student.tokens_per_second >= teacher.tokens_per_second:
        return ""
    allocation, read = run.require_allocation(), student.tokens_read
    state, heads = StateSize.of(allocation, run.layers), [head for row in allocation.heads for head in row]
    until = "" if state.breakeven is None else f" (from {state.breakeven:,} tokens on it is larger)"
    reasons = {
        f"after {read:,} tokens its teacher's cache is still smaller than its state{until}": state.breakeven is None
        or read < state.breakeven,
        "tokens that leave a window have to be merged into slots": any(head.slots for head in heads),
        "every token is written into a memory": any(head.memory for head in heads),
        "queries and keys have to be turned into features": any(head.features and not head.memory for head in heads),
    }
    named = [reason for reason, holds in reasons.items() if holds] or ["its state has to be kept up to date"]
    if run.evaluation_file["made_with"].get("device", "").startswith("cpu"):
        if any(head.features for head in heads):
            named.append("the kernels that do this at once need a GPU")
        elif find_compiler() is None:
            named.append("the kernels that do this at once need a C compiler")
    share = student.tokens_per_second / teacher.tokens_per_second
    return f"The student writes {share:.0%} as fast here, because {', and '.join(named)}."


@contextmanager
def loaded_pair(run: Run, visitor: Visitor) -> Iterator[Pair]:
    """Lend the teacher and the student of a run to one call after the other; those that were loaded last are kept."""
    from linearizer.evaluate.side_by_side import make_again
    from linearizer.method import checkpoint
    from linearizer.quiet import quiet
    from linearizer.teacher.load import load_teacher_of

    if not COMPARISON_LOCK.acquire(timeout=120):
        raise RequestError("other visitors are comparing: try again in a minute")
    try:
        if not LOADED_PAIRS or LOADED_PAIRS[0].run_key != run.key:
            LOADED_PAIRS.clear()
            with quiet():
                teacher = load_teacher_of(run.plan, visitor.token, run.inspection)
                student = make_again(run, teacher) if is_example(run) else checkpoint.load_beside(run, teacher.model)
            LOADED_PAIRS.append(Pair(run.key, teacher.model, student, teacher.tokenizer))
        yield LOADED_PAIRS[0]
    finally:
        COMPARISON_LOCK.release()
