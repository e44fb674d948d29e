"""What a run will take here: time, memory and disk, from the sizes of a model and speeds measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from linearizer.allocate.decide import sinks_to_try
from linearizer.allocate.step import PATIENCE
from linearizer.measure.degrees_of_freedom import degrees_of_freedom
from linearizer.measure.head_prices import options_to_price
from linearizer.run.disk import checkpoint_bytes, resume_bytes
from linearizer.run.head_bytes import Layer
from linearizer.run.inspection import Inspection
from linearizer.run.plan import Plan

POINTS = 512  # of the sample that the spectrum's speed is measured on
BASE = 500e6  # bytes of Python and PyTorch
PASS = 1e-3  # seconds of a pass through one layer that no machine saves
START = 8.0  # seconds until a process has imported everything and loaded a small model
JUDGED = 8 * 2 * 3 + 8 * 3 * 3  # passes of a text that evaluation makes: of language, and of three gaps
FAR = 25.0  # training costs so many times the products of its features: their losses compare rows with all keys


@dataclass(frozen=True)
class Speeds:
    """What this machine does in a second."""

    products: float  # multiplications and additions of matrices
    spectra: float  # cubed points of a spectrum
    reads: float  # bytes of weights


@dataclass(frozen=True)
class Estimate:
    """What a run will take, within a factor of about two."""

    seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float


@cache
def speeds(device: str) -> Speeds:
    """Measure this machine, in well under a second; only once."""
    size = 2048 if device == "cuda" else 512
    matrix = torch.ones(size, size, device=device)
    points = torch.randn(POINTS, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    products = seconds_of(lambda: float((matrix @ matrix)[0, 0]), 5)
    spectra = seconds_of(lambda: degrees_of_freedom(points.to(device), [2.0**-8]), 2)
    return Speeds(2 * size**3 / products, POINTS**3 / spectra, 4e8)


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Time a piece of work, the fastest of a few times."""
    found = []
    for _ in range(times + 1):  # the first warms up
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def estimate(plan: Plan, inspection: Inspection, machine: Speeds, download: float) -> Estimate:
    """Say what a plan will take on a machine."""
    layers = [layer for layer in inspection.layers if layer.native_window is None]
    length = min(plan.length, inspection.max_positions or plan.length)
    return Estimate(
        START + work(plan, inspection, layers, length, machine),
        memory(plan, inspection, layers, length),
        resume_bytes(plan, inspection) + checkpoint_bytes(plan, inspection) + download,
        download,
    )


def work(plan: Plan, inspection: Inspection, layers: list[Layer], length: int, machine: Speeds) -> float:
    """Say how many seconds the steps take once all is loaded."""
    token = 2 * inspection.parameters  # operations of a pass, without attention
    attention = sum(2 * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in layers) * length
    heads = sum(layer.kv_heads for layer in layers)
    spectra = heads * plan.samples**3 / machine.spectra
    passes = (plan.texts + JUDGED) * length * (token + attention)
    pricing = 0.0
    if plan.rules.decided_by == "prices":
        offered = len(options_to_price(length, plan.rules.far_field))
        students = heads * offered / 2 + plan.exchanges + len(sinks_to_try(plan))
        pricing = students * max(2, plan.texts // 2) * length * (token + attention)
        pricing += heads * offered * len(layers) * PASS * machine.products
        pricing = min(pricing, PATIENCE * machine.products)  # beyond that prices are estimated
    worked = (passes + pricing) / machine.products + training(plan, layers, length, token + attention, machine)
    return spectra + worked + inspection.weight_bytes / machine.reads


def training(plan: Plan, layers: list[Layer], length: int, token: float, machine: Speeds) -> float:
    """Say how many seconds training takes, where a pass takes so many operations of a token."""
    if plan.minutes is not None:
        return 60 * plan.minutes
    features = plan.features or (plan.budget or 0) / 2
    products = sum(layer.query_heads * layer.key_dim * features for layer in layers)
    return plan.steps * plan.batch * length * (token + FAR * products) / machine.products


def memory(plan: Plan, inspection: Inspection, layers: list[Layer], length: int) -> float:
    """Say how many bytes a run has in memory at once."""
    sample = 6 * 8 * plan.samples**2
    rows = max((layer.query_heads * length * length for layer in layers), default=0) * plan.batch * 4 * 3
    return BASE + 2 * inspection.weight_bytes + max(sample, rows) + resume_bytes(plan, inspection)
