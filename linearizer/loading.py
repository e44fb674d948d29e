"""A teacher in memory, and the text that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearizer.asking import check_plan
from linearizer.model.devices import device_of
from linearizer.model.hub import Source, find_model
from linearizer.model.inspect import inspect_model, verify_teacher
from linearizer.model.teacher import load_config, load_teacher, load_tokenizer
from linearizer.model.text import enough_windows
from linearizer.run.disk import check_disks
from linearizer.run.inspection import Inspection
from linearizer.run.plan import Plan


@dataclass(frozen=True)
class Teacher:
    """A teacher in memory, checked against its inspection."""

    source: Source
    inspection: Inspection
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(plan: Plan, token: str | None = None, folder: Path | None = None) -> Teacher:
    """Load the teacher of a plan, after its config said that it can be linearized, and a run's folder can hold it."""
    source = find_model(plan.model, token)
    inspection = inspect_model(source, load_config(source, token))
    inspection.require_support()
    check_plan(plan, inspection.layers)
    if folder is not None:
        check_disks(folder, plan, source, inspection)
    tokenizer = load_tokenizer(source, token)
    model = load_teacher(source, plan.dtype, device_of(plan.device), token)
    verify_teacher(model, inspection)
    return Teacher(source, inspection, model, tokenizer)


def windows_of(
    plan: Plan, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the text that a plan measures with."""
    most = teacher.inspection.max_positions
    length = plan.length if most is None else min(plan.length, most)
    return enough_windows(
        plan.text, teacher.tokenizer, length, texts, least=least, model=teacher.model, seed=plan.seed, token=token
    )
