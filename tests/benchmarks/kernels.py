"""Time attention, a step and the losses beside their rivals, all in one process: python -m tests.benchmarks.kernels.

Writes results/kernels-DEVICE.json. Without a GPU it times the PyTorch paths at small sizes, and says so. `ours` is what
the doors choose. `floor` is the time that the machine's own copy and product rates allow for the bytes and operations
that cannot be avoided; `error` is relative, against float64 on a part of the input.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from linearizer.attention_loss import attention_loss, blocked
from linearizer.runtime.chunks import chunked
from linearizer.runtime.linear_attention import linear_attention, reference
from linearizer.runtime.state import State
from linearizer.runtime.student import HeadGroup, Scaled

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
RESULTS = Path(__file__).parent / "results"


def seconds(calls, least=50, graph=False):
    """Median time of a call; `calls` take turns, so that their inputs do not stay in the caches of a GPU."""
    for call in calls:
        call()
    if not GPU:
        times = []
        for index in range(3 if least >= 50 else least):
            start = time.perf_counter()
            calls[index % len(calls)]()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    if graph:
        calls = [captured(call) for call in calls]
    times = []
    for index in range(least):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def captured(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    return recorded.replay


def peak_bytes(call):
    """Memory that a call takes at most, above what there was."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def attempt(name, make, **kwargs):
    """Time a rival, or say why it cannot be timed here."""
    try:
        calls = make()
        return {"seconds": seconds(calls, **kwargs), "bytes": peak_bytes(calls[0])}
    except (RuntimeError, ImportError, NotImplementedError, ValueError, AssertionError) as error:
        return {"failed": f"{name}: {type(error).__name__}: {str(error)[:200]}"}


def ceilings():
    """What this machine reaches: bytes copied and operations of a product, per second."""
    size = 2**29 if GPU else 2**25
    x, n = torch.empty(size, dtype=torch.uint8, device=DEVICE), 8192 if GPU else 1024
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    return {"copy": 2 * size / seconds([x.clone]), "product": 2 * n**3 / seconds([lambda: a @ a])}


def draw(*shape, seed=0, dtype=DTYPE):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def group_of(heads, dim, features, kind="prf"):
    group = HeadGroup(list(range(heads)), 0, features, 0, dim, kind).to(DEVICE)
    group.feature_map.reset(torch.Generator().manual_seed(0))
    return group


