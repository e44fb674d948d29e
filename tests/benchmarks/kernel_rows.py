"""Rows of the benchmark on a GPU: attention, losses and training steps, each timed beside its rivals.

`ours` is what dispatch chooses; `error` is relative, against float64 on a part of the input. Without a GPU, PyTorch's
paths are timed in float32.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, LlamaConfig

from linearizer.kernels.triton.dispatch import linear_attention
from linearizer.method.checkpoint import put_student_into
from linearizer.method.untrained import draw as draw_map
from linearizer.method.untrained import draw_layer
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.student.attention_of_student import tensors
from linearizer.student.columns import FeatureState
from linearizer.student.feature_maps import ScaledMap, make_group
from linearizer.student.features_torch import attend_text_with_features
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.observing import attending
from linearizer.train.attention_loss import attention_loss
from linearizer.train.losses import hidden_states
from linearizer.train.settings import TrainingSettings
from linearizer.train.trainer import Trainer
from tests.support.log_features import reference

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
MOST_RIVALS = 2048  # tokens, beyond which rivals with a loop over chunks take minutes, to compile or to run
READ, SINKS = 512, 4
TOKENS = 16  # timed together: a block, so that slots are merged once
KINDS = {  # what KV heads hold, in turn
    "features": [[0, 128]],
    "four kinds": [[64, 0], [256, 0], [64, 64], [0, 128]],
    "slots": [[64, 0, 64, 16]],
    "slots and windows in few bits": [[96, 0, 128, 16, 4], [64, 0, 283, 32, 5], [256, 0, 0, 0, 6], [64, 0, 76, 16, 4]],
    "slots and windows in 8 bits": [[64, 0, 64, 16, 8], [128, 0, 96, 16, 8], [128, 0, 0, 0, 8]],
}


def attempt(make, parts=1, graph=False):
    """Time a part of the call that `make` returns, and its memory; or return why it cannot be timed here."""
    try:
        call = make()
        return {"seconds": seconds(call, graph) / parts, "bytes": peak_bytes(call)}
    except Exception as error:  # Triton's own are not RuntimeErrors, and one rival must not end the table
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


def seconds(call, graph=False):
    """Return the median time of a call; on a GPU with a cold cache."""
    if not GPU:
        return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()).timeit(3).median
    from triton.testing import do_bench, do_bench_cudagraph

    return (do_bench_cudagraph if graph else do_bench)(call, return_mode="median") / 1e3


def peak_bytes(call):
    """Return the memory that a call takes at most, in addition to what was allocated before."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compiled(function):
    """Compile for these sizes alone: otherwise sizes become variable, and after eight nothing is compiled."""
    torch.compiler.reset()
    return torch.compile(function)


def draw(*shape, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(DTYPE)


def draw_text(batch, tokens, heads, group, dim):
    """Draw q (batch, heads, group, tokens, dim), and k and v without the group."""
    return [draw(batch, heads, *shape, tokens, dim, seed=n) for n, shape in enumerate(((group,), (), ()))]


def feature_map_of(heads, dim, features):
    group = make_group({"features": features}, list(range(heads)), 0, (dim, dim), "prf").to(DEVICE)
    draw_map(group.feature_map, torch.Generator().manual_seed(0))
    return group.feature_map


def relative_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@torch.no_grad()
def prefill_row(tokens, heads, group, dim, features):
    """Read a text with features."""
    scale, (q, k, v) = dim**-0.5, draw_text(1, tokens, heads, group, dim)
    feature_map = ScaledMap(feature_map_of(heads, dim, features), scale)

    def read(attend, q=q, k=k, v=v):
        return attend(q * scale, k, v, feature_map, 0, None, FeatureState.empty(k, v, 0, 0, features))

    part = [x[:1, ..., :300, :] for x in (q, k, v)]
    exact = reference(*(x.double() for x in (part[0] * scale, *part[1:])), feature_map, 0, 0)
    row = {
        "op": "prefill",
        "tokens": tokens,
        "features": features,
        "ours": attempt(lambda: lambda: read(linear_attention)),
    }
    rivals = softmax_rivals(q, k, v, scale)
    if tokens <= MOST_RIVALS:
        rivals["chunked pytorch"] = lambda: lambda: read(attend_text_with_features)
    if GPU:
        row["ours in a graph"] = attempt(lambda: lambda: read(linear_attention), graph=True)
    if GPU and tokens <= MOST_RIVALS:
        rivals["chunked pytorch, compiled"] = lambda: compiled(lambda: read(attend_text_with_features))
        for normalize in (True, False):
            rivals[f"fla normalize={normalize}"] = lambda n=normalize: fla(q, k, v, feature_map, n)
    row |= {"error": relative_error(read(linear_attention, *part), exact)}
    return row | {"rivals": {name: attempt(make) for name, make in rivals.items()}}


def softmax_rivals(q, k, v, scale):
    """Name softmax attention to the same text, and what makes its calls."""
    q = q.flatten(1, 2)

    def sdpa_by(*backends):
        def call():
            with sdpa_kernel(list(backends)):
                return sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        return lambda: call

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, k.shape[2], k.shape[2], device=DEVICE)
        attend = compiled(flex_attention)
        return lambda: attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)

    if not GPU:
        return {"sdpa": sdpa_by(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)}
    by_backend = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    return {**{name: sdpa_by(backend) for name, backend in by_backend.items()}, "flex attention": flex}


