"""The running batch: texts join it when their prompt is read and leave it when they end, at different lengths.

In turns, a part of the waiting prompts is read (prompts.py), and every row of the batch writes a token. The last token
of a prompt is the first that its row reads in the batch. The states of prompts and of ended texts are kept, so that the
next turn of a conversation reads only new text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.serve.cache_rows import copy_cache, read_on, set_shift, view_row
from linearizer.serve.prompts import KeptStates, Prompts
from linearizer.serve.row import Row, choose_tokens, fail_rows
from linearizer.serve.token_graphs import TokenGraphs
from linearizer.teacher.logits import fresh_cache

MAX_ROWS = 32  # texts in the batch
MAX_WAITING = 1024  # texts that wait for it
READ_BETWEEN = 512  # tokens of prompts that a CPU reads between two tokens of the batch
READ_IDLE = 4096  # the same without a batch

Tensor = torch.Tensor
Result = TypeVar("Result")


class Engine:
    """The batch and its thread; `submit` and `cancel` may be called from any thread."""

    def __init__(self, model: PreTrainedModel, max_state_bytes: int) -> None:
        self.model, self.kept = model, KeptStates(max_state_bytes)
        self.waiting: deque[Row] = deque()
        self.calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.prompts, self.graphs = Prompts(model, self.kept), TokenGraphs(model)
        self.rows: list[Row] = []  # of the batch
        self.cache: Cache | None = None  # of the batch
        self.wake, self.closed = threading.Condition(), False
        self.thread = threading.Thread(target=self.work, name="batch", daemon=True)

    def __enter__(self) -> Engine:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self.wake:
            self.closed = True
            for row in [*self.waiting, *self.prompts.rows, *self.rows]:
                row.abandoned = True  # else a long prompt would be read to its end
            for _, future in self.calls:
                future.cancel()
            self.wake.notify()
        self.thread.join()

    @property
    def unread(self) -> int:
        """Count the texts with unread prompts."""
        return len(self.waiting) + len(self.prompts.rows)

    def has_room(self, rows: int) -> bool:
        """Whether this number of further rows may wait."""
        return not self.closed and len(self.waiting) + rows <= MAX_WAITING

    def submit(self, *rows: Row) -> bool:
        """Queue the rows of a request if there is room for all of them, else none; return whether there was."""
        with self.wake:
            if not self.has_room(len(rows)):
                return False
            self.waiting.extend(rows)
            self.wake.notify()
            return True

    def cancel(self, row: Row) -> None:
        """Abandon a row; its place is free after the current token."""
        with self.wake:
            row.abandoned = True
            if row in self.waiting:  # else it would take the place of others until the batch has room
                self.waiting.remove(row)
            self.wake.notify()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Let the engine's thread, which alone may use the model, call a function between two tokens."""
        future = Future[Result]()
        with self.wake:
            if self.closed:
                future.cancel()
            else:
                self.calls.append((function, future))
                self.wake.notify()
        return future

    def answer_calls(self) -> None:
        while self.calls:
            function, future = self.calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # its caller's
                    future.set_exception(error)

    def work(self) -> None:
        """Serve until closed; after an unhandled error, end all rows, and admit no more."""
        try:
            while True:
                with self.wake:
                    self.wake.wait_for(lambda: self.closed or self.calls or self.unread or self.rows)
                    if self.closed:
                        return
                self.answer_calls()
                with torch.inference_mode():
                    self.step()
        except Exception as error:
            with self.wake:
                self.closed = True
                for _, future in self.calls:
                    future.cancel()
            fail_rows([*self.waiting, *self.prompts.rows, *self.rows], error)
            raise

    def step(self) -> None:
        """Read a part of the waiting prompts, and write a token of every row."""
        self.admit()
        self.join(self.prompts.read(self.prompts.times * (READ_BETWEEN if self.rows else READ_IDLE)))
        try:
            if self.rows:
                self.write_token(self.rows, self.cache)
            self.remove_rows()
        except Exception as error:  # a device may fail in many ways; other requests must still be served
            fail_rows(self.rows, error)
            self.rows, self.cache = [], None

    def admit(self) -> None:
        """Let rows begin while the batch will have room for them."""
        with self.wake:
            while self.waiting and len(self.rows) + len(self.prompts.rows) < MAX_ROWS:
                self.prompts.rows.append(self.waiting.popleft())

    def join(self, rows: list[Row]) -> None:
        """Add rows to the batch whose prompts are read."""
        try:
            for row in rows:
                if row.cache is None:  # a prompt of one token has no state yet
                    row.cache = cache = fresh_cache(self.model)
                    self.write_token([row], cache)
                    if row.done and not row.failed:
                        self.hand_over(row, cache)
            if rows := [row for row in rows if not row.done]:
                caches = [cache for cache in (self.cache, *(row.cache for row in rows)) if cache is not None]
                self.cache = self.graphs.join(caches)
                self.rows = self.rows + rows
        except Exception as error:  # as in `step`
            fail_rows(rows, error)
        for row in rows:
            row.cache = None

    def write_token(self, rows: list[Row], cache: Cache | None) -> None:
        """Let every row read its last token, and write the next."""
        assert cache is not None
        numbers = [[row.tokens[row.read], row.read, row.shift] for row in rows]
        logits = self.graphs.read(cache, *torch.tensor(numbers, device=self.model.device).T).float()
        finite = (logits < torch.inf).all(-1).tolist()  # false for what is not a number; a token may be impossible
        tokens = choose_tokens(logits, [row.drawing for row in rows], [row.tokens for row in rows])
        for row, token, is_finite in zip(rows, tokens, finite, strict=True):
            row.read += 1
            if is_finite:
                row.add(token)
            else:
                row.fail("the model's logits are not finite: its weights are damaged, or its dtype is too narrow")

    def hand_over(self, row: Row, cache: Cache) -> None:
        """Hand over the state of a row that has ended, after what it has not read yet."""
        if row.state is None or not row.state.set_running_or_notify_cancel():  # its client has gone
            return
        try:
            cache = copy_cache(cache, lambda x: x.clone())
            if unread := row.unread_at_end:
                ids, read, shift = (
                    torch.tensor(x, device=self.model.device) for x in ([unread], [row.read], [row.shift])
                )
                read_on(self.model, cache, ids, read, shift)
            set_shift(cache, self.model, row.shift)
            row.state.set_result(cache)
        except Exception as error:  # as in `step`
            row.state.set_exception(error)

    def remove_rows(self) -> None:
        """Remove ended and abandoned rows from the batch; keep their states."""
        staying = [index for index, row in enumerate(self.rows) if not (row.done or row.abandoned)]
        if len(staying) == len(self.rows):
            return
        for index, row in enumerate(self.rows):
            if index in staying or row.failed:
                continue
            view = view_row(self.cache, index, row.read)
            if self.kept.max_bytes:
                self.kept.keep(row.tokens[: row.read], view, row.shift, row.owner)
            if row.done:
                self.hand_over(row, view)
        self.rows = [self.rows[index] for index in staying]
        if staying:
            self.cache = self.graphs.keep(self.cache, staying, max(row.read for row in self.rows))
        else:
            self.cache = None
