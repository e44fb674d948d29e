"""Fits the outputs of a student's layers to those of its teacher, by least squares.

Two linear maps of a layer write into the hidden states: attention's output projection, and the last map of the layer.
Those of a student receive other inputs than they were trained for, because its heads hold less. The addition to such a
map that brings it nearest to the teacher's hidden states has a closed form: no gradients, no rates. Layers are fitted
one after the other, so that each also corrects the error of the layers before it.
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

RIDGE = 0.03  # of the mean square of a map's inputs: below it the texts say little, and the teacher's map stays
SAME = 0.01  # of a layer's answer: the difference from the sum of its parts that rounding may cause

Tensor = torch.Tensor
Recorded = dict[nn.Module, tuple[Tensor, Tensor]]  # inputs and outputs of modules


@dataclass
class Squares:
    """The sums that determine the addition to a linear map."""

    inputs: Tensor | float = 0.0  # (inputs, inputs)
    products: Tensor | float = 0.0  # (inputs, outputs)

    def add(self, inputs: Tensor, missing: Tensor) -> None:
        x, y = inputs.flatten(0, -2).float(), missing.flatten(0, -2).float()
        self.inputs, self.products = self.inputs + x.mT @ x, self.products + x.mT @ y

    def add_to(self, linear: nn.Module, ridge: float = RIDGE) -> None:
        """Add the least-squares solution for all missing outputs to the weight of a map."""
        assert isinstance(self.inputs, Tensor)
        floor = ridge * self.inputs.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        added = torch.linalg.solve(self.inputs + floor * torch.eye(len(self.inputs)).to(floor), self.products)
        weight = cast(nn.Parameter, linear.weight)
        weight.add_((added if is_transposed(linear) else added.mT).to(weight.dtype))


@dataclass(frozen=True)
class Block:
    """A layer of a student, and its two maps."""

    layer: nn.Module
    attention: nn.Module
    output: nn.Module | None
    last: nn.Module | None
    adds: bool  # whether the outputs of both maps are added to the hidden states unchanged

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
    before it stand for; returning true ends the fit early. Closing it before its end restores the teacher's weights.
    """
    numbers = [layer_number(module) for module in attention_modules(student.base)]
    originals: dict[nn.Parameter, Tensor] = {}
    start, end = dict[int, float](), dict[int, float]()
    tokens, begun = settings.steps * settings.batch * texts.shape[1], time.monotonic()
    fits = fit_blocks(student, texts, settings, originals)
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
        for weight, value in originals.items():
            weight.data.copy_(value)
        raise
    return TrainingResult(settings.steps * len(end) // len(numbers), start, end, events=())


def fit_blocks(
    student: LinearizedForCausalLM, texts: Tensor, settings: TrainingSettings, originals: dict[nn.Parameter, Tensor]
) -> Iterator[tuple[float, float]]:
    """Fit one layer after the other; yield its distances before and after; store the weights in `originals` first."""
    base, device = student.base, next(student.parameters()).device
    batches = [draw_batch(texts, settings, step).to(device) for step in range(settings.steps)]
    with attending(base, TEACHER):
        chain = chain_of(base, batches[0])
        assert chain is not None  # else checks.py refuses the plan
        teacher_calls = [calls_of(base, chain, ids) for ids in batches]
        outputs = output_projections(base, batches[0][:1, :PROBE_TOKENS])
    student_calls = [calls_of(base, chain, ids) for ids in batches]
    hidden = [(calls[0][0][0],) * 2 for calls in teacher_calls]  # of teacher and student
    for place, module in enumerate(attention_modules(base)):
        calls = [(t[place], s[place]) for t, s in zip(teacher_calls, student_calls, strict=True)]
        output = outputs.get(layer_number(module))
        with torch.no_grad(), without_denormals():
            block = block_of(base, chain.blocks[place], module, output, hidden[0][0], calls[0][0])
            weights = [cast(nn.Parameter, part.weight) for part in block.maps]
            originals.update({weight: weight.detach().clone() for weight in weights})
            hidden, start, end = fit_block(base, block, hidden, calls)
        yield start, end


def block_of(
    base: PreTrainedModel, layer: nn.Module, attention: nn.Module, output: nn.Module | None, hidden: Tensor, call: Call
) -> Block:
    """Find the maps of a layer by running its teacher."""
    with attending(base, TEACHER), recorded(matrices(layer)) as records:
        answer = answer_of(layer, hidden, call)
    order = [part for part, (_, result) in records.items() if result.shape == answer.shape]
    last = order[-1] if order and order[-1] is not output else None
    total = hidden + sum(records[part][1] for part in (output, last) if part is not None)
    adds = bool((total - answer).float().norm() <= SAME * (answer - hidden).float().norm())
    return Block(layer, attention, output, last, adds)


def fit_block(
    base: PreTrainedModel, block: Block, hidden: Sequence[tuple[Tensor, Tensor]], calls: Sequence[tuple[Call, Call]]
) -> tuple[list[tuple[Tensor, Tensor]], float, float]:
    """Fit the maps of a layer; return the hidden states after it, and the distances from the teacher before and after.

    Where a layer does not add the outputs of its maps unchanged, each map is fitted to the teacher's output of the map.
    """
    expected: list[tuple[Tensor, Tensor | None]] = []  # the layer's answer, and its last map's where that counts
    answers, attended, squares = [], [], Squares()
    for (teacher_hidden, student_hidden), (teacher_call, student_call) in zip(hidden, calls, strict=True):
        with attending(base, TEACHER), recorded(block.maps) as teacher_maps:
            answer = answer_of(block.layer, teacher_hidden, teacher_call)
        expected.append((answer, None if block.adds or block.last is None else teacher_maps[block.last][1]))
        student = getattr(block.attention, "student", None)
        with recorded([*block.maps, *filter(None, [student])]) as student_maps:
            answers.append(answer_of(block.layer, student_hidden, student_call))
        attended.append(None if student is None else student_maps[student][1])
        if block.output is not None:
            missing = teacher_maps[block.output][1] - student_maps[block.output][1]
            squares.add(student_maps[block.output][0], missing + (teacher_hidden - student_hidden) * block.adds)

    def run_again() -> Iterator[tuple[Tensor, Recorded]]:
        for (_, student_hidden), (_, call), output in zip(hidden, calls, attended, strict=True):
            fixed = nullcontext() if output is None else fixed_answer(cast(nn.Module, block.attention.student), output)
            with fixed, recorded(block.maps) as student_maps:
                yield answer_of(block.layer, student_hidden, call), student_maps

    if block.output is not None:
        squares.add_to(block.output)
    if block.last is not None:
        squares = Squares()
        for (answer, student_maps), (target, last) in zip(run_again(), expected, strict=True):
            missing = target - answer if last is None else last - student_maps[block.last][1]
            squares.add(student_maps[block.last][0], missing)
        squares.add_to(block.last)
    after = [(target, answer) for (target, _), (answer, _) in zip(expected, run_again(), strict=True)]
    return after, distance([x for x, _ in expected], answers), distance(*zip(*after, strict=True))


def answer_of(block: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Run a layer on hidden states."""
    (_, *args), kwargs = call
    return cast(Tensor, hidden_of(block(hidden, *args, **kwargs)))


@contextmanager
def recorded(modules: Sequence[nn.Module]) -> Iterator[Recorded]:
    """Record the inputs and outputs of modules while the context lasts, in the order of the calls."""
    records: Recorded = {}

    def keep(module: nn.Module, args: tuple, answer: object) -> None:
        if isinstance(answer, Tensor):  # not the choice of experts that a router returns
            records[module] = args[0], answer

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(keep).remove)
        yield records


def distance(expected: Sequence[Tensor], answers: Sequence[Tensor]) -> float:
    """Return the squared difference, as a share of the teacher's square."""
    missing = sum(float((a - b).float().square().sum()) for a, b in zip(expected, answers, strict=True))
    return missing / sum(float(a.float().square().sum()) for a in expected)