def fla(q, k, v, feature_map, normalize):
    """Call fla's kernel with features made eagerly, keys repeated for each query head as its layers do."""
    from fla.ops.linear_attn import chunk_linear_attn

    def call():
        u = feature_map.queries(q.float()).flatten(1, 2).exp().to(q.dtype).transpose(1, 2)
        w = feature_map.keys(k.float()).exp().to(k.dtype)
        keys, values = (x.repeat_interleave(q.shape[2], 1).transpose(1, 2) for x in (w, v))
        return chunk_linear_attn(u, keys, values, scale=1.0, normalize=normalize)

    return call


def layer_of(kind, heads, dim):
    """A layer whose KV heads hold what a kind says, in turn."""
    student = LayerStudent([KINDS[kind][head % len(KINDS[kind])] for head in range(heads)], SINKS, dim, "prf")
    draw_layer(student, torch.Generator().manual_seed(0))
    return student.to(DEVICE).eval()


@torch.no_grad()
def slots_row(tokens, heads, group, dim, kind):
    """Read a text with windows and slots."""
    scale, (q, k, v) = dim**-0.5, draw_text(1, tokens, heads, group, dim)
    student, eager = layer_of(kind, heads, dim), layer_of(kind, heads, dim)
    eager.reader = "pytorch"
    rivals = softmax_rivals(q, k, v, scale)
    if tokens <= MOST_RIVALS:
        rivals["pytorch"] = lambda: lambda: eager(q.flatten(1, 2), k, v, scale, None, [])
    row = {"op": "slots", "tokens": tokens, "kind": kind}
    row["ours"] = attempt(lambda: lambda: student(q.flatten(1, 2), k, v, scale, None, []))
    return row | {"rivals": {name: attempt(make) for name, make in rivals.items()}}


@torch.no_grad()
def decode_rows(batch, heads, group, dim, kinds=KINDS):
    """Read a token more of a layer, by what its KV heads hold, beside softmax over a context."""
    text = [draw(batch, heads * many, READ + 1, dim, seed=n) for n, many in enumerate((group, 1, 1))]
    rivals = context_rivals(batch, heads, group, dim)
    for kind in kinds:
        student, memory = layer_of(kind, heads, dim), []
        student(*(x[:, :, :READ] for x in text), dim**-0.5, None, memory)
        token = [x[:, :, READ:].contiguous() for x in text]

        def call(student=student, token=token, memory=memory):
            for _ in range(TOKENS):
                student(*token, dim**-0.5, None, memory)

        row = {"op": "decode", "batch": batch, "kind": kind, "ours": attempt(lambda call=call: call, TOKENS)}
        row["state_bytes"] = sum(x.nbytes for state in memory for x in tensors(state).values())
        if GPU:
            row["ours in a graph"] = attempt(lambda call=call: call, TOKENS, graph=True)
        yield row | {"rivals": rivals}


