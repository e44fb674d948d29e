"""Several models in one conversation: each reads the same texts into a state of its own, and answers from it.

Their first differences, their speed, and the bytes of each state are reported while they read and write.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from linearizer.errors import FaultError, LinearizerError, RequestError
from linearizer.evaluate.subjects import Subject
from linearizer.evaluate.tasks import frequent_words, lay_out_all
from linearizer.run.results import Comparison, Difference, Side, StateSizes
from linearizer.teacher.logits import bytes_held, recurrent_bytes
from linearizer.teacher.picture_prompts import Pictures
from linearizer.teacher.text import read_texts, repeated_passages, start_tokens
from linearizer.teacher.token_loop import HALF_LETTER, NONE, generate_tokens, read_tokens

UPDATE_SECONDS = 0.25  # between two updates of the written texts: each update takes time from writing
PIECES = 16  # into which a text is split, so that one sees whether the memory of each model grows
PIECE_TOKENS = range(32, 128)  # of such a piece: a stop waits for a piece of each model
SOURCE = "builtin"  # of prompts that need memory: available without a network
WORD_TOKENS = 8192  # of text that words are drawn from
DEPTH = 0.1  # of a text before its hidden word
PASSAGE, SHOWN = 32, 16  # tokens of a repeated passage, and the number of them that a prompt repeats
Tensor = torch.Tensor


@dataclass(frozen=True)
class MemoryPrompt:
    """A prompt with an answer that stands far back in it."""

    text: str
    answer: str
    distance: int  # tokens from the answer in the text to the end of the prompt


def hide_word(tokenizer: PreTrainedTokenizerBase, distance: int) -> MemoryPrompt:
    """Hide a word in a text, `distance` tokens before the question for it."""
    texts = read_texts(SOURCE, tokenizer, max(WORD_TOKENS, 2 * distance), 1)
    windows = texts[:, : round(distance / (1 - DEPTH))]
    (ids, words), *_ = lay_out_all("single key", DEPTH, frequent_words(tokenizer, texts), windows, tokenizer, 1)
    return cut_answer(tokenizer, ids[0], sum(words), distance)


def repeat_passage(tokenizer: PreTrainedTokenizerBase, distance: int) -> MemoryPrompt:
    """Repeat a passage of a text after `distance` tokens; the prompt ends in the middle of the repetition."""
    texts = read_texts(SOURCE, tokenizer, distance + PASSAGE + len(start_tokens(tokenizer)), 1)
    ids = repeated_passages(texts, PASSAGE, distance - PASSAGE)[0]
    return cut_answer(tokenizer, ids, PASSAGE - SHOWN, distance)


def cut_answer(tokenizer: PreTrainedTokenizerBase, ids: Tensor, answer: int, distance: int) -> MemoryPrompt:
    """Split a text into prompt and answer, its last tokens."""
    text, end = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:-answer], ids[-answer:]))
    return MemoryPrompt(text, end.strip(), distance)


@dataclass
class Reader:
    """A model with the cache of the tokens that it has read."""

    subject: Subject
    cache: Cache
    tokens: list[int]  # that the cache has read
    unread: list[int]  # that it has written, but not read yet
    seconds: float = 0.0  # that it has read for this answer

    @staticmethod
    def of(subject: Subject) -> Reader:
        return Reader(subject, subject.fresh_cache(), [], [])

    @property
    def heard(self) -> list[int]:
        """All tokens of the conversation so far."""
        return self.tokens + self.unread

    def fork(self) -> Reader:
        """Copy the state: the copy reads on without changing this one."""
        with torch.inference_mode():
            return Reader(self.subject, copy.deepcopy(self.cache), [*self.tokens], [*self.unread])

    def restart(self) -> Reader:
        """Return a reader of the same model that has read nothing."""
        return Reader.of(self.subject)

    def before(self, tokens: Sequence[int]) -> Reader:
        """Return this reader, if it can read on to all of these tokens, or one that has read nothing."""
        read = len(self.tokens)
        return self if self.tokens == [*tokens[:read]] else self.restart()

    def read(self, tokens: Sequence[int], pictures: Pictures = NONE) -> None:
        """Read on from the tokens in the cache; `pictures` are those among these tokens."""
        begin = time.perf_counter()
        with self.subject.prepared() as model:
            for _ in read_tokens(model, torch.tensor([[*tokens]]), self.cache, pictures):
                pass
        self.tokens, self.unread = [*self.tokens, *tokens], []
        self.seconds += time.perf_counter() - begin

    def bytes(self) -> int:
        """Count the bytes of the cache now, including native windows, which student and teacher have in common."""
        return bytes_held(self.cache, in_16_bits=True)


def read_in_turns(
    readers: Sequence[Reader], texts: Sequence[Sequence[int]], again: bool = False, pictures: Pictures = NONE
) -> Iterator[StateSizes]:
    """Let each model read its tokens, one piece at a time in turn; yield after each piece the bytes of all states.

    `again`: the tokens were read before, but their states were dropped. The first piece has all pictures.
    """
    longest = max(map(len, texts))
    size = min(max(-(-longest // PIECES), PIECE_TOKENS.start), PIECE_TOKENS.stop)
    first = max(size, pictures.reach)
    bounds = [0, *range(first, longest, size), longest]
    for start, end in pairwise(bounds):
        for reader, tokens in zip(readers, texts, strict=True):
            if piece := tokens[start:end]:
                reader.read(piece, NONE if start else pictures)
        sizes = {reader.subject.name: reader.bytes() for reader in readers}
        recurrent = max(recurrent_bytes(reader.cache) for reader in readers)
        yield StateSizes(end, longest, sizes, again, recurrent)


def find_difference(
    tokenizer: PreTrainedTokenizerBase, teacher: Sequence[int], student: Sequence[int]
) -> Difference | None:
    """Find the first token in which a continuation differs from the teacher's."""
    place = next((place for place, (a, b) in enumerate(zip(teacher, student, strict=False)) if a != b), None)
    if place is None:
        return None
    alike = tokenizer.decode(list(teacher[:place]), skip_special_tokens=True).rstrip(HALF_LETTER)
    tokens = (tokenizer.decode(list(ids[: place + 1]), skip_special_tokens=True) for ids in (teacher, student))
    return Difference(place, alike, *(text[len(alike) :] for text in tokens))


