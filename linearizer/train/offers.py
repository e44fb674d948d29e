"""Trains the memories that heads are offered, layer by layer, so that their prices are those of what they have learned.

Every head of the model holds an option while that is trained; a size between two options is begun without training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from linearizer.model import checkpoint
from linearizer.model.initialise import begin_of, initialise
from linearizer.model.layers import featured, layer_number
from linearizer.model.safetensors import read_tensors, write_tensors
from linearizer.model.samples import samples_of
from linearizer.model.swap import Begin, remove_students
from linearizer.model.teacher import Teacher
from linearizer.progress import Progress, Steps
from linearizer.run.allocation import Allocation, heads_replaced
from linearizer.run.events import EventName
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.head_bytes import Head
from linearizer.run.stopping import log_progress
from linearizer.runtime.attention_interface import attending, attention_modules
from linearizer.runtime.layer_student import LayerStudent
from linearizer.runtime.matrix_rule import RULES, MatrixRule
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.train.distill import distill
from linearizer.train.settings import training_settings

Learned = dict[str, torch.Tensor]  # layer.parameter, of all heads of the layer


def train_offers(
    run: Run, teacher: Teacher, texts: Callable[[], torch.Tensor], options: Sequence[Head], sinks: int
) -> Steps[Begin]:
    """Train each option that is a memory, unless that is done; return how layers begin with what was learned."""
    begin, trained = begin_of(run), [option for option in options if option.memory and run.plan.steps]
    if missing := [option for option in trained if not run.has_file(file_of(option))]:
        yield from log_progress(run, train_each(run, teacher, texts(), missing, sinks))
    learned = {
        (RULES[option.memory], option.window, option.features): read_tensors(run.folder / file_of(option))[0]
        for option in trained
    }

    def begin_trained(student: LayerStudent, index: int) -> None:
        begin(student, index)
        for group in featured(student):
            if isinstance(rule := group.feature_map, MatrixRule):
                own = learned.get((rule.rule, group.window, group.features), {})
                for name, parameter in rule.named_parameters() if own else ():
                    parameter.data.copy_(own[f"{index}.{name}"][group.heads])

    return begin_trained


def train_each(run: Run, teacher: Teacher, texts: torch.Tensor, options: Sequence[Head], sinks: int) -> Steps[None]:
    """Train options one after the other, and keep what each has learned."""
    plan, layers, model, samples = run.plan, teacher.inspection.layers, teacher.model, samples_of(run)
    settings = replace(training_settings(plan)[0], lora=0)
    for place, option in enumerate(options):
        folder = (run.folder / file_of(option)).with_suffix("")
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        rows = tuple((option,) * heads_replaced(layer) for layer in layers)
        with attending(model, model.config._attn_implementation):  # so that it is the teacher again afterwards
            try:
                student = checkpoint.put_student_into(
                    model, layers, Allocation(plan.strategy, sinks, rows), seed=plan.seed
                )
                initialise(student, samples, plan.seed)
                for done in distill(student, texts, settings, folder=folder, resume=folder.exists()):
                    done_before, total = place * settings.steps, len(options) * settings.steps
                    yield Progress(EventName.PRICE, done_before + done.done, total, "training steps")
                write_tensors(run.folder / file_of(option), parameters_of(student))
            finally:
                remove_students(model)


def parameters_of(student: LinearizedForCausalLM) -> Learned:
    """Name the parameters of the memories of a student whose heads all hold the same."""
    maps = {
        layer_number(module): featured(module.student)[0].feature_map  # type: ignore[arg-type]
        for module in attention_modules(student.base)
        if hasattr(module, "student")
    }
    return {f"{index}.{name}": x for index, each in maps.items() for name, x in each.named_parameters()}  # type: ignore[union-attr]


def file_of(option: Head) -> str:
    """Name the file of a run's folder with what an option has learned."""
    return f"state/offers/{option.memory}-{option.window}-{option.features}.safetensors"
