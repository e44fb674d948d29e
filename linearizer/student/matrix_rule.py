"""Heads with a memory by a rule: a matrix, which every token that leaves the window decays, erases and writes.

update_rules.py lists its members and how they are read. A chunk is solved at once: with G the sums of log a,
U = W - (E∘e^G) S - tril_-1(<e_i, k_j> e^(G_i - G_j)) U is triangular, and S becomes e^G S + (K∘e^(G_last - G))'U.
Gates read values and the norms of pairs of a key's numbers, which rotary positions do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import elu, logsigmoid, pad, relu

from .attention_of_student import working_dtype
from .columns import EMPTY, ExactState, MatrixState
from .feature_maps import FEATURE_MAPS, FeatureGroup
from .features_torch import PartialSoftmax
from .modeling_linearized import LinearizedConfig, LinearizedForCausalLM
from .update_rules import UPDATE_RULES, UpdateRule

__all__ = ["LinearizedConfig", "LinearizedForCausalLM", "make_group"]

Tensor = torch.Tensor
RANK = 8  # of the gates' maps
SLOWNESS = 16.0  # log decays are logsigmoid(gate) / SLOWNESS
ROUTES = 2  # memories that a token writes and reads, of those that are routed to
WRITTEN_AT_ONCE, WRITTEN_BY_CHANNEL = 64, 16  # rows of a chunk: pairs of rows cost more with decays by channel
PAIRED_AT_ONCE = 8  # rows with decays by channel: more take longer


def make_group(head: dict, heads: list[int], sinks: int, dims: tuple[int, int], feature_map: str) -> FeatureGroup:
    """Make the group of KV heads with a memory by this rule."""
    if (name := head.get("memory", feature_map)) not in UPDATE_RULES:
        raise ValueError(f"feature_map={name!r} is not one of {', '.join([*FEATURE_MAPS, *UPDATE_RULES])}")
    made = MatrixRule(len(heads), *dims, head["features"], UPDATE_RULES[name])
    return RuleGroup(heads, head.get("window", 0), sinks, head.get("bits", 16), made)


class MatrixRule(nn.Module):
    """The matrix rule of some heads, with its learned parameters; `features` is the number of a matrix's rows."""

    key_map: Tensor  # (heads, steps, products, key_dim)
    query_map: Tensor
    key_shift: Tensor
    value_scale: Tensor
    mass: Tensor
    gate_bias: Tensor | None  # (heads, gates); a parameter that a rule does not use is None
    gate_up: Tensor | None
    norm: Tensor | None
    tap_weight: Tensor | None
    query_tap_weight: Tensor | None
    router: Tensor | None

    def __init__(self, heads: int, key_dim: int, value_dim: int, rows: int, rule: UpdateRule) -> None:
        super().__init__()
        self.rule, self.features, self.value_dim = rule, rows, value_dim
        products = -(-rows // 2) if rule.is_wide else rows
        for_scalars = {"": 0, "fixed": 1, "scalar": 1}  # others have a gate for each row
        self.gates = {
            "decay": for_scalars.get(rule.decay, rows),
            "beta": for_scalars.get(rule.erase, rows),
            "write": value_dim if rule.erase == "channel" else 0,
        }
        gates, by_token = sum(self.gates.values()), rule.decay in ("scalar", "channel") or self.gates["beta"]
        taps = rule.taps if rule.taps > 1 else 0
        sizes: dict[str, tuple[int, ...]] = {  # behind the heads
            "key_map": (rule.steps, products, key_dim),
            "query_map": (products, key_dim),
            "key_shift": (key_dim,),
            "gate_bias": (gates,),
            "gate_down": (RANK, value_dim + key_dim // 2) if by_token else (0,),
            "gate_up": (gates, RANK) if by_token else (0,),
            "value_scale": (),
            "mass": (),
            "norm": (value_dim if rule.read == "norm" else 0,),
            "tap_weight": (taps, key_dim),
            "query_tap_weight": (taps, key_dim),
            "router": (rule.memories if rule.memories > 1 else 0, products),
        }
        for name, size in sizes.items():
            self.register_parameter(name, None if 0 in size else nn.Parameter(torch.zeros(heads, *size)))

    def forward(self, compute: Callable, *inputs: Any) -> Any:
        """Call one of this rule's methods: offloading libraries load parameters for a forward only."""
        return compute(*inputs)

    def weight(self, name: str, like: Tensor, ones: int = 0) -> Tensor:
        """Return a parameter in the type of a tensor, with dimensions of size 1 behind the heads."""
        x: Tensor = getattr(self, name)
        return x.to(like.dtype).reshape(len(x), *[1] * ones, *x.shape[1:])

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
            query_taps=zeros(0, self.rule.taps - 1, k.shape[-1]),  # the number of queries is not known yet
        )

    def read(
        self, root: float, state: MatrixState, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write leaving tokens, then read: return the mass (batch, heads, group, rows, 1) and vector of each row."""
        rule, sinks, window = self.rule, state.sink_k.shape[-2], state.window_k.shape[-2]
        before = (state.count - window - sinks).clamp_min(0)  # far tokens before the call
        count = torch.maximum(place - window - sinks + 1, before[:, None]).to(q.dtype)[:, None, :, None]
        mask = incoming[:, None, :, None].to(q.dtype)
        if rule.taps > 1:
            q, k = self.convolve(state, q, k, incoming, place)
        k, v = k * mask, v * mask
        mass = self.weight("mass", q, 3) + torch.where(count > 0, 0.0, EMPTY)[:, :, None].to(q.dtype)
        mean = centre = q.new_zeros(())
        if rule.has_moments:
            key_mean, variance, mean = running_moments(state, k, v, mask, count)
            mass = mass + count.clamp_min(1).log()[:, :, None] + (q * key_mean[:, :, None]).sum(-1, keepdim=True)
            mass = mass + (q.square() * variance[:, :, None]).sum(-1, keepdim=True) / 2
            centre = mean * mask if rule.read != "mala" else centre
        shifted = k * root - self.weight("key_shift", k, 1)
        written = torch.einsum("bhtd,hspd->bhtsp", shifted, self.weight("key_map", k))
        asked = (q / root) @ self.weight("query_map", q, 1).mT
        keys, erase, write, decay = self.writes(written, k, v - centre, mask)
        queries, routes = rows_of(rule.map, asked, True)[..., : self.features][:, :, None], None
        if self.router is not None:
            to = routes_of(written[..., 0, :] @ self.weight("router", k).mT, False)
            routes = routes_of(asked @ self.weight("router", q, 1).mT, True)
            keys, erase, decay = keys * to, None if erase is None else erase * to, decay * to
        sizes = rule.steps, WRITTEN_BY_CHANNEL if decay.shape[-1] > 1 else WRITTEN_AT_ONCE
        out, state.matrix = read_and_write(queries, keys, erase, write, decay, state.matrix, *sizes)
        out = out[:, :, 0] if routes is None else (out * routes).sum(2)
        vectors, mass = self.weigh(out, mass, mean, count)
        return mass, vectors

    def weigh(self, out: Tensor, mass: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of values, and its mass, from what was read."""
        if self.rule.mass == "sum":
            total = out[..., -1:].clamp_min(torch.finfo(out.dtype).tiny)
            return out[..., :-1] / total, mass + total.log()
        if self.rule.read == "mala":  # weights β s_j - γ with β = 1 + 1 / Σ s and γ = Σ s / n, which sum to one
            out = out / (self.features * count.clamp_min(1)[:, :, None])  # s is a share of all far keys and rows
            total = out[..., -1:].clamp_min(1e-6)
            return (1 + 1 / total) * out[..., :-1] - total * mean[:, :, None], mass
        if self.rule.read == "norm":
            out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight("norm", out, 2)
        return (mean[:, :, None] if self.rule.has_moments else 0.0) + self.weight("value_scale", out, 3) * out, mass

    def writes(
        self, products: Tensor, k: Tensor, v: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return keys, erasures, values and log decays of each step: (batch, heads, 1, tokens · steps, …)."""
        rule, gates = self.rule, self.gate_values(k, v)
        decay = gates["decay"] + products[..., 0, :] if rule.decay in ("key", "complement") else gates["decay"]
        decay = logsigmoid(decay) / (1.0 if rule.decay == "complement" else SLOWNESS)
        decay = decay if rule.decay else k.new_zeros(*k.shape[:3], 1)
        keys = rows_of(rule.map, products, False)[..., : self.features]
        if rule.decay == "complement":
            keys = -decay.expm1()[..., None, :]
        if rule.mass == "sum" or rule.read == "mala":
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        keys, write, beta = keys * mask[..., None], v[..., None, :].expand(*v.shape[:3], rule.steps, -1), gates["beta"]
        erase = beta.sigmoid()[..., None, :] * keys if rule.erase else None
        if rule.erase == "scalar":
            write = beta.sigmoid()[..., None] * write
        elif rule.erase == "channel":
            write = gates["write"].sigmoid()[..., None, :] * write
        elif rule.erase == "removal":  # the first step erases, the second writes
            is_first = torch.arange(2, device=k.device)[:, None] == 0
            erase, write = torch.where(is_first, erase, 0.0), torch.where(is_first, 0.0, write)  # type: ignore[arg-type]
        decays = (decay * mask)[..., None, :]  # in the first step
        decays = torch.cat([decays, decays.new_zeros(*decays.shape[:3], rule.steps - 1, decays.shape[-1])], -2)
        steps = keys, erase, write * mask[..., None], decays
        return tuple(None if x is None else x.flatten(2, 3)[:, :, None] for x in steps)  # type: ignore[return-value]

    def gate_values(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the gates of every token: (batch, heads, tokens, gates of a kind)."""
        if self.gate_bias is None:
            return {kind: v[..., :0] for kind in self.gates}
        values = self.weight("gate_bias", k, 1)
        if self.gate_up is not None:
            first_half, second_half = k[..., : k.shape[-1] // 2 * 2].chunk(2, -1)
            pairs = (first_half.square() + second_half.square() + 1e-12).sqrt()  # norm(…) of pairs is slow on a CPU
            x = torch.cat([v[..., : self.value_dim], pairs], -1)
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            values = values + x @ self.weight("gate_down", k).mT @ self.weight("gate_up", k).mT
        values = values.expand(*k.shape[:3], -1)
        return dict(zip(self.gates, values.split(list(self.gates.values()), -1), strict=True))

    def convolve(
        self, state: MatrixState, q: Tensor, k: Tensor, incoming: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convolve keys and queries with those before them; the state keeps the last of both unchanged."""
        k, state.taps = convolve(k, state.taps, self.weight("tap_weight", k), incoming)
        earlier, is_real = state.query_taps, place >= state.count[:, None]
        if not earlier.shape[2]:
            earlier = q.new_zeros(*q.shape[:3], self.rule.taps - 1, q.shape[-1])
        weight = self.weight("query_tap_weight", q).repeat_interleave(q.shape[2], 0)
        queries, last_queries = convolve(q.flatten(1, 2), earlier.flatten(1, 2), weight, is_real)
        state.query_taps = last_queries.unflatten(1, q.shape[1:3])
        return queries.unflatten(1, q.shape[1:3]), k


@dataclass(frozen=True)
class ScaledRule:
    """A rule as the memory of heads, for queries multiplied by the scale of the scores, whose root this has."""

    rule: MatrixRule
    root: float

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> MatrixState:
        return self.rule.empty(k, v, window, sinks)

    def chunk(
        self, state: MatrixState, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor
    ) -> PartialSoftmax:
        mass, vectors = self.rule(self.rule.read, self.root, state, q, k, v, incoming, place)
        return PartialSoftmax(mass, torch.ones_like(mass), vectors, is_share=self.rule.rule.mass == "share")


class RuleGroup(FeatureGroup):
    """KV heads with a window, and a memory by a rule."""

    def memory(self, scale: float) -> ScaledRule:
        return ScaledRule(self.feature_map, scale**0.5)


def rows_of(kind: str, x: Tensor, is_query: bool) -> Tensor:
    """Return the rows of a feature map from products (…, products)."""
    if kind == "unit":
        return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
    if kind == "elu":
        return elu(x) + 1
    if kind == "softmax":
        return x.softmax(-1)
    if kind == "both":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    if kind == "plain":
        return x
    assert kind == "signs", kind
    power: Any = 3.0
    if is_query:
        norm = x.norm(dim=-1, keepdim=True)
        x, power = x / norm.clamp_min(1e-6), 3 * (0.5 + norm.tanh())
    return torch.cat([relu(x).clamp_min(1e-4) ** power, relu(-x).clamp_min(1e-4) ** power], -1)


def routes_of(scores: Tensor, is_query: bool) -> Tensor:
    """Route rows to a few memories, by scores (…, rows, memories), and to the shared one: (…, memories, rows, 1)."""
    best = scores.topk(ROUTES, -1)
    shares = best.values.softmax(-1) if is_query else torch.ones_like(best.values)
    routes = torch.zeros_like(scores).scatter(-1, best.indices, shares).movedim(-1, 2)
    return torch.cat([torch.ones_like(routes[:, :, :1]), routes], 2)[..., None]


def convolve(x: Tensor, earlier: Tensor, weight: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve rows of x (batch, heads, rows, dim) with those before them; return also the last rows of x.

    earlier: the last rows of the call before; weight (heads, taps, dim), its last tap for the row itself. All rows that
    are not `incoming` (batch, rows) stand before those that are.
    """
    taps, rows = weight.shape[-2], x.shape[-2]
    start, padded = (~incoming).sum(-1, keepdim=True), torch.cat([earlier.to(x.dtype), x], -2)

    def before(back: int, at: Tensor) -> Tensor:
        place = at - back
        index = torch.where(place >= start, place + taps - 1, place - start + taps - 1).clamp_min(0)
        return padded.gather(-2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))

    at = torch.arange(rows, device=x.device)[None].expand(len(x), -1)
    out = torch.stack([weight[:, taps - 1 - back, None].to(x.dtype) * before(back, at) for back in range(taps)]).sum(0)
    end = at.new_full((len(x), 1), rows)
    return out, torch.cat([before(back, end) for back in range(taps - 1, 0, -1)], -2)


def running_moments(
    state: MatrixState, k: Tensor, v: Tensor, mask: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the mean and variance of keys and the mean of values; return all three as each row sees them."""
    number = count.clamp_min(1)
    deviation = (k - state.key_mean[:, :, None]) * mask
    shift = deviation.cumsum(-2) / number
    mean = state.key_mean[:, :, None] + shift
    excess = deviation.square().cumsum(-2) - mask.cumsum(-2) * state.key_variance[:, :, None]  # 0 if no token comes
    square = state.key_variance[:, :, None] + excess / number - shift.square()
    values = state.value_mean[:, :, None] + ((v - state.value_mean[:, :, None]) * mask).cumsum(-2) / number
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
    """Write tokens and read after each, chunk by chunk; return what is read and the final matrix."""
    tokens, parts = q.shape[-2], []
    if tokens == 1:
        return read_and_write_token(q, k, erase, write, decay, matrix)
    for start in range(0, tokens, size):
        span = slice(start * steps, (start + size) * steps)
        part = k[..., span, :], None if erase is None else erase[..., span, :], write[..., span, :], decay[..., span, :]
        out, matrix = read_and_write_chunk(q[..., start : start + size, :], *part, matrix, steps)
        parts.append(out)
    return torch.cat(parts, -2), matrix


def read_and_write_token(
    q: Tensor, k: Tensor, erase: Tensor | None, write: Tensor, decay: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the steps of one token in order, then read."""
    for step in range(k.shape[-2]):
        matrix = matrix * decay[..., step, :, None].exp()
        update = write[..., step, None, :]
        if erase is not None:
            update = update - erase[..., step, None, :] @ matrix
        matrix = matrix + k[..., step, :, None] * update
    return q @ matrix[..., None, :, :], matrix


def read_and_write_chunk(
    q: Tensor, k: Tensor, erase: Tensor | None, write: Tensor, decay: Tensor, matrix: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Solve for what the tokens of a chunk write, then read."""
    tokens = k.shape[-2]
    sums, at = decay.cumsum(-2), torch.arange(tokens, device=k.device)
    if erase is not None:
        system = paired(erase, k, sums, sums, at < at[:, None]) + torch.eye(tokens, dtype=k.dtype, device=k.device)
        residual = write - (erase * sums.exp()) @ matrix
        write = torch.linalg.solve_triangular(system, residual, upper=False, unitriangular=True)
    rows = at[steps - 1 :: steps]
    row_sums, causal = sums[..., rows, :], at <= rows[:, None]
    scores = paired(q, k[..., None, :, :], row_sums[..., None, :, :], sums[..., None, :, :], causal)
    out = (q * row_sums.exp()[..., None, :, :]) @ matrix[..., None, :, :] + scores @ write[..., None, :, :]
    total = sums[..., -1:, :]
    after = total.exp().mT * matrix + (k * (total - sums).exp()).mT @ write
    return out, after


def paired(x: Tensor, y: Tensor, x_sums: Tensor, y_sums: Tensor, causal: Tensor) -> Tensor:
    """Return Σ_c x_ic y_jc e^(x_sums_ic - y_sums_jc) where i sees j, and 0 elsewhere: (…, rows, columns).

    With a decay by channel this takes rows · columns · channels exponentials. So rows are split into halves: a row of
    the second sees the whole first, and the decay between them is a product of two factors, both at most 1.
    """
    if y_sums.shape[-1] > 1 and len(causal) > PAIRED_AT_ONCE:
        half = len(causal) // 2
        middle = half * (causal.shape[1] // len(causal))  # a token may take several steps
        rows, columns = (slice(half), slice(half, None)), (slice(middle), slice(middle, None))
        first, second = (
            paired(x[..., i, :], y[..., j, :], x_sums[..., i, :], y_sums[..., j, :], causal[i, j])
            for i, j in zip(rows, columns, strict=True)
        )
        edge = y_sums[..., middle - 1 : middle, :]
        queries = x[..., half:, :] * (x_sums[..., half:, :] - edge).exp()
        across = queries @ (y[..., :middle, :] * (edge - y_sums[..., :middle, :]).exp()).mT
        first = pad(first, (0, causal.shape[1] - middle))
        return torch.cat([first, torch.cat([across, second], -1)], -2)
    # mask before the exponential: its gradient would be NaN where it overflows
    decay = torch.where(causal[..., None], x_sums[..., :, None, :] - y_sums[..., None, :, :], EMPTY).exp()
    if decay.shape[-1] == 1:
        return x @ y.mT * decay[..., 0]
    return (x[..., :, None, :] * (y[..., None, :, :] * decay)).sum(-1)
