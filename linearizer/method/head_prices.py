"""Estimates prices of heads: the kl at the model's output when one KV head alone holds an option.

The kl is a mean over the places of a text, in which each doubling of the text counts equally.

An option is what a head may hold: a window, alone or with slots, or its whole cache.
All other heads stay as in the teacher, so prices add up as far as heads do not compensate for each other.
choose.py measures whether they do.

One pass forward and a few back replace a pass for every price. If an option changes the output of a head's attention
by δ, the kl at the model's output is ½ δᵀ F δ to second order, F being the Fisher information: the mean of g gᵀ over
next tokens drawn from the teacher, g the gradient of their log-likelihood. Each token's change counts alone (effects
of one change on another are left out), so that a few draws suffice. A large kl lies beyond the second order and is
overestimated; the estimate serves to order heads and options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from linearizer.method.blockwise_pass import Recording, chain_of, gradients_by_layer
from linearizer.method.recorder import Samples
from linearizer.method.substitute import make_layer_student
from linearizer.method.untrained import generator_at
from linearizer.plan.head_bytes import BLOCK, Head, Layer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.measured import SMALLEST, KlOfLayer, Prices
from linearizer.student.attention_interface import attention_by_layer, device_of
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.teacher.streaming import is_streamed

MANY = 4  # blocks of slots
BEGINNING = 64  # parts of a text: the tokens in the first part count equally
DRAWS = 4  # of next tokens, for every text
MAX_GRADIENTS = 2**27  # of several texts together; one text may take more

Tensor = torch.Tensor
Part = tuple[int, int]  # a layer, and the first of a group of texts


def options_to_price(length: int, far: str = "slots", bits: int = 16, fewer: Sequence[int] = ()) -> tuple[Head, ...]:
    """List windows that double in size, alone and with slots, as far as texts of `length` tell them apart.

    The largest are three quarters of a text: the few heads that recall need that much. With slots a head may also hold
    a whole text, token by token: in few bits that takes no more than slots that merge the last quarter in many bits.
    `far` names what holds older tokens: "slots", or "" for nothing.
    With many slots the window is two blocks: a smaller one would merge its tokens more often.
    The kl of `fewer` bits is measured once for a head, with its whole cache, and added to the price of each option.
    """
    largest = 3 * length // 4
    windows = [Head(window=window, bits=bits) for window in [*list_doublings(SMALLEST, largest), largest]]
    whole_caches = [Head(softmax=True, bits=count) for count in fewer]
    block = min(BLOCK, max(SMALLEST, length // 8))
    slim = [(block, count) for count in [*list_doublings(block, largest), largest]]
    even = [(count, count) for count in list_doublings(2 * block, length // 2)]
    if block > SMALLEST:
        wide = 2 * block
        few, many = ([pair for pair in slim if (pair[1] > MANY * block) == is_many] for is_many in (False, True))
        slim = [*few, *((wide, count) for _, count in [few[-1], *many])]
        slim += [(block // 2, count) for count in list_doublings(block // 4, 2 * block)]
        slim.append((wide, length - wide))
    pairs = dict.fromkeys(slim + even) if far else {}
    return tuple(windows + [Head(window, slots=slots, bits=bits) for window, slots in pairs] + whole_caches)


def list_doublings(first: int, end: int) -> list[int]:
    """List first, 2 · first, 4 · first, … below an end."""
    return [first << step for step in range(30) if first << step < end]


def place_weights(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:  # (tokens,)
    """Weigh the places of a text, 1 in the mean: each doubling of a text counts equally, whatever its length.

    The kl grows with the place. In a plain mean the end of the texts would decide, and short texts would pay for it.
    """
    weights = 1 / (torch.arange(tokens, device=device) + tokens / BEGINNING)
    return weights / weights.mean()


def estimate_prices(
    teacher: PreTrainedModel,
    texts: Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    samples: Samples,
    before: Mapping[Part, KlOfLayer] | None = None,
    keep: Callable[[Part, KlOfLayer], None] = lambda part, kl: None,
    ranks: Ranks = ALONE,
    shown: int = 0,
) -> Steps[Prices]:
    """Estimate the prices of all heads, in the memory of training on a few texts without an optimiser.

    Ranks share the parts: the kl of a layer, summed over the tokens of a group of texts. `keep` receives each that
    this rank computes; `before` holds those of an earlier call. The draws of a text do not depend on the other texts.
    The progress tells the kl of the heads of a layer with the option at `shown`.
    """
    readers = readers_by_layer(layers)
    sources = {reader: index for index, numbers in readers.items() for reader in (index, *numbers)}
    priced = sorted(sources)
    kl = dict(before or {})
    size = texts_together(layers, texts)
    groups = range(0, len(texts), size)
    # a rank runs the whole model on each group of texts of which it has a part
    parts = ranks.share([(index, first) for first in groups for index in priced])
    pending = [first for first in groups if any(part[1] == first and part not in kl for part in parts)]
    devices = {index: device_of(module, teacher.device) for index, module in attention_by_layer(teacher).items()}
    recordings = {
        index: recording_of(layers[source], sinks, samples, source, devices[index]) for index, source in sources.items()
    }
    chain = chain_of(teacher, texts) if pending else None
    sweeps = [[first] for first in pending]
    if pending and is_streamed(teacher):
        sweeps = [pending]  # a sweep reads all weights
    total, done = len(parts), sum(part in kl for part in parts)
    yield Progress(EventName.PRICE, done, total, "layers")
    for sweep in sweeps:
        batches, counts = [texts[first : first + size] for first in sweep], Counter[int]()
        generators = [[generator_at(samples.seed, first + text) for text in range(size)] for first in sweep]

        def likelihoods(batch: int, logits: Tensor, generators: Sequence = generators) -> list[Tensor]:
            return draw_likelihoods(logits, generators[batch][: len(logits)])

        missing = {part for part in parts if part[1] in sweep and part not in kl}
        for index, gradient in gradients_by_layer(teacher, recordings, batches, likelihoods, chain):
            part, counts[index] = (index, sweep[counts[index]]), counts[index] + 1
            if part in missing:
                source = sources[index]
                kl[part] = kl_of_options(layers[source], recordings[index], gradient, options, sinks, samples, source)
                keep(part, kl[part])
                missing.remove(part)
                done += 1
                kl_of_heads = [row[shown] / texts[part[1] : part[1] + size].numel() for row in kl[part]]
                yield Progress(EventName.PRICE, done, total, "layers", {"layer": index, "kl_of_heads": kl_of_heads})
            if not missing:  # the layers before are another rank's, or were priced earlier
                break
    kl = {part: of_part for of_rank in ranks.gather(kl) for part, of_part in of_rank.items()}
    means = {}
    for index, numbers in readers.items():
        needed = [(layer, first) for layer in (index, *numbers) for first in groups]
        sums = torch.stack([torch.tensor(kl[part], dtype=torch.float64) for part in needed])
        means[index] = tuple(map(tuple, (sums.sum(0) / texts.numel()).tolist()))
    return Prices(sinks, tuple(options), tuple(means.get(index, ()) for index in range(len(layers))))


def readers_by_layer(layers: Sequence[Layer]) -> dict[int, list[int]]:
    """List for each layer with heads to price the layers that attend to its keys: what they lose counts as its loss."""
    replaced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    return {index: [reader for reader, layer in enumerate(layers) if layer.reads == index] for index in replaced}


def texts_together(layers: Sequence[Layer], texts: Tensor) -> int:
    """Compute how many texts are run together: at most half, as far as memory has room for gradients."""
    outputs = sum(layer.all_queries * layer.value_dim for layer in layers if layer.native_window is None)
    most = MAX_GRADIENTS // (texts.shape[1] * DRAWS * max(outputs, 1))
    return max(1, min(most, -(-len(texts) // 2)))


@torch.no_grad()
def kl_of_options(
    layer: Layer,
    recording: Recording,
    gradient: Tensor,
    options: Sequence[Head],
    sinks: int,
    samples: Samples,
    index: int,
) -> KlOfLayer:
    """Estimate the kl of a layer's heads by the change of their outputs, summed over the recorded texts."""
    device, heads = recording.inputs[0].device, layer.kv_heads
    kl, weights = torch.zeros(heads, len(options)).double(), place_weights(recording.output.shape[2], device)
    for place, option in enumerate(options):
        output = make_layer_student(layer, [option] * heads, sinks, samples, index, device)(*recording.inputs)
        change = (output - recording.output).float().unflatten(1, (heads, -1))
        # (draws, texts, KV heads, group, tokens): the queries of a group change together
        slope = (gradient.unflatten(2, (heads, -1)) * change).sum((-1, 3))
        kl[:, place] = (weights * slope.square().mean(0)).sum((0, 2)).double().cpu() / 2
    return tuple(map(tuple, kl.tolist()))


def recording_of(layer: Layer, sinks: int, samples: Samples, index: int, device: torch.device) -> Recording:
    """Make the recording of a layer."""
    return Recording(make_layer_student(layer, [Head(softmax=True)] * layer.kv_heads, sinks, samples, index, device))


def draw_likelihoods(logits: Tensor, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Draw the next tokens of every text by its generator, a few times; return the log-likelihood of each draw."""
    logs = logits.float().log_softmax(-1)
    pairs = zip(logs.detach().exp().cpu(), generators, strict=True)
    drawn = torch.cat([torch.multinomial(text, DRAWS, replacement=True, generator=draw) for text, draw in pairs])
    return [logs.flatten(0, 1).gather(-1, draw[:, None]).sum() for draw in drawn.T.to(logs.device)]
