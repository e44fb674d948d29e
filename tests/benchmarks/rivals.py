"""Controls that others published: a cache of so many tokens per KV head, from which one goes whenever it is full.

What goes is dropped, or merged into what stays. All decide token by token as a text streams in, and hold no more
meanwhile. Each is written from its paper's formulas, in the form that a stream allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from linearizer.plan.head_bytes import Layer, token_bytes
from linearizer.student.attention_interface import observing
from linearizer.student.cache import CACHE
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.student.rounding import round_vectors
from linearizer.student.state import tensors, working_dtype
from linearizer.teacher.layers import layer_number

RECENT = 8  # queries that morphkv and grkv keep in view
AFTER = 4  # tokens that cam adds a value to
STEADY = 0.7  # of d2o's moving threshold
RIDGE = 0.1
REPEATED = 64  # tokens that kvzip repeats at once after the text
SUMMED = 4  # bytes of what is counted for every token
EXTRA = {  # bytes of a token beside key and value
    "h2o": SUMMED, "tova": 0, "morphkv": RECENT * 2, "nexus": 2 * SUMMED, "cam": SUMMED, "d2o": SUMMED,
    "zsmerge": 2 * SUMMED, "keepkv": 2 * SUMMED, "grkv": SUMMED, "kvzip": SUMMED,
}  # fmt: skip
RULES = {
    "h2o": "drops what got the least attention in all, and never one of the newer half (2306.14048)",
    "tova": "drops what the newest token attends to least (2401.06104)",
    "morphkv": "drops what the newest queries together attend to least, and none of their own tokens (2503.00979)",
    "nexus": "keeps a sample, likelier what got more attention, by keys drawn once; without its walk (2606.23961)",
    "cam": "as h2o; the value that goes is added to tokens after it, by chance, likelier the more it got (ICML 2024)",
    "d2o": "as h2o; what goes is merged into the most similar key, if it is more similar than usual (2406.13035)",
    "zsmerge": "as h2o; merged into the most similar key by their tokens, whose number raises the logit (2503.10714)",
    "keepkv": "as zsmerge, but so that the newest query sees the same before and after (2504.09936)",
    "grkv": "as h2o; the values that stay are fitted to what the newest queries saw, by ridge regression (2605.31105)",
    "kvzip": "an oracle: as h2o, by the most attention of a repetition of the text, seen beforehand (2505.23416)",
}
GOES_LAST = torch.inf

Tensor = torch.Tensor


def tokens_within(bytes: int, layer: Layer, rule: str, bits: int) -> int:
    """Count the tokens that a head holds in so many bytes, with all that the rule remembers of them."""
    if rule == "grkv":  # it keeps queries, too
        bytes -= RECENT * layer.query_heads // layer.kv_heads * layer.key_dim * 2
    return max(1, bytes // (token_bytes(layer, bits) + EXTRA[rule]))


@dataclass
class Held:
    """What heads hold: a row for each text and KV head, with room for one token more than stays.

    Between calls texts and KV heads are two dimensions, as a cache expects it.
    """

    k: Tensor  # (rows, room, dim)
    v: Tensor
    place: Tensor  # (rows, room) in the text; -1 where nothing is
    received: Tensor  # (rows, room) attention, in all
    seen: Tensor  # (rows, room, RECENT) by the newest queries
    drawn: Tensor  # (rows, room) by chance, or by an oracle, once
    weight: Tensor  # (rows, room) tokens
    asked: Tensor  # (rows, RECENT · group, dim) the newest queries
    usual: Tensor  # (rows,) similarity
    read: Tensor  # (rows,) tokens
    foreseen: Tensor  # (rows, tokens) by an oracle, of the first tokens of the text

    @staticmethod
    def empty(rows: int, room: int, group: int, k: Tensor, v: Tensor, foreseen: Tensor) -> Held:
        flat = k.new_zeros(rows, room)
        return Held(
            k.new_zeros(rows, room, k.shape[-1]), v.new_zeros(rows, room, v.shape[-1]),
            torch.full((rows, room), -1, device=k.device), flat, k.new_zeros(rows, room, RECENT), flat.clone(),
            flat + 1, k.new_zeros(rows, RECENT * group, k.shape[-1]), k.new_zeros(rows),
            torch.zeros(rows, dtype=torch.long, device=k.device), foreseen,
        )  # fmt: skip

    def move_last(self, to: Tensor) -> None:
        """Put the last token where another was, row by row."""
        at = torch.arange(len(to), device=to.device)
        for x in (self.k, self.v, self.place, self.received, self.seen, self.drawn, self.weight):
            x[at, to] = x[:, -1].clone()
        self.place[:, -1] = torch.where(to == self.place.shape[1] - 1, self.place[:, -1], -1)


class Rival(nn.Module):
    """Takes the place of a layer's student: `tokens` of every KV head, in so many bits."""

    def __init__(self, tokens: Sequence[int], rule: str, bits: int = 16, seed: int = 0) -> None:
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
        self.tokens, self.rule, self.bits, self.seed = tokens, rule, bits, seed
        self.foreseen: Tensor | None = None  # (texts, KV heads, tokens)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Attend token by token; `memory` is brought up to date."""
        if real is not None:
            raise ValueError("the control reads texts without padding")
        if self.bits < 16:
            k, v = round_vectors(k, self.bits), round_vectors(v, self.bits)
        batch, heads, tokens = k.shape[:3]
        q = (q * scale).unflatten(1, (heads, -1)).flatten(0, 1).transpose(1, 2)  # (rows, tokens, group, dim)
        dtype, (q, k, v) = v.dtype, (x.to(working_dtype(x)) for x in (q, k.flatten(0, 1), v.flatten(0, 1)))
        memory = [] if memory is None else memory
        if memory:
            held = Held(**{name: x.flatten(0, 1) for name, x in tensors(memory[0]).items()})
        else:
            foreseen = k.new_zeros(batch * heads, 0) if self.foreseen is None else self.foreseen.flatten(0, 1)
            held = Held.empty(batch * heads, max(self.tokens) + 1, q.shape[2], k, v, foreseen)
        sizes = torch.tensor(list(self.tokens) * batch, device=k.device)
        rows = [read_token(held, q[:, t], k[:, t], v[:, t], sizes, self.rule, self.seed) for t in range(tokens)]
        memory[:] = [Held(**{name: x.unflatten(0, (batch, heads)) for name, x in tensors(held).items()})]
        return torch.stack(rows, 2).unflatten(0, (batch, heads)).flatten(1, 2).to(dtype)


