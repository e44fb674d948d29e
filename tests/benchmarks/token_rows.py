"""Rows of the kernels' benchmark: one more token of a layer, by what its KV heads hold, and softmax over a context."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from linearizer.student.layer_student import LayerStudent
from linearizer.student.state import tensors
from tests.benchmarks.timing import DEVICE, GPU, attempt, draw, own

READ, SINKS = 512, 4
TOKENS = 16  # that are timed together: a block, so that slots are merged once
KINDS = {  # what KV heads hold, one after the other
    "features": [[0, 128]],
    "four kinds": [[64, 0], [256, 0], [64, 64], [0, 128]],
    "slots": [[64, 0, 64, 16]],
    "slots and windows in 8 bits": [[64, 0, 64, 16, 8], [128, 0, 96, 16, 8], [128, 0, 0, 0, 8]],
}


@torch.no_grad()
def decode(limits, quick):
    """One token of one layer: ours, and softmax over the keys of a context."""
    for batch in (1, 8, 64) if GPU and not quick else (1,):
        yield from decode_rows(limits, batch, *((8, 4, 128) if GPU else (8, 1, 64)))


@torch.no_grad()
def decode_rows(limits, batch, heads, group, dim):
    text = [draw(batch, heads * many, READ + 1, dim, seed=n) for n, many in enumerate((group, 1, 1))]
    for kind, kinds in KINDS.items():
        student = LayerStudent([kinds[head % len(kinds)] for head in range(heads)], SINKS, dim, "prf")
        student.to(DEVICE).eval().reset(torch.Generator().manual_seed(0))
        memory: list = []
        student(*(x[:, :, :READ] for x in text), dim**-0.5, None, memory)
        token = [x[:, :, READ:].contiguous() for x in text]

        def call(student=student, token=token, memory=memory):
            for _ in range(TOKENS):
                student(*token, dim**-0.5, None, memory)

        row = {"op": "decode", "batch": batch, "kind": kind, **own([call], TOKENS)}
        held = [(name, x.nbytes) for state in memory for name, x in tensors(state).items()]
        row["state_bytes"] = sum(size for _, size in held)
        written = sum(size for name, size in held if name in ("level", "mean"))  # of the others a token alone
        row["floor"] = (row["state_bytes"] + written) / limits["copy"]
        if GPU:
            graph = attempt("graph", lambda call=call: [call], graph=True)
            row["ours in a graph"] = graph | ({"seconds": graph["seconds"] / TOKENS} if "seconds" in graph else {})
        yield row | contexts(batch, heads, group, dim)


def contexts(batch, heads, group, dim):
    """Softmax over the keys and values that a cache holds."""
    result, q = {}, draw(batch, heads * group, 1, dim)
    for context in (2048, 8192, 32768, 131072) if GPU else (2048, 8192):
        if batch * context * heads * dim * 4 < 2**35:
            k, v = draw(batch, heads, context, dim), draw(batch, heads, context, dim, seed=1)
            softmax = lambda k=k, v=v: sdpa(q, k, v, enable_gqa=True)  # noqa: E731
            result[f"sdpa over {context}"] = attempt("sdpa", lambda call=softmax: [call])
            if GPU:
                result[f"sdpa over {context} in a graph"] = attempt("sdpa", lambda call=softmax: [call], graph=True)
    return result
