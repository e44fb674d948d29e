"""A text of the running batch: its prompt, what it writes, where it stops, and the receiver of its pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.serve.sampling import Drawing
from linearizer.teacher.token_loop import TextStream


@dataclass(frozen=True)
class Piece:
    """New text of a row; the last piece has the reason why the row ended, or an error."""

    text: str = ""
    finish: str | None = None  # "stop", or "length"
    error: str | None = None
    status: int = 500  # of HTTP, where there is an error

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass
class Row:
    """A text that is read, then written on; `send` is called in the engine's thread."""

    prompt: list[int]
    send: Callable[[Piece], None]
    tokenizer: PreTrainedTokenizerBase
    new_tokens: int
    drawing: Drawing = field(default_factory=Drawing)
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()  # tokens that end a text

    cache: Cache | None = None  # until it joins the batch
    cache_is_kept: bool = False  # for later requests
    behind: bool = False  # another row that begins like this one is read before it
    reused: int = 0  # tokens whose state was kept
    abandoned: bool = False  # its client has gone
    done: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        self.tokens, self.read = list(self.prompt), 0
        self.stream, self.held = TextStream(self.tokenizer, self.prompt), ""

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def left(self) -> int:
        """Count the tokens of the prompt to read before the last one, which is read in the batch."""
        return max(0, len(self.prompt) - 1 - self.read)

    def add(self, token: int) -> None:
        """Take the next token, and send the text that later tokens cannot change."""
        self.tokens.append(token)
        ended = token in self.ends
        text = self.held + ("" if ended else self.stream.add(token))
        full = self.written >= self.new_tokens
        if ended or full:
            text += self.stream.rest()
        begin = find_stop(text, self.stop)
        if begin is not None:
            self.send_piece(Piece(text[:begin], "stop"))
        elif ended or full:
            self.send_piece(Piece(text, "stop" if ended else "length"))
        else:
            final = len(text) - begun_stop(text, self.stop)
            self.held = text[final:]
            if final:
                self.send_piece(Piece(text[:final]))

    def fail(self, why: str) -> None:
        self.failed = True
        self.send_piece(Piece(error=why))

    def fail_with(self, error: Exception) -> None:
        self.fail(f"writing failed ({first_line(error)}): try again, with fewer tokens or fewer requests at once")

    def send_piece(self, piece: Piece) -> None:
        """Send a piece, of which the last ends the row; a row whose receiver has gone is abandoned."""
        self.done = piece.last
        try:
            self.send(piece)
        except RuntimeError:  # its event loop is closed
            self.abandoned = True


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Find where the first of some strings begins in a text."""
    places = [place for place in (text.find(each) for each in stop) if place >= 0]
    return min(places) if places else None


def begun_stop(text: str, stop: Sequence[str]) -> int:
    """Count the last letters of a text that may be the beginning of one of some strings."""
    most = min(len(text), max((len(each) - 1 for each in stop), default=0))
    return next((size for size in range(most, 0, -1) if any(each.startswith(text[-size:]) for each in stop)), 0)
