"""The door to the kernels: student/ asks here, once for a call of a model and once for a layer.

Kernels read with heads that keep a window, alone or with slots; PyTorch reads with all others. VERSION counts changes
of what a checkpoint's code may ask, and of the states that it shares with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from linearizer.kernels.c.compiler import may_run_in_c
from linearizer.kernels.c.layer import begin_in_c, held_layer, read_in_c
from linearizer.kernels.compiled import is_compiled
from linearizer.kernels.trial import kernels_accept, passes_trial
from linearizer.kernels.triton.dispatch import linear_attention, may_run_in_triton
from linearizer.kernels.triton.state_pool import attend_in_pool, pool_for_token, whole_pool
from linearizer.student.attention_of_student import FEWER, Scores, as_sink, round_vectors
from linearizer.student.layer_student import LayerStudent, rotate

__all__ = ["VERSION", "begin_texts", "copy_states", "linear_attention", "read", "read_call", "serves_graph"]
Tensor = torch.Tensor
VERSION = 3
FAMILIES = {"c": "heads in C", "triton": "texts with windows and slots"}  # of kernels
TOKENS = "tokens with windows and slots"  # Triton's: slow to compile, and not needed for a text
TRIAL_HELD = ([6, 0, 5, 3], [7, 0, 0, 0])  # kinds of heads for a kernel's trial, with each number of bits
TRIAL_ENDS, TRIAL_SCALE, TRIAL_QUERY = (17, 18, 19, 30), 0.5, 0.125  # of its calls: a text, two tokens, a text
TRIAL_CAP = 4.0  # of scores, beside learned sinks


def read(
    student: Any, states: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, out: Tensor,
    scores: Scores | None = None,
) -> list[int]:  # fmt: skip
    """Read with as many groups of a layer as kernels serve, into `out`; return their indices.

    q (batch, heads, group, tokens, dim), k, v and out have all heads of the layer, and `states` those of its groups.
    """
    done: list[int] = []
    is_scored, operands = scores is not None, (states, q, k, v, scale, real, out)
    if is_compiled() or reads_in_c(student, q, k, v, is_scored):
        done = read_in_c(student, *operands, scores)
    if len(done) < len(student.groups) and (is_compiled() or reads_in_triton(student, q, k, v, is_scored)):
        done = done + attend_in_pool(student, *operands, done, scores)
    return done


def reads_in_c(student: Any, q: Tensor, k: Tensor, v: Tensor, is_scored: bool) -> bool:
    """Whether the kernel in C may read this text or token."""
    return may_run_in_c(q, k, v) and not kernels_accept(q, k, v) and is_trusted(student, "c", q, v, is_scored)


def reads_in_triton(student: Any, q: Tensor, k: Tensor, v: Tensor, is_scored: bool) -> bool:
    """Whether Triton's kernels may read this text or token."""
    return may_run_in_triton(q, k, v) and is_trusted(student, "triton", q, v, is_scored)


def serves_graph(student: Any, q: Tensor, k: Tensor, real: Tensor | None, states: list | None) -> bool:
    """Whether a compiled model may attend with a token in its graph: if kernels read with all windows and slots, and
    PyTorch, whose operations can be compiled, with all other heads; these read values where there is padding."""
    if q.shape[-2] > 1:
        return False
    plans = (held_layer(states, k), pool_for_token(states, k) if real is None else None) if is_compiled() else ()
    served = [index for plan in plans if plan is not None for index in plan.windows]
    pending = [group for index, group in enumerate(student.groups) if index not in served]
    return all(group.kind is None and real is None for group in pending)


def begin_texts(students: Sequence[Any], states: Sequence[list | None], inputs: Tensor) -> None:
    """Prepare the states of all layers for new texts (texts, tokens, …)."""
    if may_run_in_c(inputs) and not torch.is_grad_enabled():
        begin_in_c(students, states, *inputs.shape[:2])


def read_call(model: Any, arguments: dict) -> Any:
    """Read a call by graphs or in parts on several streams; return what the model returns, or None: by layers."""
    from linearizer.kernels.graphs import text_graphs, text_parts, token_graph

    if not text_parts.is_plain_call(model, arguments):
        return None
    for read_by_graphs in (token_graph.read_by_graph, text_graphs.read_text_by_graphs):
        if (out := read_by_graphs(model, arguments)) is not None:
            return out
    if (streams := text_parts.choose_streams(model, arguments)) is None:
        return None
    size = text_parts.choose_size(text_parts.length_of(arguments))
    return text_parts.read_parts(model.read_by_layers, arguments, size, streams)


