"""Reads a text twice, so that a student's state keeps what can be asked for later.

A student that reads token by token merges slots before it knows what will be asked. Here the model reads a text with
its own attention and cache, and then reads it again, after the request to repeat it, as KVzip does (2505.23416): a
head's attention to the first reading says how much each token is needed to repeat the text. Then the tokens of the
first reading merge into slots, those first that are needed least. The state has the size of any other, and the student
reads on from it; until then the teacher's cache of the text takes memory.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from linearizer.student.attention_interface import attention_by_layer, scores_of
from linearizer.student.attention_of_student import (
    HeadKind,
    HeadState,
    Merging,
    Scores,
    Slots,
    append,
    as_sink,
    choose_pairs,
    close_state,
    errors_of_pairs,
    merge_pairs,
    open_state,
    take,
    working_dtype,
)
from linearizer.student.cache import LinearizedCache, LinearizedLayer, copy_layer, has_student
from linearizer.student.layer_student import HeadGroup, LayerStudent, as_slice
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.observing import attending_as_teacher, observing
from linearizer.teacher.token_loop import PIECE_TOKENS, read_tokens

Tensor = torch.Tensor
REQUEST = "\n\nRepeat the text above exactly:\n\n"
LEAD = 16  # tokens before a piece of the text, which tell the model where it goes on
SHORTEST_PIECE = 64
LONGEST_ON_CPU = 8192  # tokens of a text: the time grows with their square
MAX_SCORES = {"cpu": 2**22, "cuda": 2**27}  # of a layer's heads at once; a CPU's cache has no room for more
MERGED = 512  # tokens that join slots at once: more take longer, and gain nothing
REMOVED = 0.3  # of slots in one round
POWER = 2  # of need in the cost of a merge, which is the fourth power of an error
LEAST = 1e-12  # need that counts as none


def may_read_twice(student: LinearizedForCausalLM, tokens: int) -> bool:
    """Whether slots of a text merge, the model has positions for its repetition, and it does not take too long."""
    if student.device.type == "cpu" and tokens > LONGEST_ON_CPU:
        return False
    layers = [layer for layer in student.students() if any(group.merger is not None for group in layer.head_groups())]
    merges = any(tokens > layer.exact_tokens for layer in layers)
    return merges and piece_tokens(student, tokens) >= min(tokens, SHORTEST_PIECE)


def piece_tokens(student: LinearizedForCausalLM, tokens: int) -> int:
    """Count the tokens that are repeated at once after a text."""
    positions = getattr(student.text_config, "max_position_embeddings", None) or sys.maxsize
    return min(tokens, PIECE_TOKENS, positions - tokens - LEAD - len(REQUEST))


def request_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that ask for a text again."""
    tokens: list[int] = tokenizer(REQUEST, add_special_tokens=False)["input_ids"]
    return tokens


def read_twice(
    student: LinearizedForCausalLM, request: Sequence[int], ids: Tensor, cache: LinearizedCache
) -> Iterator[int]:
    """Read a text (1, tokens) twice, into an empty cache; yield after each piece how many tokens were read."""
    tokens, size = ids.shape[1], piece_tokens(student, ids.shape[1])
    with attending_as_teacher(student):
        whole = fresh_cache(student)
    for begin in range(0, tokens, PIECE_TOKENS):
        with attending_as_teacher(student):  # not while others read on between pieces
            deque(read_tokens(student, ids[:, begin : begin + PIECE_TOKENS], whole), 0)
        yield min(begin + PIECE_TOKENS, tokens)
    needs = Needs(tokens)
    for begin in range(0, tokens, size):
        again = torch.cat([ids.new_tensor([[*request]]), ids[:, max(0, begin - LEAD) : begin + size]], 1)
        with observing(student, needs.observe):
            deque(read_tokens(student, again, fork(whole)), 0)
        yield tokens + min(begin + size, tokens)
    choose_states(student, whole, needs, cache)


def fork(cache: Cache) -> Cache:
    """Return a cache that reads on without changing this one: recurrent states are written to, keys are not."""
    result = copy.copy(cache)
    result.layers = [
        copy_layer(layer, torch.clone if hasattr(layer, "recurrent_states") else lambda x: x) for layer in cache.layers
    ]
    return result


@dataclass
class LayerNeeds:
    """What a layer keeps of a text, and how much attention each KV head gives to it while the text is read again."""

    scale: float
    needs: Tensor  # (heads, tokens), the sum of squares over rows and query heads
    k: Tensor  # (1, heads, tokens, dim)
    v: Tensor


