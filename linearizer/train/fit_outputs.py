"""Fits what the layers of a student write into the hidden states to what their teacher's write, by least squares.

Two linear maps of a layer write: attention's output projection, and the last map of the layer. Those of a student are
given something else than they were trained for, because its heads hold less. What has to be added to such a map so that
it comes nearest to the teacher's hidden states has a closed form: no gradients, no rates. Layers are fitted one after
the other, so that each makes up for what is missing from the layers before it as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.blockwise_pass import Call, calls_of, chain_of, hidden_of
from linearizer.method.substitute import fixed_answer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.student.attention_interface import attending, attention_modules
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import is_transposed, layer_number, matrices, output_projections
from linearizer.teacher.logits import PROBE_TOKENS
from linearizer.train.settings import TrainingResult, TrainingSettings, draw_batch
from linearizer.train.trainer import TEACHER, without_denormals

RIDGE = 0.03  # of the mean square of what a map is given, below which the texts say little: the teacher's map stays
SAME = 0.01  # of a layer's answer that may differ from the sum of its parts by rounding

Tensor = torch.Tensor
Recorded = dict[nn.Module, tuple[Tensor, Tensor]]  # what modules were given, and what they answered


@dataclass
class Squares:
    """The sums that say what has to be added to a linear map."""

    inputs: Tensor | float = 0.0  # (inputs, inputs)
    products: Tensor | float = 0.0  # (inputs, outputs)

    def add(self, given: Tensor, missing: Tensor) -> None:
        x, y = given.flatten(0, -2).float(), missing.flatten(0, -2).float()
        self.inputs, self.products = self.inputs + x.mT @ x, self.products + x.mT @ y

    def add_to(self, part: nn.Module, ridge: float = RIDGE) -> None:
        """Add what comes nearest to all that was missing to the weight of a map."""
        assert isinstance(self.inputs, Tensor)
        least = ridge * self.inputs.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        added = torch.linalg.solve(self.inputs + least * torch.eye(len(self.inputs)).to(least), self.products)
        weight = cast(nn.Parameter, part.weight)
        weight.add_((added if is_transposed(part) else added.mT).to(weight.dtype))


@dataclass(frozen=True)
class Block:
    """A layer of a student, and its two maps."""

    whole: nn.Module
    attention: nn.Module
    output: nn.Module | None
    last: nn.Module | None
    adds: bool  # whether both maps are added to the hidden states as they are

    @property
    def maps(self) -> list[nn.Module]:
        return [part for part in (self.output, self.last) if part is not None]


def fit_maps(
    student: LinearizedForCausalLM,
    texts: Tensor,  # (texts, tokens)
    settings: TrainingSettings,
    enough: Callable[[int], bool] = lambda step: False,
) -> Steps[TrainingResult]:
    """Fit the maps of all layers, the first layer first, to the texts that the steps of a training would read.

    A fit that was stopped begins again. Before each layer `enough` receives the share of the steps that the layers
    before it stand for; returning true ends the fit early. Closing it before its end leaves the teacher's weights as
    they were.
    """
    numbers = [layer_number(module) for module in attention_modules(student.base)]
    before: dict[nn.Parameter, Tensor] = {}
    start, end = dict[int, float](), dict[int, float]()
    tokens, begun = settings.steps * settings.batch * texts.shape[1], time.monotonic()
    fits = fit_blocks(student, texts, settings, before)
    try:
        while len(end) < len(numbers) and not enough(settings.steps * len(end) // len(numbers)):
            layer = numbers[len(end)]
            start[layer], end[layer] = next(fits)
            seconds = (time.monotonic() - begun) / len(end)
            details = {
                "loss": end[layer],
                "layers": dict(end),
                "tokens_per_second": tokens / seconds,
                "seconds_left": seconds * (len(numbers) - len(end)),
                "events": (),
            }
            yield Progress(EventName.DISTILL, len(end), len(numbers), "layers", details)
    except GeneratorExit:
        for weight, value in before.items():
            weight.data.copy_(value)
        raise
    return TrainingResult(settings.steps * len(end) // len(numbers), start, end, events=())


def fit_blocks(
    student: LinearizedForCausalLM, texts: Tensor, settings: TrainingSettings, before: dict[nn.Parameter, Tensor]
) -> Iterator[tuple[float, float]]:
    """Fit one layer after the other; yield how far each was from its teacher, and is; keep the weights in `before`."""
    base, device = student.base, next(student.parameters()).device
    batches = [draw_batch(texts, settings, step).to(device) for step in range(settings.steps)]
    with attending(base, TEACHER):
        chain = chain_of(base, batches[0])
        assert chain is not None  # else checks.py refuses the plan
        their_calls = [calls_of(base, chain, ids) for ids in batches]
        outputs = output_projections(base, batches[0][:1, :PROBE_TOKENS])
    own_calls = [calls_of(base, chain, ids) for ids in batches]
    hidden = [(calls[0][0][0],) * 2 for calls in their_calls]  # of teacher and student
    for place, module in enumerate(attention_modules(base)):
        calls = [(theirs[place], own[place]) for theirs, own in zip(their_calls, own_calls, strict=True)]
        output = outputs.get(layer_number(module))
        with torch.no_grad(), without_denormals():
            block = block_of(base, chain.blocks[place], module, output, hidden[0][0], calls[0][0])
            weights = [cast(nn.Parameter, part.weight) for part in block.maps]
            before.update({weight: weight.detach().clone() for weight in weights})
            hidden, start, end = fit_block(base, block, hidden, calls)
        yield start, end


def block_of(
    base: PreTrainedModel, whole: nn.Module, attention: nn.Module, output: nn.Module | None, hidden: Tensor, call: Call
) -> Block:
    """Find the maps of a layer by running its teacher."""
    with attending(base, TEACHER), recorded(matrices(whole)) as seen:
        answer = answer_of(whole, hidden, call)
    order = [part for part, (_, given) in seen.items() if given.shape == answer.shape]
    last = order[-1] if order and order[-1] is not output else None
    total = hidden + sum(seen[part][1] for part in (output, last) if part is not None)
    adds = bool((total - answer).float().norm() <= SAME * (answer - hidden).float().norm())
    return Block(whole, attention, output, last, adds)


def fit_block(
    base: PreTrainedModel, block: Block, hidden: Sequence[tuple[Tensor, Tensor]], calls: Sequence[tuple[Call, Call]]
) -> tuple[list[tuple[Tensor, Tensor]], float, float]:
    """Fit the maps of a layer; return the hidden states after it, and how far the student was and is from its teacher.

    Where a layer does not add what its maps give as it is, each map comes nearest to what it gives its teacher.
    """
    theirs: list[tuple[Tensor, Tensor | None]] = []  # the layer's answer, and its last map's where that counts
    answers, attended, squares = [], [], Squares()
    for (their_hidden, own_hidden), (their_call, own_call) in zip(hidden, calls, strict=True):
        with attending(base, TEACHER), recorded(block.maps) as their_maps:
            answer = answer_of(block.whole, their_hidden, their_call)
        theirs.append((answer, None if block.adds or block.last is None else their_maps[block.last][1]))
        student = getattr(block.attention, "student", None)
        with recorded([*block.maps, *filter(None, [student])]) as own_maps:
            answers.append(answer_of(block.whole, own_hidden, own_call))
        attended.append(None if student is None else own_maps[student][1])
        if block.output is not None:
            missing = their_maps[block.output][1] - own_maps[block.output][1]
            squares.add(own_maps[block.output][0], missing + (their_hidden - own_hidden) * block.adds)

    def again() -> Iterator[tuple[Tensor, Recorded]]:
        for (_, own_hidden), (_, call), output in zip(hidden, calls, attended, strict=True):
            fixed = nullcontext() if output is None else fixed_answer(cast(nn.Module, block.attention.student), output)
            with fixed, recorded(block.maps) as own_maps:
                yield answer_of(block.whole, own_hidden, call), own_maps

    if block.output is not None:
        squares.add_to(block.output)
    if block.last is not None:
        squares = Squares()
        for (own, own_maps), (their, their_last) in zip(again(), theirs, strict=True):
            missing = their - own if their_last is None else their_last - own_maps[block.last][1]
            squares.add(own_maps[block.last][0], missing)
        squares.add_to(block.last)
    after = [(their, own) for (their, _), (own, _) in zip(theirs, again(), strict=True)]
    return after, distance([x for x, _ in theirs], answers), distance(*zip(*after, strict=True))


def answer_of(block: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Run a layer on hidden states."""
    (_, *args), kwargs = call
    return cast(Tensor, hidden_of(block(hidden, *args, **kwargs)))


@contextmanager
def recorded(parts: Sequence[nn.Module]) -> Iterator[Recorded]:
    """While this lasts, keep what some modules are given, and what they answer, in the order in which they do."""
    seen: Recorded = {}

    def keep(part: nn.Module, args: tuple, answer: object) -> None:
        if isinstance(answer, Tensor):  # and not what a router says of experts
            seen[part] = args[0], answer

    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.register_forward_hook(keep).remove)
        yield seen


def distance(theirs: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """Return the square of what differs, as a share of the teacher's own."""
    missing = sum(float((a - b).float().square().sum()) for a, b in zip(theirs, own, strict=True))
    return missing / sum(float(a.float().square().sum()) for a in theirs)
