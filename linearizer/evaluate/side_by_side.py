"""Teacher and student side by side: the same prompt and seed, what they write, how fast, and what they remember."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearizer.errors import FaultError, LinearizerError, RequestError
from linearizer.evaluate.ruler import frequent_words, lay_out_all
from linearizer.evaluate.subjects import Subject
from linearizer.method import checkpoint
from linearizer.method.initialise import initialise
from linearizer.method.measure_run import measure_teacher
from linearizer.method.recorder import samples_of
from linearizer.plan.state_size import StateSize
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.results import Comparison, Difference, Side
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.load import Teacher
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.text import read_texts, repeated_passages, start_tokens
from linearizer.teacher.token_loop import HALF_LETTER, generate_tokens

UPDATE_SECONDS = 0.25  # between two updates of what both have written: each update takes time from writing
SOURCE = "builtin"  # of prompts that need memory: it is there without a network
WORD_TOKENS = 8192  # of text that words are drawn from
DEPTH = 0.1  # of a text before its hidden word
PASSAGE, SHOWN = 32, 16  # tokens of a passage that comes again, and of those the ones that a prompt repeats
Tensor = torch.Tensor


@dataclass(frozen=True)
class MemoryPrompt:
    """A prompt that goes on with what stands far back in it."""

    text: str
    answer: str
    distance: int  # tokens from what is asked for to the end of the prompt


def hide_word(tokenizer: PreTrainedTokenizerBase, distance: int) -> MemoryPrompt:
    """Hide a word in a text, that many tokens before the question for it."""
    texts = read_texts(SOURCE, tokenizer, max(WORD_TOKENS, 2 * distance), 1)
    windows = texts[:, : round(distance / (1 - DEPTH))]
    (ids, words), *_ = lay_out_all("single key", DEPTH, frequent_words(tokenizer, texts), windows, tokenizer, 1)
    return cut_answer(tokenizer, ids[0], sum(words), distance)


def repeat_passage(tokenizer: PreTrainedTokenizerBase, distance: int) -> MemoryPrompt:
    """Let a passage of a text come again after that many tokens; the prompt ends in the midst of it."""
    texts = read_texts(SOURCE, tokenizer, distance + PASSAGE + len(start_tokens(tokenizer)), 1)
    ids = repeated_passages(texts, PASSAGE, distance - PASSAGE)[0]
    return cut_answer(tokenizer, ids, PASSAGE - SHOWN, distance)


def cut_answer(tokenizer: PreTrainedTokenizerBase, ids: Tensor, answer: int, distance: int) -> MemoryPrompt:
    """Cut a text before its answer, which are its last tokens."""
    text, rest = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:-answer], ids[-answer:]))
    return MemoryPrompt(text, rest.strip(), distance)


def make_again(run: Run, teacher: Teacher) -> LinearizedForCausalLM:
    """Make the student of a run that trained nothing again around its teacher; the run is only read."""
    plan, allocation = run.plan, run.require_allocation()
    with TemporaryDirectory() as folder:
        copy = Run(Path(shutil.copytree(run.folder, Path(folder) / "run")))
        (copy.folder / "profile.json").unlink()  # it is measured again, for the samples
        (copy.folder / "state").mkdir()
        finish(measure_teacher(copy, teacher))
        samples = samples_of(copy)
    student = checkpoint.put_student_into(teacher.model, run.layers, allocation, plan.feature_map, plan.seed)
    initialise(student, samples, plan.seed)
    return student.eval()


def find_difference(
    tokenizer: PreTrainedTokenizerBase, teacher: Sequence[int], student: Sequence[int]
) -> Difference | None:
    """Find the first token in which two continuations differ."""
    place = next((place for place, (a, b) in enumerate(zip(teacher, student, strict=False)) if a != b), None)
    if place is None:
        return None
    alike = tokenizer.decode(list(teacher[:place]), skip_special_tokens=True).rstrip(HALF_LETTER)
    tokens = (tokenizer.decode(list(ids[: place + 1]), skip_special_tokens=True) for ids in (teacher, student))
    return Difference(place, alike, *(text[len(alike) :] for text in tokens))


def write_in_turns(
    teacher: PreTrainedModel,
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    state: StateSize,
    prompt: str,
    new_tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
) -> Iterator[Comparison]:
    """Let both models continue a prompt, a token each in turn; yield a few times a second what they have written.

    The last comparison is of all that they write.
    """
    ids: Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0 or new_tokens < 1:
        asked = f"prompt {prompt!r}, {new_tokens} new tokens"
        raise RequestError(f"there is nothing to compare: {asked}; give a prompt, and at least one new token")
    try:
        writers = [
            Writer(subject, tokenizer, size, ids, new_tokens, seed, sample)
            for subject, size in (
                (Subject("teacher", teacher, softmax=teacher is student.base), state.teacher_bytes),
                (Subject("student", student), state.student_bytes),
            )
        ]

        def compare() -> Comparison:
            difference = find_difference(tokenizer, writers[0].written, writers[1].written)
            return Comparison(prompt, ids.shape[1], writers[0].side(), writers[1].side(), difference)

        updated = time.monotonic()
        while any([writer.write_token() for writer in writers]):
            if time.monotonic() - updated >= UPDATE_SECONDS:
                yield compare()
                updated = time.monotonic()
    except LinearizerError:
        raise
    except Exception as error:  # models of others raise errors of many types
        raise FaultError(f"writing broke off ({type(error).__name__}): try again, with fewer tokens") from error
    yield compare()


class Writer:
    """One model that continues a prompt: its tokens so far, and the seconds that it took for them alone."""

    def __init__(
        self,
        subject: Subject,
        tokenizer: PreTrainedTokenizerBase,
        state_size: Callable[[int], int],  # tokens read -> bytes remembered
        ids: Tensor,  # (1, tokens)
        new_tokens: int,
        seed: int,
        sample: bool,
    ) -> None:
        model, self.subject = subject.model, subject
        self.tokenizer, self.state_size, self.prompt_tokens = tokenizer, state_size, ids.shape[1]
        self.written: list[int] = []
        self.first_seconds = self.seconds = 0.0
        self.tokens = generate_tokens(model, ids.to(model.device), fresh_cache(model), new_tokens, seed, sample)

    def write_token(self) -> bool:
        """Write one more token; return whether there was one left to write."""
        begin = time.perf_counter()
        with self.subject.at_work():
            token = next(self.tokens, None)
        if token is None:
            return False
        self.written.append(token)
        self.seconds += time.perf_counter() - begin
        if len(self.written) == 1:
            self.first_seconds = self.seconds
        return True

    def side(self) -> Side:
        later, count = self.seconds - self.first_seconds, len(self.written)
        rate = (count - 1) / later if count > 1 and later > 0 else 0.0
        text = self.tokenizer.decode(self.written, skip_special_tokens=True)
        read = self.prompt_tokens + max(count - 1, 0)  # the last token is written, but not read
        return Side(text, count, self.first_seconds, rate, read, self.state_size(read))