class Needs:
    """The needs of all layers, by the number of the layer; a layer that reads another's keys adds to its needs."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.layers: dict[int, LayerNeeds] = {}

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, given: dict
    ) -> None:
        """Add the attention of new rows (1, query heads, rows, dim) to the tokens that were read first."""
        if (student := getattr(module, "student", None)) is None:
            return
        kv_heads, rows, columns = key.shape[1], query.shape[2], key.shape[2]
        index: Any = getattr(student, "reads", module.layer_idx)
        first = LayerNeeds(scaling, key.new_zeros(kv_heads, self.tokens, dtype=torch.float32), key, value)
        layer = self.layers.setdefault(int(index), first)
        layer.k, layer.v = key[:, :, : self.tokens], value[:, :, : self.tokens]
        cap, sink = scores_of(module, given) or (None, None)
        scores = Scores(cap, None if sink is None else sink.view(kv_heads, -1))
        queries = query[0].unflatten(0, (kv_heads, -1)).float() * scaling
        place, most = torch.arange(columns, device=key.device), MAX_SCORES.get(key.device.type, MAX_SCORES["cpu"])
        for part in place[columns - rows :].split(max(1, most // (query.shape[1] * columns))):
            bias = torch.zeros(len(part), columns, device=key.device).masked_fill(place > part[:, None], -torch.inf)
            logits = queries[:, :, part - columns + rows] @ key[0][:, None].mT.float()
            layer.needs += scores.weights(logits, bias, slice(None))[..., : self.tokens].square().sum((1, 2))


@torch.inference_mode()
def choose_states(student: LinearizedForCausalLM, whole: Cache, needs: Needs, cache: LinearizedCache) -> None:
    """Put the states of a text, of which a teacher's cache holds all, into an empty cache."""
    modules, own = attention_by_layer(student), {*vars(LinearizedLayer()), "keys", "values"}
    for index, (layer, held) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        if not has_student(layer):
            cache.layers[index] = held
            continue
        vars(layer).update({name: x for name, x in vars(held).items() if name not in own})  # a recurrent part
        of_layer, kept = cast(LayerStudent, modules[index].student), needs.layers[index]
        layer.memory = [state_of_group(of_layer, group, kept) for group in of_layer.head_groups()]
        layer.tokens_read = kept.k.shape[2]


def state_of_group(student: LayerStudent, group: HeadGroup, kept: LayerNeeds) -> Any:
    """Return the state of a group of a layer's heads after a text."""
    heads, scale = as_slice(group.heads), kept.scale
    k, v = kept.k[:, heads], kept.v[:, heads]
    q = k.new_zeros(1, len(group.heads), 1, *k.shape[2:])  # nobody asks for outputs
    merging = group.merging(scale) if group.merger is not None else None
    if merging is None or not isinstance(group.kind, HeadKind):  # there is nothing to choose
        return student.attend_in_basis(group, heads, (q, k, v), scale, None, None, None)[1]
    if student.turns is not None and group.has_basis:
        _, k, v = student.turns(student.turns.to_stored, q, k, v, scale**0.5, heads)
    return choose_slots(group.kind, merging, group.sinks, k, v, kept.needs[heads])


def choose_slots(kind: HeadKind, merging: Merging, sinks: int, k: Tensor, v: Tensor, needs: Tensor) -> HeadState:
    """Return the state of heads with slots after a text of whose tokens so much is needed: (heads, tokens)."""
    state, work = HeadState.empty(kind, k, v, sinks), working_dtype(v)
    k, v = (torch.cat([as_sink(x[0, :, :sinks], kind.bits), x[0, :, sinks:]], 1).to(work) for x in (k, v))
    opened, merging = open_state(kind, state, 0, sinks, work), merging.for_texts(1, work)
    append(kind, opened, k, v, sinks)
    leaving, slots, needed = max(0, kind.merged(opened.count) - sinks), opened.slots, needs[:, :0].to(work)
    for part in torch.arange(leaving).split(MERGED):
        new_k, new_v = opened.near_k[:, part], opened.near_v[:, part]
        new = new_k, new_v, torch.ones_like(new_k[..., 0]), torch.zeros_like(new_k[..., 0])
        slots = Slots(*(torch.cat(pair, 1) for pair in zip(vars(slots).values(), new, strict=True)))
        needed = torch.cat([needed, needs[:, part + sinks].to(work)], 1)
        slots, needed = merge_by_needs(slots, needed, kind, merging, opened.stored)
    opened.slots = slots
    opened.near_k, opened.near_v = opened.near_k[:, leaving:], opened.near_v[:, leaving:]
    return close_state(kind, state, opened, k, v)


def merge_by_needs(
    slots: Slots, needs: Tensor, kind: HeadKind, merging: Merging, stored: torch.dtype
) -> tuple[Slots, Tensor]:
    """Merge slots in rounds until they fit: a pair costs more, the more a token of one of them is needed."""
    while (count := slots.k.shape[1]) > kind.slots:
        fewer = max(kind.slots, int(count * (1 - REMOVED)))
        seen, need = slots.k @ merging.metric.mT, (needs / slots.weight).clamp_min(LEAST) ** POWER
        cost = errors_of_pairs(slots, seen) * torch.maximum(need[..., None], need[:, None])
        removed, partner, order = pairs = choose_pairs(cost, count - fewer)
        slots = merge_pairs(slots, seen, pairs, replace(kind, slots=fewer), stored)
        needs = take(needs.scatter_add(1, partner, take(needs, removed)), order)
    return slots, needs
