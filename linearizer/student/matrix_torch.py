"""The arithmetic of the matrix rule in PyTorch: rows of keys and queries, moments, writing and reading, as
matrix_rule.py defines them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import elu, pad, relu

from .state import EMPTY, MatrixState

Tensor = torch.Tensor
PAIRED_AT_ONCE = 8  # rows with decays by channel: more take longer


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
    """Take keys and values into their means, and keys into their variances; give all three as each row sees them."""
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
