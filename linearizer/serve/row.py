"""A text of the running batch: its prompt, how to draw its tokens, where to stop, and who receives its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from transformers import (
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.teacher.token_loop import TextStream

Tensor = torch.Tensor


@dataclass(frozen=True)
class Drawing:
    """How a row draws its tokens: with temperature 0 it takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    random: Random = field(default_factory=Random)
    top_k: int | None = None  # None: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class TextDelta:
    """New text of a row; the last delta has the reason why the row ended, or an error."""

    text: str = ""
    finish: str | None = None  # "stop", or "length"
    error: str | None = None
    status: int = 500  # of HTTP, if there is an error

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False)  # two clients may send the same
class Row:
    """A text that is read, then continued; `send` is called in the engine's thread."""

    prompt: list[int]
    send: Callable[[TextDelta], None]
    tokenizer: PreTrainedTokenizerBase
    new_tokens: int
    drawing: Drawing = field(default_factory=Drawing)
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()  # tokens that end a text

    cache: Cache | None = None  # until it joins the batch
    reused: int = 0  # tokens read from kept states
    abandoned: bool = False  # its client has gone
    done: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        self.tokens, self.read = list(self.prompt), 0
        self.stream, self.unsent = TextStream(self.tokenizer, self.prompt), ""

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def unread(self) -> int:
        """The unread tokens of the prompt, except for the last one, which is read in the batch."""
        return max(0, len(self.prompt) - 1 - self.read)

    def add(self, token: int) -> None:
        """Add the next token, and send the text that later tokens cannot change."""
        self.tokens.append(token)
        ended = token in self.ends
        text = self.unsent + ("" if ended else self.stream.add(token))
        finish = "stop" if ended else "length" if self.written >= self.new_tokens else None
        if finish:
            text += self.stream.rest()
        begin = min((place for place in map(text.find, self.stop) if place >= 0), default=None)
        if begin is not None:
            self.send_delta(TextDelta(text[:begin], "stop"))
        elif finish:
            self.send_delta(TextDelta(text, finish))
        else:
            final = len(text) - begun_stop(text, self.stop)
            self.unsent = text[final:]
            if final:
                self.send_delta(TextDelta(text[:final]))

    def fail(self, why: str) -> None:
        self.failed = True
        self.send_delta(TextDelta(error=why))

    def send_delta(self, delta: TextDelta) -> None:
        """Send new text; the last delta ends the row, whose state is freed; abandon a row without a receiver."""
        self.done = delta.last
        if self.done:
            self.cache = None
        try:
            self.send(delta)
        except RuntimeError:  # its event loop is closed
            self.abandoned = True


def fail_rows(rows: Sequence[Row], error: Exception) -> None:
    """End rows whose computation failed; other requests are served after them."""
    for row in rows:
        if not row.done:
            row.fail(f"writing failed ({first_line(error)}): try again, with fewer tokens or fewer requests at once")


def begun_stop(text: str, stop: Sequence[str]) -> int:
    """Count the last letters of a text that may be the beginning of a stop string."""
    longest = min(len(text), max((len(string) - 1 for string in stop), default=0))
    return next((size for size in range(longest, 0, -1) if any(string.startswith(text[-size:]) for string in stop)), 0)


def choose_tokens(logits: Tensor, drawings: Sequence[Drawing], texts: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next token of every row of logits (rows, vocabulary), after the tokens of its text."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, drawing in enumerate(drawings):
        if drawing.temperature or drawing.repetition_penalty != 1.0:
            tokens[row] = draw_token(logits[row : row + 1], drawing, texts[row])
    return tokens


def draw_token(logits: Tensor, drawing: Drawing, text: Sequence[int]) -> int:  # (1, vocabulary)
    """Draw a token with one random number, after the processors of transformers in their order."""
    ids = torch.tensor([text] if drawing.repetition_penalty != 1.0 else [[]], dtype=torch.long, device=logits.device)
    logits = RepetitionPenaltyLogitsProcessor(drawing.repetition_penalty)(ids, logits)
    logits = logits.nan_to_num()  # of a tiny penalty: shares of what is infinite would be none
    if not drawing.temperature:
        return int(logits.argmax())
    logits = (logits - logits.max()) / max(drawing.temperature, 1e-30)  # smaller ones are 0 in float32
    if drawing.top_k is not None:
        logits = TopKLogitsWarper(drawing.top_k)(ids, logits)
    if drawing.top_p < 1:
        logits = TopPLogitsWarper(drawing.top_p)(ids, logits)
    if drawing.min_p > 0:
        logits = MinPLogitsWarper(drawing.min_p)(ids, logits)
    total = logits[0].double().softmax(-1).cumsum(-1)
    return int(torch.searchsorted(total, drawing.random.random() * total[-1], right=True))
