"""Estimates prices of heads from one pass forward and a few back, in place of a pass for every price.

If an option changes the output of a head's attention by δ, the kl at the model's output is ½ δᵀ F δ to second order,
F being the Fisher information: the mean of g gᵀ over next tokens drawn from the teacher, g the gradient of their
log-likelihood. Each token's change counts alone (what one change does to another is left out), so that few draws do.
A large kl lies beyond the second order and is overestimated; the estimate serves to order heads and options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from linearizer.measure.block_gradients import Recording, gradients_by_layer
from linearizer.model.logits import vocabulary
from linearizer.model.streaming import is_streamed
from linearizer.model.swap import Begin, make_layer_student
from linearizer.model.sweep import chain_of
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.prices import KlOfLayer, Prices
from linearizer.run.sharing import ALL, Share
from linearizer.runtime.attention_interface import attention_modules, device_of
from linearizer.runtime.layer_student import generator_at

DRAWS = 4  # of next tokens, for every text
MAX_GRADIENTS = 2**27  # of several texts together, with their logits

Tensor = torch.Tensor


def estimate_prices(
    teacher: PreTrainedModel,
    texts: Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    seed: int = 0,
    before: Mapping[int, tuple[int, KlOfLayer]] | None = None,
    keep: Callable[[int, int, KlOfLayer], None] = lambda index, texts, kl: None,
    share: Share = ALL,
) -> Steps[Prices]:
    """Estimate the prices of all heads, in the memory of training on a few texts without an optimiser.

    `keep` receives each layer of the share, how many texts are done, and the kl summed over their tokens; `before` is
    that of an earlier call, to go on from. Every text draws its next tokens for itself.
    """
    priced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    sums = {index: torch.zeros(layers[index].kv_heads, len(options)).double() for index in priced}
    done = dict.fromkeys(sums, 0)
    for index, (texts_done, kl) in (before or {}).items():
        sums[index], done[index] = torch.tensor(kl, dtype=torch.float64), texts_done
    own = share.part_of({index: layers[index].kv_heads for index in priced})
    together = texts_together(teacher, layers, texts.shape[1])
    devices = [device_of(module, teacher.device) for module in attention_modules(teacher)]
    recordings = {index: recording_of(layers[index], sinks, begin, index, devices[index]) for index in priced}
    first = min((done[index] for index in own), default=len(texts))
    chain = chain_of(teacher, texts) if first < len(texts) else None
    while first < len(texts):
        behind = [index for index in own if done[index] == first]
        end = len(texts) if is_streamed(teacher) else first + together  # of the texts that a sweep is made for
        ids = texts[first : min([end, *(done[index] for index in own if index not in behind)])]

        def likelihoods(batch: int, logits: Tensor, first: int = first) -> list[Tensor]:
            first += batch * together
            return draw_likelihoods(logits, [generator_at(seed, first + text) for text in range(len(logits))])

        for index, gradient in gradients_by_layer(teacher, recordings, ids.split(together), likelihoods, chain):
            if index in behind:
                sums[index] += kl_of_options(layers[index], recordings[index], gradient, options, sinks, begin, index)
        first += len(ids)
        for index in behind:
            done[index] = first
            keep(index, first, rows_of(sums[index]))
        yield Progress(EventName.PRICE, first, len(texts), "texts")
    means = {index: rows_of(sums[index] / texts.numel()) for index in priced}
    return Prices(sinks, tuple(options), tuple(means.get(index, ()) for index in range(len(layers))))


def rows_of(kl: Tensor) -> KlOfLayer:
    """Lay the kl of a layer (KV heads, options) out."""
    return tuple(map(tuple, kl.tolist()))


def texts_together(teacher: PreTrainedModel, layers: Sequence[Layer], length: int) -> int:
    """Compute how many texts are run together, by the gradients and the logits that are held of each."""
    outputs = sum(layer.query_heads * layer.value_dim for layer in layers if layer.native_window is None)
    return max(1, MAX_GRADIENTS // (length * (DRAWS * outputs + 3 * vocabulary(teacher))))


@torch.no_grad()
def kl_of_options(
    layer: Layer, recording: Recording, gradient: Tensor, options: Sequence[Head], sinks: int, begin: Begin, index: int
) -> Tensor:  # (KV heads, options)
    """Estimate the kl of a layer's heads by the change of their outputs, summed over the tokens of some texts."""
    device, heads = recording.inputs[0].device, layer.kv_heads
    kl = torch.zeros(heads, len(options)).double()
    for place, option in enumerate(options):
        output = make_layer_student(layer, [option] * heads, sinks, begin, index, device)(*recording.inputs)
        change = (output - recording.output).float().unflatten(1, (heads, -1))
        # (draws, texts, KV heads, group, tokens): the queries of a group change together
        slope = (gradient.unflatten(2, (heads, -1)) * change).sum((-1, 3))
        kl[:, place] = slope.square().mean(0).sum((0, 2)).double().cpu() / 2
    return kl


def recording_of(layer: Layer, sinks: int, begin: Begin, index: int, device: torch.device) -> Recording:
    """Make the recording of a layer."""
    return Recording(make_layer_student(layer, [Head(softmax=True)] * layer.kv_heads, sinks, begin, index, device))


def draw_likelihoods(logits: Tensor, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Draw next tokens, a few times and for every text by itself; give the log-likelihood of each draw."""
    logs = logits.float().log_softmax(-1)
    pairs = zip(logs.detach().exp().cpu(), generators, strict=True)
    drawn = torch.cat([torch.multinomial(text, DRAWS, replacement=True, generator=draw) for text, draw in pairs])
    return [logs.flatten(0, 1).gather(-1, draw[:, None]).sum() for draw in drawn.T.to(logs.device)]