def texts(batch, tokens, heads, group, dim):
    """As many inputs as a GPU's cache cannot hold."""
    size = batch * tokens * heads * (group + 2) * dim * 2
    copies = min(8, max(1, 2 * 60 * 2**20 // size)) if GPU else 1
    return [
        (
            draw(batch, heads, group, tokens, dim, seed=s),
            *(draw(batch, heads, tokens, dim, seed=s + n) for n in (9, 99)),
        )
        for s in range(copies)
    ]


def rivals_of_prefill(inputs, scale, group, features, feature_map):
    """Names and what makes their calls."""

    def softmax(backend):
        def call(q, k, v):
            with sdpa_kernel(backend):
                return sdpa(q.flatten(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=group > 1)

        return lambda: [lambda x=x: call(*x) for x in inputs]

    def pytorch(q, k, v):
        return chunked(q * scale, k, v, feature_map, 0, None, State.empty(k, v, 0, 0, features))

    yield "chunked pytorch", lambda: [lambda x=x: pytorch(*x) for x in inputs]
    if not GPU:
        yield "sdpa", softmax([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
        return
    yield "sdpa flash", softmax(SDPBackend.FLASH_ATTENTION)
    yield "sdpa cudnn", softmax(SDPBackend.CUDNN_ATTENTION)
    yield "flex attention", lambda: flex(inputs, scale)
    for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
        for normalize in (True, False):
            yield (
                f"fla {name} normalize={normalize}",
                lambda name=name, normalize=normalize: fla(inputs, name, normalize, feature_map),
            )


def flex(inputs, scale):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = inputs[0][1].shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=DEVICE)
    attend = torch.compile(flex_attention)
    return [
        lambda x=x: attend(x[0].flatten(1, 2), x[1], x[2], block_mask=mask, scale=scale, enable_gqa=True)
        for x in inputs
    ]


def fla(inputs, name, normalize, feature_map):
    """fla's kernels with features made eagerly, its keys repeated for each query head as its layers do."""
    from fla.ops import linear_attn

    attend = getattr(linear_attn, name)

    def call(q, k, v):
        u = feature_map.queries(q.float()).flatten(1, 2).exp().to(q.dtype).transpose(1, 2)
        w = feature_map.keys(k.float()).exp().to(k.dtype)
        w, v = (x.repeat_interleave(q.shape[2], 1).transpose(1, 2) for x in (w, v))
        return attend(u, w, v, scale=1.0, normalize=normalize)

    return [lambda x=x: call(*x) for x in inputs]


@torch.no_grad()
def prefill(limits, quick):
    heads, group, dim = (8, 4, 128) if GPU else (8, 1, 64)
    lengths = [2**n for n in range(9, 18)] if GPU else [4096, 16384]
    if quick:
        lengths = lengths[:2] if GPU else lengths[:1]
    for features in (64, 128, 182, 256) if GPU and not quick else (64,):
        for batch in (1, 8) if GPU and not quick else (1,):
            for tokens in lengths:
                yield prefill_row(limits, batch, tokens, heads, group, dim, features)


def prefill_row(limits, batch, tokens, heads, group, dim, features):
    scale, inputs = dim**-0.5, texts(batch, tokens, heads, group, dim)
    feature_map = Scaled(group_of(heads, dim, features).feature_map, scale)

    def ours(q, k, v):
        return linear_attention(q * scale, k, v, feature_map, 0, None, State.empty(k, v, 0, 0, features))  # the door

    calls = [lambda x=x: ours(*x) for x in inputs]
    values = batch * tokens * heads * (2 * group + 2) * dim * inputs[0][0].element_size()
    work = batch * tokens * heads * (group * 4 + 4) * dim * features
    part = [x[:1, ..., :300, :] for x in inputs[0]]
    exact = reference(*(x.double() for x in (part[0] * scale, *part[1:])), feature_map, 0, 0)
    row = {
        "op": "prefill", "batch": batch, "tokens": tokens, "heads": heads * group, "kv_heads": heads, "dim": dim,
        "features": features, "ours": seconds(calls), "bytes": peak_bytes(calls[0]),
        "floor": max(values / limits["copy"], work / limits["product"]),
        "error": ((ours(*part).double() - exact).norm() / exact.norm()).item(),
    }  # fmt: skip
    if GPU:
        row["ours in a graph"] = attempt("graph", lambda: calls, graph=True)
    rivals = rivals_of_prefill(inputs, scale, group, features, feature_map)
    return row | {"rivals": {name: attempt(name, make) for name, make in rivals}}


@torch.no_grad()
def decode(quick):
    """One token of one layer: ours, and softmax over the keys of a context."""
    heads, group, dim, features = (8, 4, 128, 128) if GPU else (8, 1, 64, 64)
    for batch in (1, 8, 64) if GPU and not quick else (1,):
        q, k, v = draw(batch, heads, group, 1, dim), draw(batch, heads, 1, dim), draw(batch, heads, 1, dim)
        feature_map = Scaled(group_of(heads, dim, features).feature_map, dim**-0.5)
        state = State.empty(k, v, 0, 0, features)
        call = lambda args=(q, k, v, feature_map, 0, None, state): linear_attention(*args)  # noqa: E731
        row = {"op": "decode", "batch": batch, "features": features, "ours": seconds([call])}
        row["state_bytes"] = 2 * state.mean.numel() * state.mean.element_size()
        if GPU:
            row["ours in a graph"] = attempt("graph", lambda call=call: [call], graph=True)
        for context in (2048, 8192, 32768, 131072) if GPU else (2048, 8192):
            if batch * context * heads * dim * 4 < 2**35:
                held = draw(batch, heads, context, dim)
                softmax = lambda q=q, held=held: sdpa(q.flatten(1, 2), held, held, enable_gqa=True)  # noqa: E731
                row[f"sdpa over {context}"] = attempt("sdpa", lambda call=softmax: [call])
        yield row


def textbook(u, w, q, k):
    """p log p̂ with everything tokens × tokens."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    a = (u.exp() @ w.exp()[:, :, None].mT).masked_fill(~mask, 0)
    return -(p * (a / (a.sum(-1, keepdim=True) + 1e-12)).clamp(min=1e-12).log()).sum(-1).mean()


def lolcats(u, w, q, k):
    """The form of the LoLCATs trainer: clamped weights as logits of a cross-entropy with probabilities as targets."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    a = (u.exp() @ w.exp()[:, :, None].mT).masked_fill(~mask, 0)
    a = (a / (a.sum(-1, keepdim=True) + 1e-12)).clamp(min=1e-12).log()
    return torch.nn.functional.cross_entropy(a.flatten(0, -2), p.flatten(0, -2).to(a.dtype))


def leanest(u, w, q, k):
    """The fewest passes that eager PyTorch needs: the denominators by a running sum of the keys."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    query, key = u.exp(), w.exp()
    total = (query * key.cumsum(-2)[:, :, None]).sum(-1).log()
    return (total - (p * (query @ key[:, :, None].mT).clamp(min=1e-30).log()).sum(-1)).mean()


def with_gradients(loss, u, w, *rest):
    u, w = u.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(u, w, *rest)
    return value, *torch.autograd.grad(value, (u, w))


def loss_inputs(batch, tokens, heads, group, dim, features):
    q, k = draw(batch, heads, group, tokens, dim) * dim**-0.25, draw(batch, heads, tokens, dim) * dim**-0.25
    feature_map = group_of(heads, dim, features).feature_map
    with torch.no_grad():
        return feature_map.queries(q.float()), feature_map.keys(k.float()), q, k


FORMS = {
    "ours": lambda u, w, q, k: attention_loss(u, w, q, k, 0, 0).value,
    "l2": lambda u, w, q, k: attention_loss(u, w, q, k, 0, 0, "l2").value,
    "textbook": textbook,
    "lolcats": lolcats,
    "leanest": leanest,
}


def losses(quick):
    sizes = [(8, 2048, 32, 1, 128), (8, 2048, 8, 4, 128), (1, 8192, 8, 4, 128), (32, 512, 12, 1, 64)]
    for size in (sizes[:1] if quick else sizes) if GPU else [(1, 2048, 8, 1, 64)]:
        for features in (64, 128, 256) if GPU and not quick else (64,):
            inputs = loss_inputs(*size, features)
            row = {"op": "loss", "size": size, "features": features}
            for name, form in FORMS.items():
                row[name] = attempt(name, lambda form=form: [lambda: with_gradients(form, *inputs)], least=20)  # noqa: B023
                if not GPU:
                    row[name]["bytes"] = peak_in_a_process(name)
            if GPU:
                lean = [x.bfloat16() for x in inputs]
                for name, form in (("leanest bf16", leanest), ("leanest compiled", torch.compile(leanest))):
                    row[name] = attempt(name, lambda form=form: [lambda: with_gradients(form, *lean)], least=20)  # noqa: B023
            yield row | {"error": loss_error(*size[2:], features)}


def loss_error(heads, group, dim, features):
    u, w, q, k = loss_inputs(1, 300, heads, group, dim, features)
    exact = blocked(*(x.double() for x in (u, w, q, k)), 0, 0, False, True)[1][0] / u[..., 0].numel()
    ours = with_gradients(FORMS["ours"], u, w, q, k)[1]
    return ((ours.double() - exact).norm() / exact.norm()).item()


def peak_in_a_process(name):
    """The bytes that a loss adds to the peak of a process of its own."""
    done = subprocess.run([sys.executable, "-m", __spec__.name, "--peak", name], capture_output=True, check=True)
    return int(done.stdout)


def peak(name):
    inputs = loss_inputs(1, 2048, 8, 1, 64, 64)
    short = [x[..., :64, :].contiguous() for x in inputs]
    with_gradients(FORMS[name], *short)  # loads what every form needs
    before = peak_so_far()
    with_gradients(FORMS[name], *inputs)
    return peak_so_far() - before


def peak_so_far():
    """The most memory that this process has had; what getrusage says includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def times(x):
    return f"{x['seconds'] * 1e3:.3f} ms" if "seconds" in x else x.get("failed", "")[:60]


def describe(row):
    """One line per row and rival."""
    sizes = {n: x for n, x in row.items() if not isinstance(x, dict | float) and n != "bytes"}
    yield " ".join(f"{n}={x}" for n, x in sizes.items())
    own = row["ours"]["seconds"] if isinstance(row["ours"], dict) else row["ours"]
    floor = f", {row['floor'] / own:.0%} of the floor's speed" if "floor" in row else ""
    error = f", error {row['error']:.1e}" if "error" in row else ""
    yield f"  ours {own * 1e3:.3f} ms{floor}{error}"
    for name, x in {**row.get("rivals", {}), **row}.items():
        if isinstance(x, dict) and ("seconds" in x or "failed" in x):
            memory = f", {x['bytes'] / 2**20:.0f} MiB" if x.get("bytes") else ""
            ratio = f", {x['seconds'] / own:.2f} of ours" if "seconds" in x else ""
            yield f"  {name} {times(x)}{ratio}{memory}"


def crossover(rows):
    """The shortest text from which on ours is faster than every softmax rival, by batch and features."""
    found: dict[str, int | None] = {}
    for row in sorted((r for r in rows if r["op"] == "prefill"), key=lambda r: -r["tokens"]):
        rivals = [x["seconds"] for name, x in row["rivals"].items() if name.startswith("sdpa") and "seconds" in x]
        key = f"batch {row['batch']}, {row['features']} features"
        if rivals and row["ours"] < min(rivals) and found.get(key, row["tokens"]) is not None:
            found[key] = row["tokens"]
        elif key not in found:
            found[key] = None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes of every table")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak))
        return
    name = torch.cuda.get_device_name() if GPU else "cpu"
    limits = ceilings()
    machine = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(), **limits}
    print(f"{name}: copies {limits['copy'] / 1e9:.1f} GB/s, multiplies {limits['product'] / 1e12:.2f} TFLOP/s")
    if not GPU:
        print(f"no GPU here: PyTorch paths alone, small sizes, float32, {machine['threads']} threads")
    rows = []
    for produce in (lambda: prefill(limits, arguments.quick), lambda: decode(arguments.quick),
                    lambda: losses(arguments.quick)):  # fmt: skip
        for row in produce():
            rows.append(row)
            print("\n".join(describe(row)), flush=True)
    print("faster than softmax from", crossover(rows))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"kernels-{name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows, "crossover": crossover(rows)}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
