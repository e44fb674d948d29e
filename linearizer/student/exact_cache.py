"""Short texts are read exactly: as long as a cache of all their tokens fits into a state, it is their state.

A text of at most `exact_tokens` tokens keeps the teacher's keys and values, and attends as the teacher does. With the
first token too many its heads read all of them, as if they had read the text from its begin; from then on it has the
states of its heads alone. Each text of a batch is exact or not by itself, however it is cut or padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # (q, k, v, which columns a row sees) -> outputs


@dataclass
class ExactCache:
    """Keys and values of the exact texts of a batch, the last of a layer's states.

    Columns of padding, and all of other texts, are not real; `real` has no columns while every column is real.
    """

    k: Tensor  # (batch, heads, columns, dim)
    v: Tensor
    real: Tensor  # (batch, columns or 0)
    is_exact = True  # in any copy of this code

    def real_columns(self) -> Tensor:  # (batch, columns)
        return self.real if self.real.shape[1] else self.real.new_ones(len(self.real), self.k.shape[2])

    def with_new(self, k: Tensor, v: Tensor, real: Tensor | None) -> ExactCache:
        """Return the cache with new columns."""
        columns = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        if real is None and not self.real.shape[1]:
            return ExactCache(*columns, self.real)
        new = self.real.new_ones(len(k), k.shape[2]) if real is None else real.bool()
        return ExactCache(*columns, torch.cat([self.real_columns(), new], 1))

    def without(self, texts: Tensor) -> ExactCache:
        """Return the cache without texts (batch,), and without columns that no other text has."""
        real = self.real_columns() & ~texts[:, None]
        kept = real.any(0).nonzero()[:, 0]
        return ExactCache(self.k[:, :, kept], self.v[:, :, kept], real[:, kept])

    def seen(self, tokens: int) -> Tensor | None:
        """Return which columns the newest tokens see (batch or 1, 1, tokens, columns); None: all that came before."""
        columns, padded = self.k.shape[2], self.real.shape[1] > 0
        if not padded and tokens in (1, columns):
            return None
        seen = torch.ones(tokens, columns, dtype=torch.bool, device=self.k.device).tril(columns - tokens)[None, None]
        return seen & self.real[:, None, None] if padded else seen


def exact_cache_of(states: list | None) -> Any:
    """Return the exact cache among a layer's states; None if there is none."""
    return states[-1] if states and getattr(states[-1], "is_exact", False) else None


def attend_by_length(
    most: int, begun: bool, read: Callable[..., Tensor], attend: Attend, q: Tensor, k: Tensor, v: Tensor,
    real: Tensor | None, states: list | None,
) -> Tensor:  # fmt: skip
    """`attend` to texts of at most `most` tokens, and `read` (q, k, v, real, states) with heads beyond them.

    q, k, v (batch, heads, tokens, dim); `real` (batch, tokens) is false at padding; `begun`: tokens were read before.
    """
    cache = exact_cache_of(states)
    if cache is None and (begun or not most):
        return read(q, k, v, real, states)
    of_heads = [state for state in states or () if state is not cache]
    mixed = begun and bool(of_heads)  # some texts are exact, others are not
    if cache is None:
        cache = ExactCache(k[:, :, :0], v[:, :, :0], torch.ones(len(k), 0, dtype=torch.bool, device=k.device))
    after = ExactCache.with_new(cache, k, v, real)
    if not mixed and after.k.shape[2] <= most:
        out, left = attend(q, after.k, after.v, after.seen(q.shape[2])), [after]
    elif mixed or after.real.shape[1]:
        out, left = attend_by_text(most, mixed, read, attend, q, after, of_heads)
    else:
        out, left = attend_beyond(most, read, attend, q, after, of_heads), of_heads
    if states is not None:
        states[:] = left
    return out


def attend_beyond(
    most: int, read: Callable[..., Tensor], attend: Attend, q: Tensor, cache: ExactCache, of_heads: list
) -> Tensor:
    """Attend where all texts become too long, and nothing is padded; add the states of heads to `of_heads`."""
    before = cache.k.shape[2] - q.shape[2]
    out = read(behind(q, before), cache.k, cache.v, None, of_heads)[:, :, before:]
    if (exact := most - before) <= 0:
        return out
    short = ExactCache(cache.k[:, :, :most], cache.v[:, :, :most], cache.real)
    return torch.cat([attend(q[:, :, :exact], short.k, short.v, short.seen(exact)), out[:, :, exact:]], 2)


@torch.compiler.disable
def attend_by_text(
    most: int, mixed: bool, read: Callable[..., Tensor], attend: Attend, q: Tensor, cache: ExactCache, of_heads: list
) -> tuple[Tensor, list]:
    """Attend where texts are padded, or only some are exact; return outputs and the states that are left."""
    real, tokens = cache.real_columns(), q.shape[2]
    before = real.shape[1] - tokens
    longer = counts_of(of_heads[0]) > 0 if mixed else real.new_zeros(len(real))
    ending = ~longer & (real.sum(1) > most)
    out = q.new_zeros(*q.shape[:3], cache.v.shape[-1])
    if ending.any():
        shown = torch.cat([real[:, :before] & ending[:, None], real[:, before:] & (longer | ending)[:, None]], 1)
        out = read(behind(q, before), cache.k, cache.v, shown, of_heads)[:, :, before:]
    elif longer.any():
        out = read(q, cache.k[:, :, before:], cache.v[:, :, before:], real[:, before:] & longer[:, None], of_heads)
    out = out.clone()
    for text in (~longer).nonzero()[:, 0].tolist():
        columns = real[text].nonzero()[:most, 0]
        new = columns[columns >= before] - before
        if len(new):
            k, v = (x[text : text + 1, :, columns] for x in (cache.k, cache.v))
            one = ExactCache(k, v, real[:1, :0])
            part = attend(q[text : text + 1, :, new], one.k, one.v, one.seen(len(new)))
            out[text : text + 1, :, new] = part.to(out.dtype)
    if (longer | ending).all():
        return out, of_heads
    return out, [*of_heads, cache.without(longer | ending)]


def behind(q: Tensor, tokens: int) -> Tensor:
    """Return queries behind so many of tokens that were read before: nobody asks for their outputs."""
    return torch.cat([q.new_zeros(*q.shape[:2], tokens, q.shape[3]), q], 2)


def counts_of(state: Any) -> Tensor:  # (batch,)
    """Count the tokens that each text's heads have read."""
    count: Tensor = state.count if hasattr(state, "count") else state.real.sum(-1)
    return count
