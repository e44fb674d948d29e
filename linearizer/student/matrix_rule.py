"""The matrix rule: a far field that is a matrix, which every token that leaves the window decays, erases and writes.

update_rules.py has its members and says how they are read. A chunk is solved at once: with G the sums of log a,
U = W - (E∘e^G) S - tril_-1(<e_i, k_j> e^(G_i - G_j)) U is triangular, and S becomes e^G S + (K∘e^(G_last - G))'U.
Gates read values and the norms of pairs of a key's numbers, which rotary positions leave as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import elu, logsigmoid, pad, relu

from .softmax_parts import Reading
from .state import EMPTY, ExactState, MatrixState, working_dtype
from .update_rules import UpdateRule

Tensor = torch.Tensor
RANK = 8  # of the gates' maps
HALF_LIFE = 256.0  # tokens, before training
SLOWNESS = 16.0  # log decays are logsigmoid(gate) / SLOWNESS
ROUTES = 2  # memories that a token writes and reads, of those that are routed to
WRITTEN_AT_ONCE, WRITTEN_BY_CHANNEL = 64, 16  # rows of a chunk: by channel, pairs of rows take more
PAIRED_AT_ONCE = 8  # rows with decays by channel: more take longer
BEGIN_SCALE = 0.1  # of what the matrix adds to the mean of values, before training


class MatrixRule(nn.Module):
    """The matrix rule of some heads, with the parameters that it learns; `features` are the rows of a matrix."""

    key_map: Tensor  # (heads, steps, products, key_dim)
    query_map: Tensor
    key_shift: Tensor  # (heads, key_dim)
    value_scale: Tensor  # (heads,)
    mass: Tensor
    gate_bias: Tensor | None  # (heads, gates); a parameter that a rule does not use is None
    gate_down: Tensor
    gate_up: Tensor | None
    norm: Tensor | None
    tap_weight: Tensor | None
    query_tap_weight: Tensor | None
    router: Tensor | None

    def __init__(self, heads: int, key_dim: int, value_dim: int, rows: int, rule: UpdateRule) -> None:
        super().__init__()
        self.rule, self.features, self.value_dim = rule, rows, value_dim
        products = -(-rows // 2) if rule.is_wide else rows
        self.gates = {
            "decay": {"fixed": 1, "scalar": 1, "channel": rows, "key": rows, "complement": rows}.get(rule.decay, 0),
            "beta": {"scalar": 1, "channel": rows, "removal": rows}.get(rule.erase, 0),
            "write": value_dim if rule.erase == "channel" else 0,
        }
        by_token = rule.decay in ("scalar", "channel") or self.gates["beta"]
        sizes = {
            "key_map": (rule.steps, products, key_dim),
            "query_map": (products, key_dim),
            "key_shift": (key_dim,),
            "gate_bias": (sum(self.gates.values()),),
            "gate_down": (RANK, value_dim + key_dim // 2) if by_token else (0,),
            "gate_up": (sum(self.gates.values()), RANK) if by_token else (0,),
            "value_scale": (),
            "mass": (),
            "norm": (value_dim if rule.read == "norm" else 0,),
            "tap_weight": (rule.taps if rule.taps > 1 else 0, key_dim),
            "query_tap_weight": (rule.taps if rule.taps > 1 else 0, key_dim),
            "router": (rule.memories if rule.memories > 1 else 0, products),
        }
        for name, size in sizes.items():
            used = 0 not in size
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, *size)) if used else None)

    def forward(self, compute: Callable, *inputs: Any) -> Any:
        """Compute one of this rule's methods: what offloads parameters brings them for a forward."""
        return compute(*inputs)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw new maps, with gates that no token changes yet."""
        for name, parameter in self.named_parameters():
            parameter.zero_()
            if name in ("key_map", "query_map", "gate_down", "router"):
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn / math.sqrt(parameter.shape[-1]))
        if self.gate_bias is not None:
            self.gate_bias.copy_(torch.cat([self.begin_bias(kind, size) for kind, size in self.gates.items()]))
        self.value_scale.fill_(BEGIN_SCALE if self.rule.has_moments else 1.0)
        self.mass.fill_(self.rule.share if self.rule.mass == "share" else 0.0)
        if self.norm is not None:
            self.norm.fill_(1.0)
        for weight in (self.tap_weight, self.query_tap_weight):
            if weight is not None:
                weight[:, -1] = 1.0

    def begin_bias(self, kind: str, size: int) -> Tensor:
        """Return the biases of gates for a half-life, and for half of what is found being erased."""
        if kind == "decay" and self.rule.decay == "key":
            return torch.zeros(size)  # as its authors have it: half-lives of some 16 tokens
        slowness = 1.0 if self.rule.decay == "complement" else SLOWNESS
        share = 2 ** (-slowness / HALF_LIFE) if kind == "decay" else 0.5
        return torch.full((size,), math.log(share / (1 - share)))

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> MatrixState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*k.shape[:2], *shape, dtype=working_dtype(v), device=v.device)

        moments = int(self.rule.has_moments)
        return MatrixState(
            **ExactState.nothing(k, v, window, sinks),
            matrix=zeros(self.rule.matrices, self.features, self.rule.columns(self.value_dim)),
            key_mean=zeros(k.shape[-1] * moments),
            key_variance=zeros(k.shape[-1] * moments),
            value_mean=zeros(v.shape[-1] * moments),
            taps=zeros(self.rule.taps - 1, k.shape[-1]),
            query_taps=zeros(0, self.rule.taps - 1, k.shape[-1]),  # how many queries a head has is not known yet
        )

    def read(
        self, root: float, state: MatrixState, q: Tensor, k: Tensor, v: Tensor, comes: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the tokens that leave and read: the mass (batch, heads, group, rows, 1) and the vector of each row."""
        first, window = state.sink_k.shape[-2], state.window_k.shape[-2]
        before = (state.count - window - first).clamp_min(0)  # far tokens, as the call begins
        count = torch.maximum(place - window - first + 1, before[:, None]).to(q.dtype)[:, None, :, None]
        there = comes[:, None, :, None].to(q.dtype)
        if self.rule.taps > 1:
            q, k = self.convolved(state, q, k, comes, place)
        k, v = k * there, v * there
        mass = self.mass.to(q.dtype)[:, None, None, None] + torch.where(count > 0, 0.0, EMPTY)[:, :, None].to(q.dtype)
        mean = q.new_zeros(())
        if self.rule.has_moments:
            moments = running_moments(state, k, v, there, count)
            mean, spread = moments[2], (q.square() * moments[1][:, :, None]).sum(-1, keepdim=True) / 2
            mass = mass + count.clamp_min(1).log()[:, :, None] + (q * moments[0][:, :, None]).sum(-1, keepdim=True)
            mass = mass + spread
        centre = mean * there if self.rule.read != "mala" else mean.new_zeros(())
        keys, erase, write, decay = self.written(root, k, v - centre, there)
        routes = None
        if self.router is not None:
            keys, erase, decay, routes = self.routed(root, q, k, keys, erase, decay)
        sizes = self.rule.steps, WRITTEN_BY_CHANNEL if decay.shape[-1] > 1 else WRITTEN_AT_ONCE
        asks = self.queries(q / root)[:, :, None]
        out, state.matrix = read_and_write(asks, keys, erase, write[:, :, None], decay, state.matrix, *sizes)
        out = out[:, :, 0] if routes is None else (out * routes).sum(2)
        vectors, mass = self.weighed(out, mass, mean, count)
        return mass, vectors

    def weighed(self, out: Tensor, mass: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Make a mean of values and its mass of what was read."""
        scale = self.value_scale.to(out.dtype)[:, None, None, None]
        if self.rule.mass == "sum":
            total = out[..., -1:].clamp_min(torch.finfo(out.dtype).tiny)
            return out[..., :-1] / total, mass + total.log()
        if self.rule.read == "mala":  # weights β s_j - γ with β = 1 + 1 / Σ s and γ = Σ s / n, which sum to one
            out = out / (self.features * count.clamp_min(1)[:, :, None])  # s is a share of all far keys and rows
            total = out[..., -1:].clamp_min(1e-6)
            return (1 + 1 / total) * out[..., :-1] - total * mean[:, :, None], mass
        if self.norm is not None:
            out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm[:, None, None].to(out.dtype)
        return (mean[:, :, None] if self.rule.has_moments else 0.0) + scale * out, mass

    def written(self, root: float, k: Tensor, v: Tensor, there: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return what each step writes: keys, erasures, values and log decays, (batch, heads, memories, steps, …)."""
        rule = self.rule
        shifted = k * root - self.key_shift[:, None].to(k.dtype)
        products = torch.einsum("bhtd,hspd->bhtsp", shifted, self.key_map.to(k.dtype))
        keys = rows_of(rule.map, products, False)[..., : self.features]
        gates = self.gate_values(k, v)
        decay = self.log_decay(gates["decay"], products[..., 0, :])
        if rule.decay == "complement":
            keys = -decay.expm1()[..., None, :]
        if rule.mass == "sum" or rule.read == "mala":
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        beta = gates["beta"].sigmoid()
        keys, erase, write = keys * there[..., None], None, v[..., None, :].expand(*v.shape[:3], rule.steps, -1)
        if rule.erase == "scalar":
            erase, write = beta[..., None] * keys, beta[..., None] * write
        elif rule.erase == "channel":
            erase, write = beta[..., None, :] * keys, gates["write"].sigmoid()[..., None, :] * write
        elif rule.erase == "removal":  # the first step takes out, the second writes
            first = torch.arange(2, device=k.device)[:, None] == 0
            erase, write = torch.where(first, beta[..., None, :] * keys, 0.0), torch.where(first, 0.0, write)
        decay = decay * there
        steps = torch.cat([decay[..., None, :], decay.new_zeros(*decay.shape[:3], rule.steps - 1, decay.shape[-1])], -2)
        keys, write, steps = (x.flatten(2, 3) for x in (keys, write * there[..., None], steps))
        return keys[:, :, None], None if erase is None else erase.flatten(2, 3)[:, :, None], write, steps[:, :, None]

    def gate_values(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the gates of every token: (batch, heads, tokens, gates of a kind)."""
        if self.gate_bias is None:
            return {kind: v[..., :0] for kind in self.gates}
        values = self.gate_bias[:, None].to(k.dtype)
        if self.gate_up is not None:
            one, other = k[..., : k.shape[-1] // 2 * 2].chunk(2, -1)
            pairs = (one.square() + other.square() + 1e-12).sqrt()  # a norm over two numbers is slow on a CPU
            x = torch.cat([v[..., : self.value_dim], pairs], -1)
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            values = values + x @ self.gate_down.to(k.dtype).mT @ self.gate_up.to(k.dtype).mT
        values = values.expand(*k.shape[:3], -1)
        return dict(zip(self.gates, values.split(list(self.gates.values()), -1), strict=True))

    def log_decay(self, gates: Tensor, keys: Tensor) -> Tensor:
        """Return the log decays of every token: (batch, heads, tokens, 1 or rows)."""
        if not self.rule.decay:
            return keys.new_zeros(*keys.shape[:3], 1)
        if self.rule.decay in ("key", "complement"):
            gates = gates + keys
        return logsigmoid(gates) / (1.0 if self.rule.decay == "complement" else SLOWNESS)

    def queries(self, q: Tensor) -> Tensor:
        """Make the rows that read of queries: (batch, heads, group, tokens, rows)."""
        products = q @ self.query_map.to(q.dtype)[:, None].mT
        return rows_of(self.rule.map, products, True)[..., : self.features]

    def routed(
        self, root: float, q: Tensor, k: Tensor, keys: Tensor, erase: Tensor | None, decay: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Let each token write a few memories and the shared one, and each query read them: others stay as they are."""
        products = (k * root - self.key_shift[:, None].to(k.dtype)) @ self.key_map[:, 0].to(k.dtype).mT
        assert self.router is not None
        scores = products @ self.router.to(k.dtype).mT
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(ROUTES, -1).indices, 1.0).movedim(-1, 2)
        chosen = torch.cat([torch.ones_like(chosen[:, :, :1]), chosen], 2)[..., None]  # (…, memories, tokens, 1)
        scores = (q / root) @ self.query_map.to(q.dtype)[:, None].mT @ self.router.to(q.dtype)[:, None].mT
        best = scores.topk(ROUTES, -1)
        routes = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1)).movedim(-1, 2)
        routes = torch.cat([torch.ones_like(routes[:, :, :1]), routes], 2)[..., None]
        return keys * chosen, None if erase is None else erase * chosen, decay * chosen, routes

    def convolved(
        self, state: MatrixState, q: Tensor, k: Tensor, comes: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take keys, and queries, together with those before them; the state keeps the last of both as they are."""
        assert self.tap_weight is not None and self.query_tap_weight is not None
        k, state.taps = convolved(k, state.taps, self.tap_weight, comes)
        kept, is_real = state.query_taps, place >= state.count[:, None]
        if not kept.shape[2]:
            kept = q.new_zeros(*q.shape[:3], self.rule.taps - 1, q.shape[-1])
        weight = self.query_tap_weight.repeat_interleave(q.shape[2], 0)
        asks, last = convolved(q.flatten(1, 2), kept.flatten(1, 2), weight, is_real)
        state.query_taps = last.unflatten(1, q.shape[1:3])
        return asks.unflatten(1, q.shape[1:3]), k


@dataclass(frozen=True)
class ScaledRule:
    """A rule as the memory of heads, for queries that carry the whole scale of the scores."""

    rule: MatrixRule
    root: float

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> MatrixState:
        return self.rule.empty(k, v, window, sinks)

    def chunk(self, state: MatrixState, q: Tensor, k: Tensor, v: Tensor, comes: Tensor, place: Tensor) -> Reading:
        mass, vectors = self.rule(self.rule.read, self.root, state, q, k, v, comes, place)
        return Reading(mass, torch.ones_like(mass), vectors, is_share=self.rule.rule.mass == "share")

    def token(
        self, state: MatrixState, q: Tensor, k: Tensor, v: Tensor, comes: Tensor | None, place: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        comes = torch.ones_like(place, dtype=torch.bool) if comes is None else comes
        mass, vectors = self.rule(self.rule.read, self.root, state, q, k, v, comes, place)
        return mass[..., 0], vectors, self.rule.rule.mass == "share"


def rows_of(kind: str, x: Tensor, is_query: bool) -> Tensor:
    """Make rows of products (…, products)."""
    if kind == "plain":
        return x
    if kind == "unit":
        return unit(x)
    if kind == "elu":
        return elu(x) + 1
    if kind == "softmax":
        return x.softmax(-1)
    if kind == "both":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    assert kind == "signs", kind
    power: Any = 3.0
    if is_query:
        norm = x.norm(dim=-1, keepdim=True)
        x, power = x / norm.clamp_min(1e-6), 3 * (0.5 + norm.tanh())
    return torch.cat([relu(x).clamp_min(1e-4) ** power, relu(-x).clamp_min(1e-4) ** power], -1)


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


def convolved(x: Tensor, kept: Tensor, weight: Tensor, comes: Tensor) -> tuple[Tensor, Tensor]:
    """Take each row of x (batch, heads, rows, dim) together with those before it, the last ones of which are kept.

    weight (heads, taps, dim), the last for the row itself. What does not come (batch, rows) stands before what comes.
    """
    taps, rows = weight.shape[-2], x.shape[-2]
    first, whole = (~comes).sum(-1, keepdim=True), torch.cat([kept.to(x.dtype), x], -2)

    def before(back: int, at: Tensor) -> Tensor:
        place = at - back
        index = torch.where(place >= first, place + taps - 1, place - first + taps - 1).clamp_min(0)
        return whole.gather(-2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))

    at = torch.arange(rows, device=x.device)[None].expand(len(x), -1)
    out = torch.stack([weight[:, taps - 1 - back, None].to(x.dtype) * before(back, at) for back in range(taps)]).sum(0)
    end = at.new_full((len(x), 1), rows)
    return out, torch.cat([before(back, end) for back in range(taps - 1, 0, -1)], -2)


def running_moments(
    state: MatrixState, k: Tensor, v: Tensor, there: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take keys and values into their means, and keys into their variances; return all three as each row sees them."""
    number = count.clamp_min(1)
    away = (k - state.key_mean[:, :, None]) * there
    moved = away.cumsum(-2) / number
    mean = state.key_mean[:, :, None] + moved
    more = away.square().cumsum(-2) - there.cumsum(-2) * state.key_variance[:, :, None]  # 0 where nothing comes
    square = state.key_variance[:, :, None] + more / number - moved.square()
    values = state.value_mean[:, :, None] + ((v - state.value_mean[:, :, None]) * there).cumsum(-2) / number
    variance = square.clamp_min(0)
    state.key_mean, state.key_variance, state.value_mean = mean[:, :, -1], variance[:, :, -1], values[:, :, -1]
    return mean, variance, values


def read_and_write(
    q: Tensor,  # (batch, heads, memories or 1, group, rows, K)
    k: Tensor,  # (batch, heads, memories, rows · steps, K)
    erase: Tensor | None,
    write: Tensor,  # (batch, heads, memories or 1, rows · steps, columns)
    decay: Tensor,  # (batch, heads, memories, rows · steps, 1 or K) logarithms
    matrix: Tensor,  # (batch, heads, memories, K, columns)
    steps: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Write tokens and read after each, some at a time; return what is read and the matrix at the end."""
    tokens, parts = q.shape[-2], []
    if tokens == 1:
        return read_and_write_token(q, k, erase, write, decay, matrix)
    for start in range(0, tokens, size):
        some = slice(start * steps, (start + size) * steps)
        part = k[..., some, :], None if erase is None else erase[..., some, :], write[..., some, :], decay[..., some, :]
        out, matrix = read_and_write_chunk(q[..., start : start + size, :], *part, matrix, steps)
        parts.append(out)
    return torch.cat(parts, -2), matrix


def read_and_write_token(
    q: Tensor, k: Tensor, erase: Tensor | None, write: Tensor, decay: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Take the steps of one token, one after the other."""
    for step in range(k.shape[-2]):
        matrix = matrix * decay[..., step, :, None].exp()
        new = write[..., step, None, :]
        if erase is not None:
            new = new - erase[..., step, None, :] @ matrix
        matrix = matrix + k[..., step, :, None] * new
    return q @ matrix[..., None, :, :], matrix


def read_and_write_chunk(
    q: Tensor, k: Tensor, erase: Tensor | None, write: Tensor, decay: Tensor, matrix: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Solve for what some tokens write, then read."""
    tokens = k.shape[-2]
    sums, at = decay.cumsum(-2), torch.arange(tokens, device=k.device)
    if erase is not None:
        system = paired(erase, k, sums, sums, at < at[:, None]) + torch.eye(tokens, dtype=k.dtype, device=k.device)
        found = write - (erase * sums.exp()) @ matrix
        write = torch.linalg.solve_triangular(system, found, upper=False, unitriangular=True)
    rows = at[steps - 1 :: steps]
    own, seen = sums[..., rows, :], at <= rows[:, None]
    scores = paired(q, k[..., None, :, :], own[..., None, :, :], sums[..., None, :, :], seen)
    out = (q * own.exp()[..., None, :, :]) @ matrix[..., None, :, :] + scores @ write[..., None, :, :]
    last = sums[..., -1:, :]
    after = last.exp().mT * matrix + (k * (last - sums).exp()).mT @ write
    return out, after


def paired(x: Tensor, y: Tensor, x_sums: Tensor, y_sums: Tensor, seen: Tensor) -> Tensor:
    """Σ_c x_ic y_jc e^(x_sums_ic - y_sums_jc) where i sees j, and 0 elsewhere: (…, rows, columns).

    With a decay by channel this takes rows · columns · channels exponentials. So halves are taken apart: a row of the
    second sees the whole first, and the decay between them is a product of two that both are at most 1.
    """
    if y_sums.shape[-1] > 1 and len(seen) > PAIRED_AT_ONCE:
        half = len(seen) // 2
        middle = half * (seen.shape[1] // len(seen))  # a token may take several steps
        rows, columns = (slice(half), slice(half, None)), (slice(middle), slice(middle, None))
        first, second = (
            paired(x[..., i, :], y[..., j, :], x_sums[..., i, :], y_sums[..., j, :], seen[i, j])
            for i, j in zip(rows, columns, strict=True)
        )
        edge = y_sums[..., middle - 1 : middle, :]
        asks = x[..., half:, :] * (x_sums[..., half:, :] - edge).exp()
        across = asks @ (y[..., :middle, :] * (edge - y_sums[..., :middle, :]).exp()).mT
        first = pad(first, (0, seen.shape[1] - middle))
        return torch.cat([first, torch.cat([across, second], -1)], -2)
    # masked before the exponential, whose gradient would be NaN where it overflows
    decay = torch.where(seen[..., None], x_sums[..., :, None, :] - y_sums[..., None, :, :], EMPTY).exp()
    if decay.shape[-1] == 1:
        return x @ y.mT * decay[..., 0]
    return (x[..., :, None, :] * (y[..., None, :, :] * decay)).sum(-1)
