"""Teacher and student write at the same time, a token each in turn, so that neither slows the other's clock.

Each has a thread, and a thread works only while it holds the baton. It hands over after each token, with the random
numbers as it left them: what both write is what `compare` has them write one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from linearizer.errors import FaultError
from linearizer.evaluate.side_by_side import Side, bytes_held, prompt_ids
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

OFTEN = 0.25  # seconds between two updates: each takes some time from what writes


@dataclass(frozen=True)
class Both:
    """What the two have written by now."""

    teacher: Side
    student: Side
    done: bool


class Baton:
    """Lets one of two work at a time, in turns."""

    def __init__(self) -> None:
        self.turn, self.left = 0, {0, 1}
        self.changed = threading.Condition()

    def wait(self, place: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == place or (1 - place) not in self.left)

    def hand_over(self, place: int, leave: bool = False) -> None:
        with self.changed:
            if leave:
                self.left.discard(place)
            self.turn = 1 - place
            self.changed.notify_all()


class Voice(StoppingCriteria):
    """One of the two: its clock, its random numbers, what it has written."""

    def __init__(self, place: int, baton: Baton, stop: threading.Event, device: torch.device, seed: int) -> None:
        self.place, self.baton, self.stop, self.device, self.seed = place, baton, stop, device, seed
        self.ids: list[int] = []
        self.seconds, self.first, self.begin = 0.0, 0.0, 0.0
        self.random: tuple | None = None
        self.error: Exception | None = None
        self.cache: Cache | None = None

    def take(self) -> None:
        self.baton.wait(self.place)
        if self.random is None:
            torch.manual_seed(self.seed)
        else:
            self.set_random(self.random)
        self.begin = time.perf_counter()

    def give(self, leave: bool = False) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - self.begin
        self.random = self.get_random()
        self.baton.hand_over(self.place, leave)

    def get_random(self) -> tuple:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def set_random(self, kept: tuple) -> None:
        torch.set_rng_state(kept[0])
        if kept[1] is not None:
            torch.cuda.set_rng_state(kept[1], self.device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **how: object) -> torch.Tensor:
        """Note a token, and let the other write one."""
        self.ids.append(int(input_ids[0, -1]))
        self.give()
        if len(self.ids) == 1:
            self.first = self.seconds
        self.take()
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)

    def side(self, tokenizer: PreTrainedTokenizerBase) -> Side:
        """Say what was written by now."""
        ids, seconds = list(self.ids), self.seconds
        rate = (len(ids) - 1) / (seconds - self.first) if len(ids) > 1 and seconds > self.first else 0.0
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Side(text, len(ids), self.first, rate, bytes_held(self.cache) if self.cache is not None else 0)


def duet(
    teacher: PreTrainedModel,
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    new_tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
) -> Iterator[Both]:
    """Let both continue a prompt, and tell a few times a second how far they are; closed, both stop at their token."""
    ids = prompt_ids(tokenizer, prompt, new_tokens)
    stop, baton, over = threading.Event(), Baton(), threading.Event()
    models = (teacher, student)
    voices = [Voice(n, baton, stop, model.device, seed) for n, model in enumerate(models)]
    threads = [
        threading.Thread(target=sing, args=(model, voice, ids, new_tokens, sample, over), daemon=True)
        for model, voice in zip(models, voices, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        while not over.wait(OFTEN):
            yield Both(voices[0].side(tokenizer), voices[1].side(tokenizer), False)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for voice in voices:
        if voice.error is not None:
            raise FaultError(f"writing broke off ({type(voice.error).__name__}): try again, with fewer tokens")
    yield Both(voices[0].side(tokenizer), voices[1].side(tokenizer), True)


@torch.inference_mode()
def sing(
    model: PreTrainedModel, voice: Voice, ids: torch.Tensor, new_tokens: int, sample: bool, over: threading.Event
) -> None:
    """Let one model write, in its turns."""
    voice.take()
    try:
        own = isinstance(model, LinearizedForCausalLM)
        voice.cache = model.empty_cache() if own else DynamicCache(config=model.config)
        ids = ids.to(model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=voice.cache,
            max_new_tokens=new_tokens,
            do_sample=sample,
            pad_token_id=model.generation_config.pad_token_id or 0,
            stopping_criteria=StoppingCriteriaList([voice]),
        )
    except Exception as error:  # it is told by the thread that listens
        voice.error = error
    finally:
        voice.give(leave=True)
        if not voice.baton.left:
            over.set()