def write_in_turns(
    readers: Sequence[Reader],  # the teacher first, or a student alone
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: Sequence[int],  # of the prompt
    new_tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
    pictures: Pictures = NONE,  # among these tokens
) -> Iterator[StateSizes | Comparison]:
    """Let all models read a prompt and continue it, one token at a time in turn.

    Yield the sizes of their states while they read, and then their texts a few times a second; the last comparison
    has their complete texts.
    """
    if not tokens or new_tokens < 1:
        received = f"prompt {prompt!r}, {new_tokens} new tokens"
        raise RequestError(f"there is nothing to compare: {received}; give a prompt, and at least one new token")
    try:
        for reader in readers:
            reader.seconds = 0.0
        if len(tokens) > 1:
            yield from read_in_turns(readers, [tokens[:-1]] * len(readers), pictures=pictures)
        writers = [Writer(reader, tokenizer, tokens[-1], new_tokens, seed, sample) for reader in readers]

        def compare() -> Comparison:
            sides = {writer.reader.subject.name: writer.side(writers[0].written) for writer in writers}
            teacher = sides.get("teacher", sides["student"])  # a student alone is compared with itself
            return Comparison(prompt, len(tokens), teacher, sides["student"], sides.get("window"))

        updated = time.monotonic()
        while any([writer.write_token() for writer in writers]):
            for writer in writers[1:]:
                writer.part_from(writers[0])
            if time.monotonic() - updated >= UPDATE_SECONDS:
                yield compare()
                updated = time.monotonic()
    except LinearizerError:
        raise
    except Exception as error:  # models of others raise errors of many types
        raise FaultError(f"writing broke off ({type(error).__name__}): try again, with fewer tokens") from error
    yield compare()


class Writer:
    """One model that answers: its tokens so far, and the seconds that it alone took for them."""

    def __init__(
        self,
        reader: Reader,
        tokenizer: PreTrainedTokenizerBase,
        last: int,  # token of the prompt; it has read the tokens before
        new_tokens: int,
        seed: int,
        sample: bool,
    ) -> None:
        model: PreTrainedModel = reader.subject.model
        self.reader, self.tokenizer = reader, tokenizer
        self.written: list[int] = []
        self.first_seconds = self.seconds = reader.seconds
        self.logits: Tensor | None = None  # of the newest token, (1, vocabulary)
        self.chances: tuple[tuple[float, float], tuple[float, float]] | None = None
        ids, before = (
            torch.tensor([tokens], dtype=torch.long, device=model.device) for tokens in ([last], reader.tokens)
        )
        reader.unread = [last]
        self.tokens = generate_tokens(model, ids, reader.cache, new_tokens, seed, sample, before, self.keep_logits)

    def keep_logits(self, logits: Tensor) -> None:
        self.logits = logits.clone()  # a graph writes the next ones to the same place

    def part_from(self, teacher: Writer) -> None:
        """Note what both give the two tokens, where the newest is the first that differs from the teacher's."""
        place = len(self.written) - 1
        if self.chances or len(teacher.written) != len(self.written) or teacher.written[place] == self.written[place]:
            return
        tokens = teacher.written[place], self.written[place]
        self.chances = teacher.chances_of(*tokens), self.chances_of(*tokens)

    def chances_of(self, *tokens: int) -> tuple[float, float]:
        """Return the probabilities of two tokens in the place of the newest, whatever the temperature."""
        assert self.logits is not None, "it has written a token"
        first, second = self.logits[0].softmax(-1)[[*tokens]].tolist()
        return first, second

    def write_token(self) -> bool:
        """Write one more token; return False if the text has ended."""
        begin = time.perf_counter()
        with self.reader.subject.prepared():
            token = next(self.tokens, None)
        if token is None:
            return False
        self.reader.tokens += self.reader.unread
        self.reader.unread = [token]
        self.written.append(token)
        self.seconds += time.perf_counter() - begin
        if len(self.written) == 1:
            self.first_seconds = self.seconds
        return True

    def side(self, teacher: Sequence[int]) -> Side:
        """Describe the text that it has written, and where it differs from the teacher's."""
        later, count = self.seconds - self.first_seconds, len(self.written)
        rate = (count - 1) / later if count > 1 and later > 0 else 0.0
        text = self.tokenizer.decode(self.written, skip_special_tokens=True)
        difference = find_difference(self.tokenizer, teacher, self.written)
        difference = difference and replace(difference, chances=self.chances)
        read, size = len(self.reader.tokens), self.reader.bytes()
        return Side(text, count, self.first_seconds, rate, read, size, difference)
