"""A text of the running batch: its prompt, how to draw its tokens, where to stop, and who receives its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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
from linearizer.teacher.picture_prompts import Prompt
from linearizer.teacher.token_loop import TextStream

BLOCK = 256  # tokens whose shares are added up at once
BELOW_1 = 1 - 2**-50
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
    begun: int = 0  # tokens that its first state has read: the prompt has numbers below 0 in their places
    shown: Prompt | None = None  # what follows that state, if with pictures: numbers below 0 stand for all up to these
    after: Sequence[int] = ()  # tokens that the state reads after the text
    state: Future[Cache] | None = None  # receives the state after the text, if there is one
    owner: str = ""  # the key of its client: kept states of others are not used
    shift: int = 0  # from the number of tokens to positions, after pictures of models that number these in another way

    cache: Cache | None = None  # until it joins the batch
    reused: int = 0  # tokens read from kept states
    abandoned: bool = False  # its client has gone
    done: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        self.tokens, self.read = list(self.prompt), self.begun
        self.stream, self.unsent = TextStream(self.tokenizer, [token for token in self.prompt if token >= 0]), ""
        self.reused = self.begun

    @property
    def reach(self) -> int:
        """The tokens that are read at once, with all pictures; 0: there are none."""
        return self.begun + self.shown.pictures.reach if self.shown is not None else 0

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def unread(self) -> int:
        """The unread tokens of the prompt, except for the last one, which is read in the batch."""
        return max(0, len(self.prompt) - 1 - self.read)

    def add(self, token: int) -> None:
        """Add the next token, and send the text that later tokens cannot change; a row without new tokens ends."""
        if not self.new_tokens:
            return self.send_delta(TextDelta(finish="length"))
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

    @property
    def unread_at_end(self) -> list[int]:
        """The tokens that its state must read when it has ended; the end of a text is not part of it."""
        rest = self.tokens[self.read :]
        return [*(rest[:-1] if rest and rest[-1] in self.ends else rest), *self.after]

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
    """End rows whose computation failed, and the wait for their states; other requests are served after them."""
    for row in rows:
        if row.state is not None and not row.state.done() and row.state.set_running_or_notify_cancel():
            row.state.set_exception(error)
        if not row.done:
            row.fail(f"writing failed ({first_line(error)}): try again, with fewer tokens or fewer requests at once")


def begun_stop(text: str, stop: Sequence[str]) -> int:
    """Count the last letters of a text that may be the beginning of a stop string."""
    longest = min(len(text), max((len(string) - 1 for string in stop), default=0))
    return next((size for size in range(longest, 0, -1) if any(string.startswith(text[-size:]) for string in stop)), 0)


def choose_tokens(logits: Tensor, drawings: Sequence[Drawing], texts: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next token of every row of logits (rows, vocabulary), after the tokens of its text.

    Rows are drawn together, each with one random number of its own, so a row draws the same in any batch. This changes
    the logits in place: new memory for all rows would take a CPU longer than the rest.
    """
    for row, drawing in enumerate(drawings):
        if drawing.repetition_penalty != 1.0:
            logits[row] = penalise(logits[row : row + 1], drawing.repetition_penalty, texts[row])[0]
    likeliest = logits.argmax(-1)
    tokens: list[int] = likeliest.tolist()
    if drawn := [row for row, drawing in enumerate(drawings) if drawing.temperature]:
        chosen = [drawings[row] for row in drawn]
        logits.sub_(logits.gather(-1, likeliest[:, None]))
        limited = limit(logits if len(drawn) == len(drawings) else logits[drawn], chosen)
        for row, token in zip(drawn, draw_tokens(limited.exp_(), chosen), strict=True):
            tokens[row] = token
    return tokens


def penalise(logits: Tensor, penalty: float, text: Sequence[int]) -> Tensor:  # (1, vocabulary)
    """Make the tokens of a text less likely."""
    ids = torch.tensor([[token for token in text if token >= 0]], dtype=torch.long, device=logits.device)
    penalised = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    return penalised.nan_to_num()  # of a tiny penalty: shares of what is infinite would be none


def limit(logits: Tensor, drawings: Sequence[Drawing]) -> Tensor:
    """Apply temperatures, then the limits of each row in the order of transformers, in place."""
    if any(drawing.temperature != 1 for drawing in drawings):
        temperatures = torch.tensor([[max(drawing.temperature, 1e-30)] for drawing in drawings])  # smaller ones are 0
        logits.div_(temperatures.to(logits))
    for row, drawing in enumerate(drawings):
        for warper in warpers_of(drawing):
            logits[row : row + 1] = warper(None, logits[row : row + 1])
    return logits


def warpers_of(drawing: Drawing) -> Iterator[Callable[[None, Tensor], Tensor]]:
    if drawing.top_k is not None:
        yield TopKLogitsWarper(drawing.top_k)
    if drawing.top_p < 1:
        yield TopPLogitsWarper(drawing.top_p)
    if drawing.min_p > 0:
        yield MinPLogitsWarper(drawing.min_p)


def draw_tokens(shares: Tensor, drawings: Sequence[Drawing]) -> list[int]:  # (rows, vocabulary)
    """Draw a token of each row by their shares.

    A number in [0, 1) first finds a block of tokens, and then a token in it: only these are added up one by one.
    """
    numbers = torch.tensor([[drawing.random.random()] for drawing in drawings], dtype=torch.float64)
    size = shares.shape[-1]
    whole, rest = shares.split([size - size % BLOCK, size % BLOCK], -1)
    sums = torch.cat([whole.unflatten(-1, (-1, BLOCK)).sum(-1), rest.sum(-1, keepdim=True)], -1)
    block, within = find_place(sums, numbers.to(shares.device))
    places = block * BLOCK + torch.arange(BLOCK, device=shares.device)
    found, _ = find_place(shares.gather(-1, places.clamp_max(size - 1)) * (places < size), within)
    drawn: list[int] = (block * BLOCK + found)[:, 0].clamp_max(size - 1).tolist()
    return drawn


def find_place(shares: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:  # (rows, places), (rows, 1)
    """Find the place of each number in [0, 1) along the sums of shares; return also where it lies in its share."""
    shares = shares.double()
    ends = shares.cumsum(-1)
    wanted = numbers.clamp_max(BELOW_1) * ends[:, -1:]  # below the last end, also when rounded
    # never a share of 0, which ends where it begins; what is not a number, whose row fails, ends nowhere
    place = torch.searchsorted(ends, wanted, right=True).clamp_max(shares.shape[-1] - 1)
    share = shares.gather(-1, place)
    return place, ((wanted - ends.gather(-1, place) + share) / share).clamp(0, 1)