def read_token(held: Held, q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, rule: str, seed: int) -> Tensor:
    """Attend with a token (rows, group, dim), and make room for the next."""
    now = int(held.read[0])
    held.k[:, -1], held.v[:, -1], held.place[:, -1] = k, v, held.read
    held.received[:, -1], held.seen[:, -1], held.weight[:, -1] = 0, 0, 1
    if rule == "kvzip":
        held.drawn[:, -1] = held.foreseen[:, now] if now < held.foreseen.shape[1] else 0.0
    else:
        held.drawn[:, -1] = torch.rand((), generator=torch.Generator().manual_seed(seed * 1_000_003 + now))
    logits = logits_of(held, q)
    weights = logits.softmax(-1)
    out, attended = weights @ held.v, weights.mean(1)
    held.received += attended
    held.seen[..., now % RECENT] = attended
    held.asked.unflatten(1, (RECENT, -1))[:, now % RECENT] = q
    held.read += 1
    full, there = (held.place >= 0).sum(-1) > sizes, held.place >= 0
    free = (~there).to(torch.uint8).argmax(-1)  # any place where nothing is; the last where all is full
    worth = worths(held, attended, sizes, rule).masked_fill(~there, GOES_LAST)
    goes = worth.argmin(-1)
    before = fit_targets(held) if rule == "grkv" else None
    merge(held, goes, full, logits, rule, seed)
    held.move_last(torch.where(full, goes, free))
    if before is not None:
        fit_values(held, before, full)
    return out


def logits_of(held: Held, q: Tensor) -> Tensor:
    """Give the logits of queries (rows, queries, dim): what counts for several tokens has a larger one."""
    logits = q @ held.k.mT + held.weight.log()[:, None]
    return logits.masked_fill((held.place < 0)[:, None], -torch.inf)


