"""Teacher and student side by side: the same prompt and seed, what they write, how fast, and what they remember."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from linearizer.errors import RequestError
from linearizer.model.logits import bytes_held, fresh_cache
from linearizer.progress import Progress, Steps
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM


@dataclass(frozen=True)
class Side:
    """What one of the two wrote, and what it took."""

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float  # after the first token
    state_bytes: int  # what is remembered at the end


@dataclass(frozen=True)
class Comparison:
    prompt: str
    prompt_tokens: int
    teacher: Side
    student: Side


class Stopwatch(BaseStreamer):
    """Notes when each token comes."""

    def __init__(self) -> None:
        self.begin, self.times = time.perf_counter(), []  # type: ignore[var-annotated]
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.times.append(time.perf_counter() - self.begin)
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is left to note."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int) -> torch.Tensor:
    """Read a prompt that is to be continued: (1, tokens)."""
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0 or new_tokens < 1:
        raise RequestError(
            f"there is nothing to compare: prompt {prompt!r}, {new_tokens} new tokens; give at least one"
        )
    return ids


def compare(
    teacher: PreTrainedModel,
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    new_tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
) -> Steps[Comparison]:
    """Let both continue a prompt."""
    ids = prompt_ids(tokenizer, prompt, new_tokens)
    sides = []
    for done, model in enumerate((teacher, student)):
        yield Progress("compare", done, 2, "models")
        sides.append(write(model, tokenizer, ids, new_tokens, seed, sample))
    yield Progress("compare", 2, 2, "models")
    return Comparison(prompt, ids.shape[1], *sides)


@torch.inference_mode()
def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    new_tokens: int,
    seed: int,
    sample: bool,
) -> Side:
    """Let one model write, from a cache of its own kind."""
    cache = fresh_cache(model)
    ids, watch = ids.to(model.device), Stopwatch()
    torch.manual_seed(seed)
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=sample,
        pad_token_id=model.generation_config.pad_token_id or 0,
        streamer=watch,
    )[0, ids.shape[1] :]
    took = watch.times[-1] - watch.times[0]
    rate = (len(watch.times) - 1) / took if took > 0 else 0.0
    written = tokenizer.decode(text, skip_special_tokens=True)
    return Side(written, len(text), watch.times[0], rate, bytes_held(cache))
