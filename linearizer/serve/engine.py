"""The running batch: texts join it when their prompt is read and leave it when they end, each at its own length.

In turns, some tokens of the prompts that wait are read, and every row of the batch writes a token. A prompt is read
apart, but for its last token: this is the first that it reads in the batch. The states of prompts and of ended texts
are kept, so that the next turn of a conversation reads only what is new.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.model.logits import fresh_cache
from linearizer.runtime.cache import LinearizedLayer
from linearizer.serve.kept_states import KeptStates
from linearizer.serve.row import Row
from linearizer.serve.rows import fork_cache, join_caches, keep_rows, take_row
from linearizer.serve.sampling import choose_tokens

MAX_ROWS = 32  # texts in the batch
MAX_WAITING = 1024  # texts beside it
PIECE = 512  # tokens of prompts that are read between two tokens of the batch; states are kept at its multiples

Tensor = torch.Tensor


class Engine:
    """Works in a thread of its own; `submit` and `cancel` may be called from any."""

    def __init__(self, model: PreTrainedModel, max_state_bytes: int) -> None:
        self.model, self.kept = model, KeptStates(max_state_bytes)
        self.rows: list[Row] = []
        self.cache: Cache | None = None  # of the rows
        self.waiting: deque[Row] = deque()
        self.wake, self.closed = threading.Condition(), False
        self.thread = threading.Thread(target=self.work, name="batch", daemon=True)

    def __enter__(self) -> Engine:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.thread.join()

    def submit(self, row: Row) -> bool:
        """Queue a row; tell whether there is room for it."""
        with self.wake:
            if self.closed or len(self.waiting) >= MAX_WAITING:
                return False
            self.waiting.append(row)
            self.wake.notify()
            return True

    def cancel(self, row: Row) -> None:
        """Abandon a row; its place is free after the token that is being written."""
        with self.wake:
            row.abandoned = True
            self.wake.notify()

    def work(self) -> None:
        """Serve until closed."""
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.closed or self.waiting or self.rows)
                if self.closed:
                    return
            with torch.inference_mode():
                self.step()

    def step(self) -> None:
        """Read a piece of what waits, and write a token of every row."""
        self.read_prompts()
        if self.rows:
            try:
                self.write_token(self.rows, self.cache)
            except Exception as error:  # a device may fail in many ways, and other requests are served after it
                self.fail_rows(error)
        self.remove_rows()

    def read_prompts(self) -> None:
        """Read about a piece of the prompts that wait, in their order; those that are read join the batch."""
        read: list[Row] = []
        left = PIECE
        while left > 0 and len(self.rows) + len(read) < MAX_ROWS:
            with self.wake:
                while self.waiting and self.waiting[0].abandoned:
                    self.waiting.popleft()
                if not self.waiting:
                    break
                row = self.waiting[0]
            try:
                left -= self.read_piece(row)
                if not row.left:
                    if not row.read:  # a prompt of one token: no state yet that could be laid beside others
                        self.write_token([row], row.cache)
                    read.append(row)
            except Exception as error:  # as in `step`
                row.fail(describe(error))
            if row.done or not row.left:
                with self.wake:
                    self.waiting.popleft()
        self.join([row for row in read if not row.done])

    def read_piece(self, row: Row) -> int:
        """Read a prompt to the next multiple of PIECE; tell how many tokens these were."""
        if not row.looked_up:
            row.looked_up = True
            row.read, row.cache = self.kept.take_longest(row.prompt[:-1])
            row.reused = row.read
        cache = row.cache = row.cache or fresh_cache(self.model)
        if not row.left:
            return 0
        stop = min(row.read - row.read % PIECE + PIECE, len(row.prompt) - 1)
        ids = torch.tensor([row.prompt[row.read : stop]], device=self.model.device)
        count, row.read = stop - row.read, stop
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not self.kept.has(row.prompt[:stop]):
            self.kept.keep(row.prompt[:stop], fork_cache(cache))
        return count

    def join(self, rows: list[Row]) -> None:
        """Let rows whose prompts are read join the batch."""
        if rows:
            caches = [self.cache] * bool(self.rows) + [row.cache for row in rows]
            self.rows, self.cache = self.rows + rows, join_caches(caches)
        for row in rows:
            row.cache = None

    def write_token(self, rows: list[Row], cache: Cache | None) -> None:
        """Let every row read its last token, and write the next."""
        assert cache is not None
        device = self.model.device
        ids = torch.tensor([[row.tokens[row.read]] for row in rows], device=device)
        place = torch.tensor([[row.read] for row in rows], device=device)
        given = {"position_ids": place, "attention_mask": self.mask(place, cache)}
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **given)
        logits = out.logits[:, -1].float()
        broken = logits.isnan().any(-1).tolist()
        tokens = choose_tokens(logits, [row.drawing for row in rows])
        for row, token, is_broken in zip(rows, tokens, broken, strict=True):
            row.read += 1
            if is_broken:
                row.fail("the model's logits are not finite: its weights are damaged, or its dtype is too narrow")
            else:
                row.add(token)

    def mask(self, place: Tensor, cache: Cache) -> Tensor | None:
        """Tell which tokens are padding at the left, where layers keep keys of tokens; states have none."""
        if all(isinstance(layer, LinearizedLayer) for layer in cache.layers) or (place == place[0]).all():
            return None
        longest = place.max()
        return (torch.arange(int(longest) + 1, device=place.device) >= longest - place).long()

    def remove_rows(self) -> None:
        """Remove the rows that have ended or are abandoned; keep the states of what they have read."""
        staying = [index for index, row in enumerate(self.rows) if not (row.done or row.abandoned)]
        if len(staying) == len(self.rows):
            return
        try:
            for index, row in enumerate(self.rows):
                if index not in staying and not row.failed:
                    self.kept.keep(row.tokens[: row.read], take_row(self.cache, index, row.read))
            self.rows = [self.rows[index] for index in staying]
            if staying:
                keep_rows(self.cache, staying, max(row.read for row in self.rows))
            else:
                self.cache = None
        except Exception as error:  # as in `step`
            self.fail_rows(error)

    def fail_rows(self, error: Exception) -> None:
        """End all rows of the batch with an error."""
        for row in self.rows:
            if not row.done:
                row.fail(describe(error))
        self.rows, self.cache = [], None


def describe(error: Exception) -> str:
    return f"writing failed ({first_line(error)}): try again, with fewer tokens or fewer requests at once"
