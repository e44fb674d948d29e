"""The losses of attention_loss.py in PyTorch, a block of rows at a time, with gradients written by hand.

Shapes are those of one text: u, q (heads, group, tokens, …); w, k (heads, tokens, …).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from linearizer.student.softmax_parts import exp_without_underflow
from linearizer.student.state import EMPTY, HEADROOM

Tensor = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]
ROWS = 128
BLOCK = 2**19  # elements of one block of rows × columns: a few of them fit into a core's cache
PAIRS = 2**14  # pairs that are computed feature by feature at once
LOST = 1.0  # a product below this may have lost terms to underflow: HEADROOM below the row's bound
MIN_PRODUCT = 1e-13  # a smaller product hardly matters, or is lost: this keeps p / product finite


@dataclass
class Heads:
    """Some KV heads of one text, and their features behind stabilisers that a row's weights do not depend on."""

    u: Tensor  # (heads, group, tokens, features)
    w: Tensor  # (heads, tokens, features)
    q: Tensor
    k: Tensor
    window: int
    sinks: int
    query: Tensor  # e^(u + ceiling - bound), at most 1
    key: Tensor  # e^(w - ceiling + HEADROOM)
    bound: Tensor  # (heads, group, tokens): log A = log(query · key) + bound

    @classmethod
    def of(cls, u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int) -> Heads:
        far = w[:, sinks : max(sinks, w.shape[1] - window)]
        ceiling = far.amax(1, keepdim=True) if far.shape[1] else torch.zeros_like(w[:, :1])
        query = u + ceiling[:, None]
        bound = query.amax(-1, keepdim=True)
        key = (w - ceiling).clamp_(max=0).add_(HEADROOM)  # near keys may lie above it; they are not used
        return cls(
            u,
            w,
            q,
            k,
            window,
            sinks,
            exp_without_underflow(query.sub_(bound)),
            exp_without_underflow(key),
            bound[..., 0] - HEADROOM,
        )

    def blocks(self) -> list[Block]:
        group, tokens = self.u.shape[1:3]
        size = rows_at_once(group, tokens)
        return [Block(self, start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def softmax(self, gradients: Pair | None) -> Tensor:
        """Compute cross-entropy and entropy, summed over rows; add to the gradients, if there are any."""
        total = self.w.new_zeros(2)
        for block in self.blocks():
            scores = block.scores()
            p = scores.softmax(-1)
            lse = scores.amax(-1) - p.amax(-1).log()
            entropy = (lse - dot(p, scores)).sum()
            total[1] += entropy
            total[0] += entropy + (block.kl(scores, p, lse, gradients) if block.keys else 0.0)
        return total

    def squared(self, shift: Tensor, gradients: Pair | None) -> Tensor:
        """Compute squared errors, summed over pairs, and 0; near pairs have no error."""
        total = self.w.new_zeros(2)
        for block in self.blocks():
            if not block.keys:
                continue
            scale = (block.rows(self.bound) + HEADROOM - shift[:, None, None]).exp()[..., None]
            query, key = block.rows(self.query) * scale, self.key[:, block.far] * math.exp(-HEADROOM)
            error = exp_without_underflow(block.scores()[..., block.far] - shift[:, None, None, None]) - by_key(
                query, key
            )
            block.fill_near(error, 0)
            total[0] += error.square().sum()
            if gradients is not None:
                block.differentiate(error.mul_(-2), query, key, *gradients)
        return total


@dataclass
class Block:
    """The rows start … stop - 1 with the columns 0 … stop - 1."""

    heads: Heads
    start: int
    stop: int

    @property
    def far(self) -> slice:
        """The columns that are far from at least one of the rows."""
        return slice(self.heads.sinks, max(self.heads.sinks, self.stop - self.heads.window))

    @property
    def keys(self) -> int:
        return self.far.stop - self.far.start

    def rows(self, x: Tensor) -> Tensor:
        """Take this block's rows of x (heads, group, tokens, …)."""
        return x[:, :, self.start : self.stop]

    def behind(self, first: int, stop: int) -> Tensor:
        """Mark the columns first … stop - 1 that are behind a row's window: (rows, columns)."""
        column = torch.arange(first, stop, device=self.heads.w.device)
        row = torch.arange(self.start, self.stop, device=self.heads.w.device)[:, None]
        return column <= row - self.heads.window

    def scores(self) -> Tensor:
        """Compute S where j ≤ i, and EMPTY elsewhere: (heads, group, rows, stop)."""
        out = by_key(self.rows(self.heads.q), self.heads.k[:, : self.stop])
        size = self.stop - self.start
        out[..., self.start :].masked_fill_(torch.ones(size, size, dtype=torch.bool, device=out.device).triu(1), EMPTY)
        return out

    def product(self) -> Tensor:
        """Compute A e^-bound of all pairs, near ones too: (heads, group, rows, keys)."""
        return by_key(self.rows(self.heads.query), self.heads.key[:, self.far])

    def fill_near(self, x: Tensor, value: float) -> Tensor:
        """Overwrite x (heads, group, rows, keys) where a key is not far from its row."""
        first = max(self.far.start, self.start - self.heads.window + 1)
        x[..., first - self.far.start :].masked_fill_(~self.behind(first, self.far.stop), value)
        return x

    def near_lse(self, scores: Tensor) -> Tensor:
        """Compute log Σ e^S over the near columns; EMPTY where there are none: (heads, group, rows)."""
        first = min(max(self.heads.sinks, self.start - self.heads.window + 1), self.stop)
        own = scores[..., first:].masked_fill(self.behind(first, self.stop), EMPTY)
        near = torch.cat([scores[..., : min(self.heads.sinks, self.stop)], own], -1)
        return near.logsumexp(-1) if near.shape[-1] else near.new_full(near.shape[:-1], EMPTY)

    def kl(self, scores: Tensor, p: Tensor, lse: Tensor, gradients: Pair | None) -> Tensor:
        """Compute KL(p ‖ p̂) summed over rows: log D - lse + Σ_far p (S - log A), D being the student's denominator."""
        bound, product, near = self.rows(self.heads.bound), self.product(), self.near_lse(scores)
        lost = self.lost_pairs(product, p, near) if product.amin() < LOST else None
        p = self.fill_near(p[..., self.far], 0)
        mass = self.fill_near(product, 0).sum(-1)
        total = torch.logaddexp(torch.where(mass > 0, mass.log() + bound, EMPTY), near)
        product.clamp_min_(MIN_PRODUCT)
        log_a = product.log().add_(bound[..., None])
        if lost is not None:
            log_a[lost] = self.exact_logits(lost)
            total = torch.logaddexp(self.fill_near(log_a.clone(), EMPTY).logsumexp(-1), near)
        if gradients is not None:
            weight = p.div(product).neg_().add_((bound - total).exp_()[..., None])  # (p̂ - p) / A e^-bound
            if lost is not None:
                weight[lost] = 0
                self.differentiate_exactly(lost, (log_a - total[..., None]).exp_() - p, log_a, *gradients)
            query, key = self.rows(self.heads.query), self.heads.key[:, self.far]
            self.differentiate(self.fill_near(weight, 0), query, key, *gradients)
        return (total - lse).sum() + dot(p, scores[..., self.far] - log_a).sum()

    def differentiate(self, weight: Tensor, query: Tensor, key: Tensor, gradient_u: Tensor, gradient_w: Tensor) -> None:
        """Add the gradients of Σ weight (query · key)."""
        weight = weight.flatten(1, 2)
        self.rows(gradient_u).addcmul_((weight @ key).view_as(query), query)
        gradient_w[:, self.far].addcmul_(weight.mT @ query.flatten(1, 2), key)

    def lost_pairs(self, product: Tensor, p: Tensor, near: Tensor) -> Tensor | None:
        """Find pairs that matter and whose product has lost terms to underflow: (heads, group, rows, keys)."""
        low = self.fill_near(product < LOST, False)
        largest = self.fill_near(product.clone(), 0).amax(-1).log()
        row_lost = torch.maximum(largest, near - self.rows(self.heads.bound)) < math.log(LOST)
        lost = low & ((p[..., self.far] > torch.finfo(p.dtype).eps / 10) | row_lost[..., None])
        return lost if lost.any() else None

    def exact_logits(self, lost: Tensor) -> Tensor:
        """Compute log Σ_m exp(u_im + w_jm) of the lost pairs, at any magnitude: (pairs,)."""
        u, w = self.rows(self.heads.u), self.heads.w[:, self.far]
        return torch.cat([(u[h, g, i] + w[h, j]).logsumexp(-1) for h, g, i, j in pairs(lost)])

    def differentiate_exactly(
        self, lost: Tensor, change: Tensor, log_a: Tensor, gradient_u: Tensor, gradient_w: Tensor
    ) -> None:
        """Add the gradients of the lost pairs: (p̂ - p) exp(u + w - log A), where change is p̂ - p."""
        u, w = self.rows(self.heads.u), self.heads.w[:, self.far]
        for h, g, i, j in pairs(lost):
            each = (u[h, g, i] + w[h, j] - log_a[h, g, i, j, None]).exp_() * change[h, g, i, j, None]
            self.rows(gradient_u).index_put_((h, g, i), each, accumulate=True)
            gradient_w[:, self.far].index_put_((h, j), each, accumulate=True)


def rows_at_once(group: int, tokens: int) -> int:
    return max(16, min(ROWS, BLOCK // (group * tokens), tokens))


def pairs(lost: Tensor) -> list[tuple[Tensor, ...]]:
    """List the head, member of the group, row and column of the lost pairs, PAIRS at a time."""
    return list(zip(*(index.split(PAIRS) for index in lost.nonzero(as_tuple=True)), strict=True))


def by_key(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply rows (heads, group, rows, dim) and columns (heads, columns, dim): (heads, group, rows, columns)."""
    return (rows.flatten(1, 2) @ columns.mT).unflatten(1, rows.shape[1:3])


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def largest_scores(q: Tensor, k: Tensor) -> Tensor:
    """Compute max S over the pairs j ≤ i of a KV head in all texts: (heads,)."""
    largest = q.new_full((q.shape[1],), EMPTY)
    for b in range(q.shape[0]):
        for start in range(0, q.shape[-2], ROWS):
            rows = q[b, :, :, start : start + ROWS]
            scores = by_key(rows, k[b, :, : start + rows.shape[2]])
            later = torch.ones(rows.shape[2], scores.shape[-1], dtype=torch.bool, device=q.device).triu(start + 1)
            largest = torch.maximum(largest, scores.masked_fill_(later, EMPTY).amax((1, 2, 3)))
    return largest