def context_rivals(batch, heads, group, dim):
    """Time softmax over the keys and values that a cache holds."""
    result, q = {}, draw(batch, heads * group, 1, dim)
    for context in (2048, 8192, 32768, 131072) if GPU else (2048,):
        if batch * context * heads * dim * 4 < 2**35:
            k, v = draw(batch, heads, context, dim), draw(batch, heads, context, dim, seed=1)
            attend = lambda k=k, v=v: sdpa(q, k, v, enable_gqa=True)  # noqa: E731
            for name, graph in {"": False, **({" in a graph": True} if GPU else {})}.items():
                result[f"sdpa over {context}{name}"] = attempt(lambda attend=attend: attend, graph=graph)
    return result


def ours(u, w, q, k):
    return attention_loss(u, w, q, k, 0, 0).value


def weights_of(q, k):
    """Return softmax weights (…, tokens, tokens) and their mask."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    return (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1), mask


def lolcats(u, w, q, k):
    """The form of the LoLCATs trainer: clamped weights as logits of a cross-entropy with probabilities as targets."""
    p, mask = weights_of(q, k)
    a = (u.exp() @ w.exp()[:, :, None].mT).masked_fill(~mask, 0)
    a = (a / (a.sum(-1, keepdim=True) + 1e-12)).clamp(min=1e-12).log()
    return cross_entropy(a.flatten(0, -2), p.flatten(0, -2).to(a.dtype))


def leanest(u, w, q, k):
    """The fewest passes that eager PyTorch needs: the denominators by a running sum of the keys."""
    p, query, key = weights_of(q, k)[0], u.exp(), w.exp()
    total = (query * key.cumsum(-2)[:, :, None]).sum(-1).log()
    return (total - (p * (query @ key[:, :, None].mT).clamp(min=1e-30).log()).sum(-1)).mean()


def with_gradients(loss, u, w, *rest):
    u, w = u.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(u, w, *rest)
    return value, *torch.autograd.grad(value, (u, w))


def loss_inputs(batch, tokens, heads, group, dim, features):
    q, k, _ = (x * dim**-0.25 for x in draw_text(batch, tokens, heads, group, dim))
    feature_map = feature_map_of(heads, dim, features)
    with torch.no_grad():
        return feature_map.queries(q.float()), feature_map.keys(k.float()), q, k


def loss_row(*size):
    """Take the loss of a layer's attention and its gradients, beside other ways to write it."""
    inputs = loss_inputs(*size)
    row = {"op": "loss", "size": size, "ours": attempt(lambda: lambda: with_gradients(ours, *inputs))}
    rivals = {"lolcats": lolcats, "leanest": leanest} | ({"leanest, compiled": compiled(leanest)} if GPU else {})
    row["rivals"] = {
        name: attempt(lambda form=form: lambda: with_gradients(form, *inputs)) for name, form in rivals.items()
    }
    u, w, q, k = loss_inputs(1, 300, *size[2:])
    exact = with_gradients(leanest, *(x.double() for x in (u, w, q, k)))[1]
    return row | {"error": relative_error(with_gradients(ours, u, w, q, k)[1], exact)}


def step_rows(tiny):
    """Take a layerwise training step beside the teacher's forward pass: layers of an 8B model, few words."""
    batch, tokens = (1, 64) if tiny else (8, 2048)
    sizes = (
        {"hidden_size": 256, "intermediate_size": 256} if tiny else {"hidden_size": 4096, "intermediate_size": 14336}
    )
    heads = 4 if tiny else 32
    config = LlamaConfig(
        **sizes, num_attention_heads=heads, num_key_value_heads=heads // 4, num_hidden_layers=2, vocab_size=256,
        max_position_embeddings=tokens,
    )  # fmt: skip
    teacher = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE, DTYPE).eval()
    layer = Layer(heads, heads // 4, config.head_dim, config.head_dim)
    row = (Head(features=16 if tiny else 128),) * layer.kv_heads
    student = put_student_into(teacher.requires_grad_(False), [layer] * 2, Allocation("by hand", 0, (row,) * 2))
    ids = torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(0))

    def forward():
        with torch.no_grad(), attending(student, "sdpa"):
            hidden_states(student, ids.to(DEVICE))

    for loss in ("softmax", "output"):
        settings = TrainingSettings(loss=loss, steps=10**6, batch=batch, repeats=0.0, window_dropout=0.0)
        step = Trainer(student, ids, settings).take_step
        result = {"op": "layerwise step", "loss": loss, "ours": attempt(lambda step=step: step)}
        yield result | {"rivals": {"the teacher's forward pass": attempt(lambda: forward)}}