def worths(held: Held, attended: Tensor, sizes: Tensor, rule: str) -> Tensor:
    """Say what each token is worth to the rule: the least goes."""
    age = held.read[:, None] - 1 - held.place
    if rule == "tova":
        return attended
    if rule == "morphkv":
        return held.seen.sum(-1).masked_fill(
            age < torch.minimum(sizes // 2, sizes.new_tensor(RECENT))[:, None], GOES_LAST
        )
    if rule == "nexus":
        return (held.drawn.log() / held.received.clamp_min(1e-9)).masked_fill(age == 0, GOES_LAST)
    known = held.drawn if rule == "kvzip" else held.received
    return known.masked_fill(age < sizes[:, None] // 2, GOES_LAST)


def merge(held: Held, goes: Tensor, full: Tensor, logits: Tensor, rule: str, seed: int) -> None:
    """Let what stays take up something of what goes, in the rows that are full."""
    if rule not in ("cam", "d2o", "zsmerge", "keepkv"):
        return
    at = torch.arange(len(goes), device=goes.device)
    stays = (held.place >= 0).index_put((at, goes), torch.tensor(False))
    if rule == "cam":
        later = held.place - held.place[at, goes][:, None]
        later = stays & (later > 0)
        first = (
            torch.where(later, held.place, torch.iinfo(torch.long).max)
            .topk(min(AFTER, later.shape[1]), -1, False)
            .indices
        )
        there = later.gather(1, first)
        mean = (held.received.gather(1, first) * there).sum(-1) / there.sum(-1).clamp_min(1)
        chance = (held.received[at, goes] / mean.clamp_min(1e-9)).clamp(0, 1)
        drawn = torch.rand(len(goes), generator=torch.Generator().manual_seed(seed + int(held.read[0])))
        share = (full & (drawn.to(chance) < chance)).to(chance) / there.sum(-1).clamp_min(1)
        held.v.scatter_add_(
            1,
            first[..., None].expand(-1, -1, held.v.shape[-1]),
            (share[:, None] * there)[..., None] * held.v[at, goes][:, None],
        )
        return
    keys = nn.functional.normalize(held.k, dim=-1)
    alike = (keys @ keys[at, goes][..., None])[..., 0].masked_fill(~stays, -torch.inf)
    most, into = alike.max(-1)
    own, other = held.weight[at, into], held.weight[at, goes]
    if rule == "d2o":
        full = full & (most >= held.usual)
        held.usual = torch.where(full, STEADY * most + (1 - STEADY) * held.usual, held.usual)
        share = most.exp() / (most.exp() + math.e)
    elif rule == "zsmerge":
        share = other / (own + other)
    else:
        seen = (logits - held.weight.log()[:, None]).mean(1)  # q·k of the newest token's queries
        parts = own * (seen[at, into] - seen.amax(-1)).exp(), other * (seen[at, goes] - seen.amax(-1)).exp()
        share = parts[1] / (parts[0] + parts[1]).clamp_min(1e-30)
    share = torch.where(full, share, 0.0)[:, None]
    for x in (held.k, held.v):
        x[at, into] = (1 - share) * x[at, into] + share * x[at, goes]
    if rule != "d2o":
        held.weight[at, into] = torch.where(full, own + other, own)
    if rule == "keepkv":  # so that the votes of both give the new key the logit that both had
        wanted = torch.logaddexp(own.log() + seen[at, into], other.log() + seen[at, goes]) - (own + other).log()
        got = (1 - share[:, 0]) * seen[at, into] + share[:, 0] * seen[at, goes]
        factor = torch.where(full & (got.abs() > 0.1), (wanted / got).clamp(0.5, 2.0), 1.0)
        held.k[at, into] = held.k[at, into] * factor[:, None]


def fit_targets(held: Held) -> Tensor:
    """Give what the newest queries see while all is still there."""
    return logits_of(held, held.asked).softmax(-1) @ held.v


def fit_values(held: Held, before: Tensor, full: Tensor) -> None:
    """Change the values that stay as little as makes the newest queries see what they saw."""
    weights = logits_of(held, held.asked).softmax(-1)
    missing = before - weights @ held.v
    inner = weights @ weights.mT + RIDGE * torch.eye(weights.shape[1], device=weights.device)
    held.v += full[:, None, None] * (weights.mT @ torch.linalg.solve(inner, missing))


def attention_of(q: Tensor, k: Tensor, scale: float) -> Tensor:  # (texts, KV heads, group, rows, tokens)
    """Give the weights of the last rows: q (texts, query heads, rows, dim), k (texts, KV heads, tokens, dim)."""
    scores = scale * q.unflatten(1, (k.shape[1], -1)).float() @ k[:, :, None].float().mT
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).tril(k.shape[-2] - q.shape[-2])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


@contextmanager
def foreseeing(student: LinearizedForCausalLM, rivals: Sequence[Rival]) -> Iterator[None]:
    """While this lasts, let rivals know of each text, before it is read, what its repetition attends to."""

    def foresee(_: nn.Module, args: tuple, given: dict) -> None:
        cache = given.get(CACHE)
        if cache is None or not cache.get_seq_length():
            for rival, most in zip(rivals, attention_when_repeated(student, args[0]), strict=True):
                rival.foreseen = most

    hook = student.register_forward_pre_hook(foresee, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def attention_when_repeated(student: LinearizedForCausalLM, ids: Tensor) -> list[Tensor]:
    """Give of every layer the most attention that a token gets while its chunk comes again: (texts, KV heads, tokens).

    Each chunk comes again right after the whole text, as the teacher reads it.
    """
    tokens, most = ids.shape[1], {}  # type: int, dict[int, list[Tensor]]
    for chunk in torch.arange(tokens).split(REPEATED):

        def observe(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, _: dict, chunk: Tensor = chunk
        ) -> None:
            weights = attention_of(q[:, :, tokens:], k, scale)[..., chunk]
            most.setdefault(layer_number(module), []).append(weights.amax((2, 3)))

        with observing(student.base, observe):
            student.base.base_model(input_ids=torch.cat([ids, ids[:, chunk]], 1), use_cache=False)
    return [torch.cat(parts, -1) for _, parts in sorted(most.items())]