def copy_states(states: list, change: Callable[[Tensor], Tensor]) -> list | None:
    """Copy the states of a layer that lie in one pool, into a pool; `change` copies the texts (first axis)."""
    if (pool := whole_pool(states)) is None:
        return None
    copies: list = []
    pool.copy(change).show(copies)
    return copies


def is_trusted(student: Any, kernel: str, q: Tensor, v: Tensor, is_scored: bool) -> bool:
    """Whether a kernel computes what the definition does; the first call in these sizes on a device compares them."""
    if student.reader is not None:
        return student.reader == kernel
    of_token = kernel == "triton" and q.shape[-2] == 1
    sizes = q.shape[2], q.shape[-1], v.shape[-1]
    case = TOKENS if of_token else FAMILIES[kernel], q.device, q.dtype, sizes, is_scored
    trusted = student.__dict__.setdefault("trusted_sizes", set())
    if case in trusted:
        return True
    sinks = 1 if kernel == "c" else student.sinks
    for bits in sorted({group.bits for group in student.groups}):
        compute = partial(compute_trial, type(student), kernel, of_token, sinks, sizes, q, bits, is_scored)
        if not passes_trial(case[0], q, (*sizes, sinks, bits, is_scored), compute):
            return False
    trusted.add(case)
    return True


@torch.no_grad()
def compute_trial(
    make: type[LayerStudent], kernel: str, of_token: bool, sinks: int, sizes: tuple[int, int, int], like: Tensor,
    bits: int, is_scored: bool, by_kernel: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Read a small text by a kernel, or by the definition; return the outputs of its calls."""
    group, *dims = sizes
    kinds = TRIAL_HELD if kernel == "c" else TRIAL_HELD[:1]  # other kernels read windows alone
    trial: Any = make([[*kind, bits] for kind in kinds], sinks, dims[0], "prf", dims[1])
    prepare(trial)
    generator = torch.Generator().manual_seed(0)
    trial.reader = kernel if by_kernel else "pytorch"
    heads, tokens = len(kinds), TRIAL_ENDS[-1]
    if bits in FEWER:  # the error of a sum may change how a spread, of two bytes here, is rounded
        trial.groups[0].merger.gain.zero_()
    queries = torch.randn(1, heads * group, tokens, dims[0], generator=generator)
    drawn = (torch.randn(1, heads, tokens, dim, generator=generator) for dim in dims)
    inputs = queries, *stable(trial, bits, *drawn)
    text, states = [x.to(like.device, like.dtype).to(dtype) for x in inputs], []  # type: ignore[var-annotated]
    trial.to(like.device, dtype)
    scores = (TRIAL_CAP, torch.linspace(-1, 1, heads * group, dtype=dtype, device=like.device)) if is_scored else ()
    ends, out = TRIAL_ENDS if kernel == "c" or of_token else TRIAL_ENDS[::3], []
    for begin, end in zip((0, *ends), ends, strict=False):
        if of_token:  # PyTorch reads the texts around them
            trial.reader = kernel if by_kernel and end - begin == 1 else "pytorch"
        out.append(trial(*(x[:, :, begin:end] for x in text), TRIAL_SCALE, None, states, *scores))
    return out


def prepare(student: Any) -> None:
    """Let slots merge by the same metric for all directions, and by one mean query."""
    merger = student.groups[0].merger
    merger.reset()
    merger.mean_query.fill_(TRIAL_QUERY)
    if student.turns is not None:
        student.turns.reset()
        merger.metric.copy_(rotate(merger.metric))


def stable(student: Any, bits: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return rounded keys and values, whose rounding in heads of these bits does not depend on errors of sums."""
    if student.turns is None:
        return k, v

    def keep(x: Tensor) -> Tensor:
        x, sinks = rotate(x), student.sinks
        return rotate(torch.cat([as_sink(x[:, :, :sinks], bits), round_vectors(x[:, :, sinks:], bits)], 2))

    steps = student.turns.key_steps.to(k.dtype)[:, None]
    return keep(k / steps) * steps / TRIAL_SCALE**0.5, keep(v)
