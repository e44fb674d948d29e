"""Rows of the kernels' benchmark: attention of a text to slots."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from linearizer.student.kernel_dispatch import slot_attention
from linearizer.student.slots_merging import GAIN, Merging
from linearizer.student.slots_torch import attend_text_with_slots
from linearizer.student.state import SlotState
from tests.benchmarks.timing import GPU, attempt, draw, own

WINDOW, SLOTS, BLOCK = 64, 64, 16


@torch.no_grad()
def slots(quick):
    """Ours, ours in PyTorch alone, and softmax over all that was read."""
    for tokens in ([2048, 8192, 32768][: 1 if quick else None]) if GPU else [2048]:
        yield slots_row(*((8, 4, 128) if GPU else (8, 1, 64)), tokens)


@torch.no_grad()
def slots_row(heads, group, dim, tokens):
    q, k, v = (draw(1, heads, *shape, tokens, dim, seed=n) for n, shape in enumerate(((group,), (), ())))
    metric, gain = torch.eye(dim, device=q.device).expand(heads, -1, -1), torch.full((heads,), GAIN).to(q.device)
    query = torch.zeros(heads, dim + 1, device=q.device)
    merging, scale = Merging(metric * dim**-0.25, gain, query, WINDOW, BLOCK), dim**-0.5

    def read(way):
        state = SlotState.empty(k, v, WINDOW, 4, SLOTS)
        way(q * scale, k, v, merging, None, state)

    def softmax():
        sdpa(q.flatten(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=True)

    row = {"op": "slots", "tokens": tokens, "heads": heads * group, "kv_heads": heads, "dim": dim, "slots": SLOTS}
    row |= own([lambda: read(slot_attention)])
    row["rivals"] = {
        "slots in pytorch": attempt("pytorch", lambda: [lambda: read(attend_text_with_slots)], least=3),
        "sdpa": attempt("sdpa", lambda: [softmax]),
    }
    return row
