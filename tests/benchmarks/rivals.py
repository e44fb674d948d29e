"""Controls that others published: a cache of a number of tokens per KV head, from which one goes whenever it is full.

What goes is dropped, or merged into what stays. All decide token by token as a text streams in. Each is written from
its paper's formulas, in the form that a stream allows. Several texts are read at once, each as if alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from linearizer.plan.head_bytes import Layer, token_bytes
from linearizer.student.attention_of_student import round_vectors, tensors, working_dtype
from linearizer.student.cache import CACHE
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import layer_number
from linearizer.teacher.observing import observing

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
CHANGES = ("cam", "d2o", "zsmerge", "keepkv", "grkv")  # rules that change keys or values that stay
GOES_LAST = torch.inf
BLOCK = 64  # tokens whose logits are computed at once
TINY = 1e-12
COLUMNS = ("k", "v", "norm", "place", "received", "seen", "drawn", "weight")

Tensor = torch.Tensor


def tokens_within(bytes: int, layer: Layer, rule: str, bits: int) -> int:
    """Count the tokens that a head holds in a number of bytes, with all that the rule remembers of them."""
    if rule == "grkv":  # it keeps queries, too
        bytes -= RECENT * layer.query_heads // layer.kv_heads * layer.key_dim * 2
    return max(1, bytes // (token_bytes(layer, bits) + EXTRA[rule]))


@dataclass
class Held:
    """What heads hold: a row for each text and KV head. Between calls texts and KV heads are two dimensions.

    While a block of tokens is read, its tokens are columns, too; after it there are as many as the largest head holds.
    """

    k: Tensor  # (rows, columns, dim)
    v: Tensor
    norm: Tensor  # (rows, columns) of the key
    place: Tensor  # (rows, columns) in the text
    received: Tensor  # (rows, columns) attention, in all
    seen: Tensor  # (rows, columns, RECENT) by the newest queries
    drawn: Tensor  # (rows, columns) by chance, or by an oracle, once
    weight: Tensor  # (rows, columns) tokens; 0 where nothing is held
    asked: Tensor  # (rows, RECENT · group, dim) the newest queries
    usual: Tensor  # (rows,) similarity
    read: Tensor  # (rows,) tokens
    foreseen: Tensor  # (rows, tokens) by an oracle, of the first tokens of the text

    @staticmethod
    def empty(rows: int, group: int, k: Tensor, v: Tensor, foreseen: Tensor) -> Held:
        flat, none = k.new_zeros(rows, 0), torch.zeros(rows, 0, dtype=torch.long, device=k.device)
        return Held(
            k[:, :0], v[:, :0], flat, none, flat, k.new_zeros(rows, 0, RECENT), flat, flat,
            k.new_zeros(rows, RECENT * group, k.shape[-1]), k.new_zeros(rows), none.sum(-1), foreseen,
        )  # fmt: skip

    def append(self, k: Tensor, v: Tensor, drawn: Tensor) -> None:
        """Add columns for tokens that are still to be read."""
        place = self.read[:, None] + torch.arange(k.shape[1], device=k.device)
        known = {"k": k, "v": v, "norm": k.norm(dim=-1), "place": place, "drawn": drawn}
        for name in COLUMNS:
            x = getattr(self, name)
            new = known.get(name, x.new_zeros(len(x), k.shape[1], *x.shape[2:]))
            setattr(self, name, torch.cat([x, new], 1))

    def drop_empty(self, room: int) -> None:
        """Keep the columns that hold something, at most `room`, in their order."""
        order = (self.weight == 0).to(torch.uint8).sort(dim=-1, stable=True).indices[:, :room]
        at = torch.arange(len(order), device=order.device)[:, None]
        for name in COLUMNS:
            setattr(self, name, getattr(self, name)[at, order])


class Rival(nn.Module):
    """Takes the place of a layer's student: `tokens` of every KV head, in a number of bits."""

    def __init__(self, tokens: Sequence[int], rule: str, bits: int = 16, seed: int = 0) -> None:
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
        self.tokens, self.rule, self.bits, self.seed = tokens, rule, bits, seed
        self.foreseen: Tensor | None = None  # (texts, KV heads, tokens)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Attend block by block; `memory` is brought up to date."""
        if real is not None:
            raise ValueError("the control reads texts without padding")
        if self.bits < 16:
            k, v = round_vectors(k, self.bits), round_vectors(v, self.bits)
        batch, heads = k.shape[:2]
        q = (q * scale).unflatten(1, (heads, -1)).flatten(0, 1).transpose(1, 2)  # (rows, tokens, group, dim)
        dtype, (q, k, v) = v.dtype, (x.to(working_dtype(x)) for x in (q, k.flatten(0, 1), v.flatten(0, 1)))
        memory = [] if memory is None else memory
        if memory:
            held = Held(**{name: x.flatten(0, 1).clone() for name, x in tensors(memory[0]).items()})
        else:
            foreseen = k.new_zeros(batch * heads, 0) if self.foreseen is None else self.foreseen.flatten(0, 1)
            held = Held.empty(batch * heads, q.shape[2], k, v, foreseen)
        sizes = torch.tensor(self.tokens, device=k.device).repeat(batch)
        blocks = zip(*(x.split(BLOCK, 1) for x in (q, k, v)), strict=True)
        rows = [self.read_block(held, sizes, *block) for block in blocks]
        memory[:] = [Held(**{name: x.unflatten(0, (batch, heads)) for name, x in tensors(held).items()})]
        return torch.cat(rows, 1).transpose(1, 2).unflatten(0, (batch, heads)).flatten(1, 2).to(dtype)

    def read_block(self, held: Held, sizes: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with tokens (rows, tokens, group, dim), each to what its predecessors left; keep what is left last.

        What changes no key and no value needs only its weights token by token: what they read is one product.
        """
        held.append(k, v, self.draw(held, k.shape[1]))
        logits = (q.flatten(1, 2) @ held.k.mT).unflatten(1, q.shape[1:3])  # (rows, tokens, group, columns)
        rows, first = [], held.weight.shape[1] - k.shape[1]
        for t in range(k.shape[1]):
            held.weight[:, first + t] = 1
            weights = (logits[:, t] + held.weight.log()[:, None]).softmax(-1)
            rows.append(weights @ held.v if self.rule in CHANGES else weights)
            self.make_room(held, sizes, q[:, t], weights.mean(1), logits[:, t:])
        out = torch.stack(rows, 1)
        if self.rule not in CHANGES:
            out = (out.flatten(1, 2) @ held.v).unflatten(1, q.shape[1:3])
        held.drop_empty(max(self.tokens))
        return out

    def draw(self, held: Held, tokens: int) -> Tensor:
        """Draw a number for each of the next tokens, or take what an oracle says of them: (rows, tokens)."""
        first, rows = int(held.read[0]), len(held.read)
        drawn = held.k.new_zeros(rows, tokens)
        if self.rule == "kvzip":
            known = held.foreseen[:, first : first + tokens]
            drawn[:, : known.shape[1]] = known
        elif self.rule == "nexus":
            for t in range(tokens):
                drawn[:, t] = torch.rand((), generator=generator_of(self.seed * 1_000_003 + first + t))
        return drawn

    def make_room(self, held: Held, sizes: Tensor, q: Tensor, attended: Tensor, logits: Tensor) -> None:
        """Let a token go in each row that holds too many; `logits` are those of the newest token and of later ones."""
        now = int(held.read[0])
        held.received += attended
        held.read += 1
        if self.rule == "morphkv":
            held.seen[..., now % RECENT] = attended
        if self.rule == "grkv":
            held.asked.unflatten(1, (RECENT, -1))[:, now % RECENT] = q
        if now < min(self.tokens):
            return
        there = held.weight > 0
        full = there.sum(-1) > sizes
        goes = worths(held, attended, sizes, self.rule).masked_fill(~there, GOES_LAST).argmin(-1)
        before = fit_targets(held) if self.rule == "grkv" else None
        if self.rule == "cam":
            draws = torch.rand(len(self.tokens), generator=generator_of(self.seed + now + 1))
            spread_value(held, goes, full, draws.repeat(len(goes) // len(draws)))
        elif self.rule in CHANGES and before is None:
            merge(held, goes, full, logits, self.rule)
        at = torch.arange(len(goes), device=goes.device)
        held.weight[at, goes] = held.weight[at, goes].masked_fill(full, 0)
        if before is not None:
            fit_values(held, before, full)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def worths(held: Held, attended: Tensor, sizes: Tensor, rule: str) -> Tensor:
    """Return what each token is worth to the rule: the least goes."""
    age = held.read[:, None] - 1 - held.place
    if rule == "tova":
        return attended
    if rule == "morphkv":
        return held.seen.sum(-1).masked_fill(age < (sizes // 2).clamp_max(RECENT)[:, None], GOES_LAST)
    if rule == "nexus":
        return (held.drawn.log() / held.received.clamp_min(1e-9)).masked_fill(age == 0, GOES_LAST)
    known = held.drawn if rule == "kvzip" else held.received
    return known.masked_fill(age < sizes[:, None] // 2, GOES_LAST)


def spread_value(held: Held, goes: Tensor, full: Tensor, drawn: Tensor) -> None:
    """Add the value that goes to the tokens after it, by chance."""
    at = torch.arange(len(goes), device=goes.device)
    later = (held.weight > 0) & (held.place > held.place[at, goes][:, None])
    places = torch.where(later, held.place, torch.iinfo(torch.long).max)
    first = places.topk(min(AFTER, later.shape[1]), -1, False).indices
    there = later.gather(1, first)
    mean = (held.received.gather(1, first) * there).sum(-1) / there.sum(-1).clamp_min(1)
    chance = (held.received[at, goes] / mean.clamp_min(1e-9)).clamp(0, 1)
    share = (full & (drawn.to(chance) < chance)).to(chance) / there.sum(-1).clamp_min(1)
    added = (share[:, None] * there)[..., None] * held.v[at, goes][:, None]
    held.v.scatter_add_(1, first[..., None].expand_as(added), added)


def merge(held: Held, goes: Tensor, full: Tensor, logits: Tensor, rule: str) -> None:
    """Merge what goes into the most similar key, in the rows that are full; later logits follow, as they are linear."""
    at = torch.arange(len(goes), device=goes.device)
    stays = (held.weight > 0).index_put((at, goes), torch.tensor(False))
    alike = (held.k @ held.k[at, goes][..., None])[..., 0] / (held.norm * held.norm[at, goes][:, None]).clamp_min(TINY)
    most, into = alike.masked_fill(~stays, -torch.inf).max(-1)
    own, other = held.weight[at, into], held.weight[at, goes]
    if rule == "d2o":
        full = full & (most >= held.usual)
        held.usual = torch.where(full, STEADY * most + (1 - STEADY) * held.usual, held.usual)
        share = most.exp() / (most.exp() + math.e)
    elif rule == "zsmerge":
        share = other / (own + other)
    else:
        seen = logits[:, 0].mean(1)  # q·k of the newest token's queries
        ours, theirs = seen[at, into], seen[at, goes]
        share = ((theirs - ours) + other.log() - own.log()).sigmoid()
    share = torch.where(full, share, 0.0)
    for x in (held.k, held.v, logits.movedim(-1, 1)):
        part = share.view(-1, *[1] * (x.ndim - 2))
        x[at, into] = (1 - part) * x[at, into] + part * x[at, goes]
    if rule != "d2o":
        held.weight[at, into] = torch.where(full, own + other, own)
    if rule == "keepkv":  # so that the votes of both give the new key the logit that both had
        wanted = torch.logaddexp(own.log() + ours, other.log() + theirs) - (own + other).log()
        got = (1 - share) * ours + share * theirs
        factor = torch.where(full & (got.abs() > 0.1), (wanted / got).clamp(0.5, 2.0), 1.0)
        for x in (held.k, logits.movedim(-1, 1)):
            x[at, into] = x[at, into] * factor.view(-1, *[1] * (x.ndim - 2))
    held.norm[at, into] = held.k[at, into].norm(dim=-1)


def fit_targets(held: Held) -> Tensor:
    """Return what the newest queries see while all is still there."""
    return (held.asked @ held.k.mT + held.weight.log()[:, None]).softmax(-1) @ held.v


def fit_values(held: Held, before: Tensor, full: Tensor) -> None:
    """Change the values that stay as little as makes the newest queries see what they saw."""
    weights = (held.asked @ held.k.mT + held.weight.log()[:, None]).softmax(-1)
    missing = before - weights @ held.v
    inner = weights @ weights.mT + RIDGE * torch.eye(weights.shape[1], device=weights.device)
    held.v += full[:, None, None] * (weights.mT @ torch.linalg.solve(inner, missing))


def attention_of(q: Tensor, k: Tensor, scale: float) -> Tensor:  # (texts, KV heads, group, rows, tokens)
    """Return the weights of the last rows: q (texts, query heads, rows, dim), k (texts, KV heads, tokens, dim)."""
    scores = scale * q.unflatten(1, (k.shape[1], -1)).float() @ k[:, :, None].float().mT
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).tril(k.shape[-2] - q.shape[-2])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


@contextmanager
def foreseeing(student: LinearizedForCausalLM, rivals: Sequence[Rival]) -> Iterator[None]:
    """While this lasts, let rivals know of each text, before it is read, what its repetition attends to."""

    def foresee(_: nn.Module, args: tuple, given: dict) -> None:
        cache = given.get(CACHE)
        if cache is None or not cache.get_seq_length():
            ids = args[0] if args else given["input_ids"]
            for rival, most in zip(rivals, attention_when_repeated(student, ids), strict=True):
                rival.foreseen = most

    hook = student.register_forward_pre_hook(foresee, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def attention_when_repeated(student: LinearizedForCausalLM, ids: Tensor) -> list[Tensor]:
    """Return each layer's most attention that a token gets while its chunk comes again: (texts, KV heads, tokens).

    Each chunk comes again right after the whole text, as the teacher reads it.
    """
    tokens, most = ids.shape[1], {}  # type: int, dict[int, list[Tensor]]
    for chunk in torch.arange(tokens).split(REPEATED):

        def observe(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, _: dict, chunk: Tensor = chunk
        ) -> None:
            weights = attention_of(q[:, :, tokens:], k, scale)[..., chunk]
            most.setdefault(layer_number(module), []).append(weights.amax((2, 3)))

        with observing(student, observe):
            student.base_model(input_ids=torch.cat([ids, ids[:, chunk]], 1), use_cache=False)
    return [torch.cat(parts, -1) for _, parts in sorted(most.items())]
