"""Forecasts of a run from the sizes of its model and the speeds of this machine; and a description of the machine."""

from __future__ import annotations

import math
import shutil
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from linearizer.evaluate.evaluate_run import JUDGING, MAX_WRITTEN_TOKENS
from linearizer.evaluate.recall import DEPTHS
from linearizer.hub.models import download_bytes, find_model
from linearizer.method.degrees_of_freedom import degrees_of_freedom
from linearizer.method.head_prices import DRAWS, options_to_price
from linearizer.method.logits_by_rows import MAX_LOGITS as PRICED_LOGITS
from linearizer.method.untrained import draw_layer
from linearizer.plan.encoder_plan import EncoderInspection, EncoderPlan
from linearizer.plan.head_bytes import Head, Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.run.disk import NUMBER, resume_bytes, rows_of, run_bytes
from linearizer.run.folder import Run, newest_request
from linearizer.run.results import Request
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.devices import choose_device, describe_device, describe_kernels, device_kind
from linearizer.teacher.logits import MAX_LOGITS, drawn_places
from linearizer.teacher.ram import free_bytes
from linearizer.teacher.streaming import bytes_for_weights, bytes_in_memory, rooms_for_weights, streams
from linearizer.train.losses import STUDENT_WIDTHS, TRAINED_LOGITS

SIZE = 64  # of the heads for measuring a student's speed
SPECTRUM_POINTS = 512  # of the sample that the speed of degrees of freedom is measured on
START_SECONDS = 8.0  # until a process has imported everything and loaded a small model
READ_RATE = 4e8  # bytes of weights in a second
PROCESS_BYTES = 620e6  # of Python, PyTorch and other imports
BOTH_WAYS = 12.0  # seconds per key of an encoder's student, as a multiple of SDPA's (both-ways.md)
TIMING_SECONDS = 6.0  # for the times of a layer at several lengths
WEIGHTS = 1.2  # memory of weights as a multiple of their bytes: some have two forms while they load or compute
LOGITS = 6.5  # copies of the logits of texts that are in memory at once
GRAPH_WIDTHS = 24  # numbers in a block's graph for each token, in sizes of its hidden state
LOGIT_OPERATIONS = 1000  # of judging for each entry of a token's logits, apart from its product
JUDGED_SHARE = 1.2  # of a text: it is read once, in a pair with another, and its end once more for every gap
JUDGING_PASSES = JUDGING.texts * JUDGED_SHARE * 3  # of a text: teacher, student and window
VALID_SECONDS = 600.0  # of the measured speeds of a machine
SHORT_SECONDS = 180.0  # of a run or an evaluation for which another run pauses
SUBJECTS = 4  # that read the texts of an evaluation, as a mean over its parts
WRITING = 10.0  # seconds to write a token, as a multiple of those to read it
SPEED_MEASUREMENTS = 8  # of the maximum time, for teacher, student and window
COMPARED = 6  # students that are measured before one of them is made
ADAPTER_PASSES = 3  # of the student, forward and back, for every text in the training of adapters
TRAINING_FACTOR = 25.0  # of the products of the features: losses compare rows with all keys


@dataclass(frozen=True)
class Speeds:
    """Amounts of work that a machine does in a second."""

    products: float  # multiplications and additions of matrices in float32
    small_products: float  # the same in bfloat16
    students: float  # tokens of a KV head of size 64 with a window and slots
    spectra: float  # cubed points of a spectrum
    reads: float  # bytes of weights
    room: float | None = None  # bytes of weights that fit into memory; None: the free memory here


@dataclass(frozen=True)
class RunForecast:
    """Time, memory, disk and download of a run."""

    seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float
    least: float | None = None  # seconds, by the last runs of the model here (past_runs.py); None: there are none
    most: float | None = None


def measure_speeds(device: str) -> Speeds:
    """Measure this machine, in well under a second; again after some minutes, as other work may have slowed it."""
    return speeds_in(device, int(time.monotonic() // VALID_SECONDS))


@lru_cache(maxsize=8)
def speeds_in(device: str, period: int) -> Speeds:
    size = 2048 if device_kind(device) == "cuda" else 512  # large enough for a device to show its speed
    matrices = [torch.ones(size, size, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    points = torch.randn(SPECTRUM_POINTS, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    products, small = (2 * size**3 / seconds_of(lambda x=x: float((x @ x)[0, 0]), 5) for x in matrices)  # type: ignore[misc]
    spectra = seconds_of(lambda: degrees_of_freedom(points.to(device), [2.0**-8]), 2)
    return Speeds(products, small, students_speed(device), SPECTRUM_POINTS**3 / spectra, READ_RATE)


@torch.inference_mode()
def students_speed(device: str, heads: int = 4, tokens: int = 256) -> float:
    """Measure how many tokens KV heads of a student read in a second."""
    generator = torch.Generator().manual_seed(0)
    student = LayerStudent([Head(window=16, slots=48).to_config()] * heads, 0, SIZE, "prf").to(device)
    draw_layer(student, generator)
    text = torch.randn(1, heads, tokens, SIZE, generator=generator).to(device)
    read = seconds_of(lambda: float(student(text, text, text, SIZE**-0.5, None, None)[0, 0, 0, 0]), 3)
    return heads * tokens / read


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest of several repetitions, after one to warm up."""
    return min(timeit.repeat(work, repeat=times + 1, number=1)[1:])


def forecast_run(plan: Plan, inspection: Inspection, speeds: Speeds, download: float) -> RunForecast:
    """Forecast a plan on a machine; `download`: the bytes that must still be downloaded."""
    seconds, memory = forecast_seconds(plan, inspection, speeds), run_memory(plan, inspection)
    return RunForecast(seconds, memory, run_bytes(plan, inspection) + download, download)


def forecast_seconds(plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Estimate the seconds of all steps."""
    plan = plan.sized(inspection.max_positions)
    layers, length = inspection.replaced_layers, plan.resolved_length(None)
    products, heads = product_speed(plan, inspection, speeds), sum(layer.kv_heads for layer in layers)
    teacher, student, logits = text_seconds(plan, inspection, speeds)
    judging = JUDGING_PASSES * (teacher + student + logits)
    pricing = 0.0
    if plan.strategy_spec.decided_by == "prices":
        offered = len(options_to_price(length, plan.strategy_spec.far_field, 16, plan.fewer_bits))
        priced = 1 + 1.2 * DRAWS  # passes of a text, forward and back
        pricing = plan.texts_priced * (COMPARED * (teacher + student) + priced * teacher + offered * student)
    training = training_seconds(plan, layers, teacher, student, length / products)
    spectra = heads * plan.samples**3 / speeds.spectra
    reading = reading_seconds(plan, inspection, speeds)
    return START_SECONDS + spectra + plan.resolved_texts * teacher + pricing + training + judging + reading


def forecast_encoder(plan: EncoderPlan, inspection: EncoderInspection, speeds: Speeds, download: float) -> RunForecast:
    """Forecast the run of an encoder: its student takes longer than the same number of operations in one product."""
    tokens, weights = plan.length or inspection.tokens, NUMBER * inspection.parameters
    teacher, student = (
        tokens * (inspection.layer_parameters + keys * inspection.pair_operations) / speeds.products
        for keys in (tokens, BOTH_WAYS * plan.budget)
    )
    students = 2 if plan.steps and plan.slots else 1  # the second is the window
    judging = plan.texts * (teacher + (2 + students) * student)
    training = students * plan.learnt * (teacher + ADAPTER_PASSES * student)
    seconds = START_SECONDS + TIMING_SECONDS + weights / speeds.reads + judging + training
    return RunForecast(seconds, encoder_memory(plan, inspection), students * weights + download, download)


def encoder_memory(plan: EncoderPlan, inspection: EncoderInspection) -> float:
    """Estimate the bytes of memory of an encoder's run: weights with their training state, and a graph."""
    tokens, width = plan.length or inspection.tokens, inspection.heads * inspection.head_dim
    graph = plan.batch * tokens * inspection.layers * GRAPH_WIDTHS * width * bool(plan.steps)
    return PROCESS_BYTES + NUMBER * ((5 if plan.steps else 2) * inspection.parameters + graph + 2 * tokens**2)


def text_seconds(plan: Plan, inspection: Inspection, speeds: Speeds) -> tuple[float, float, float]:
    """Estimate the seconds that teacher, student and logits take for one text of a run."""
    plan = plan.sized(inspection.max_positions)
    layers, length = inspection.replaced_layers, plan.resolved_length(None)
    attention = sum(2 * layer.all_queries * (layer.key_dim + layer.value_dim) for layer in layers) * length
    products = product_speed(plan, inspection, speeds)
    attended = min(products, speeds.products) if device_kind(plan.device) == "cpu" else products
    teacher = length * (2 * inspection.active / products + attention / attended)  # bf16 does not help SDPA on a CPU
    student = length * sum(layer.kv_heads * layer.key_dim for layer in layers) / SIZE / speeds.students
    return teacher, student, len(drawn_places(length)) * LOGIT_OPERATIONS * inspection.vocabulary / speeds.products


def evaluation_seconds(request: Request, plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Estimate the seconds of an evaluation from the tokens that its parts read; for tasks they are unknown."""
    if "tasks" in request.chosen:
        return math.inf
    usual = plan.resolved_length(inspection.max_positions)
    length, lengths = request.length or usual, request.lengths or (4 * usual,)
    tokens = {
        "language": JUDGED_SHARE * request.texts * max(length, *request.lengths, 0),
        "needle": len(DEPTHS) * request.texts * max(lengths),  # half of the texts, at lengths that double
        "generation": WRITING * request.texts * min(length, 2 * MAX_WRITTEN_TOKENS),
    }
    tokens["recall"] = 0.0 if "language" in request.chosen else tokens["language"]
    timed = SPEED_MEASUREMENTS * request.seconds * ("speed" in request.chosen)
    read = sum(count for part, count in tokens.items() if part in request.chosen)
    text = SUBJECTS * sum(text_seconds(plan, inspection, speeds))
    return START_SECONDS + text * read / usual + timed + reading_seconds(plan, inspection, speeds)


def is_short(run: Run, token: str | None = None) -> bool:
    """Whether a run, or its requested evaluation, takes a few minutes at most, and fits into the free memory."""
    plan, inspection, device = run.plan, run.inspection, choose_device(run.plan.device)
    speeds = measure_speeds(device)
    if run.task is None:
        seconds = (
            math.inf if download_bytes(find_model(plan.model, token)) else forecast_seconds(plan, inspection, speeds)
        )
    else:
        seconds = evaluation_seconds(newest_request(run)[0], plan, inspection, speeds)
    return seconds <= SHORT_SECONDS and run_memory(plan, inspection) <= free_bytes(torch.device(device))


def reading_seconds(plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Estimate the seconds for reading weights: once, or in every pass of a run that reads them block by block."""
    weights = bytes_in_memory(inspection, plan.dtype, plan.device)
    if not (weights > speeds.room if speeds.room else streams(inspection, plan.dtype, plan.device)):
        return inspection.weight_bytes / speeds.reads
    length = plan.resolved_length(inspection.max_positions)
    batches = min(JUDGING.texts, math.ceil(JUDGING.texts * length * inspection.vocabulary / MAX_LOGITS))
    count = 2.0 + 2 * 3 * batches  # two parts of judging, with three subjects
    if plan.strategy_spec.decided_by == "prices":
        count += 4 + COMPARED
    if plan.trains:
        count += 3 + plan.steps
    return (inspection.weight_bytes + count * weights) / speeds.reads


def product_speed(plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Return the speed of products in the type that a plan computes in."""
    if plan.dtype == "auto" and inspection.number_bytes == 2:
        return max(speeds.products, speeds.small_products)
    return speeds.products if plan.dtype in ("auto", "float32") else speeds.small_products


def training_seconds(plan: Plan, layers: list[Layer], teacher: float, student: float, operation: float) -> float:
    """Estimate the seconds of training; `operation`: the seconds of one operation on every token of a text."""
    step = teacher + (ADAPTER_PASSES if plan.resolved_lora else 1) * (teacher + student)
    if plan.may_hold_features:
        products = sum(layer.query_heads * layer.key_dim * rows_of(plan, layer) for layer in layers)
        step = teacher + TRAINING_FACTOR * products * operation
    return plan.steps * plan.batch * step


def run_memory(plan: Plan, inspection: Inspection) -> float:
    """Estimate the bytes of memory of a run: the weights, and the needs of its most expensive step."""
    plan = plan.sized(inspection.max_positions)
    layers, length = inspection.replaced_layers, plan.resolved_length(None)
    weights: float = bytes_in_memory(inspection, plan.dtype, plan.device)
    if streams(inspection, plan.dtype, plan.device):
        weights = min(weights, bytes_for_weights(plan.device))
    token = LOGITS * NUMBER * inspection.vocabulary  # the bytes of its logits
    judging = min(LOGITS * NUMBER * MAX_LOGITS, JUDGING.texts * length * token)
    width = max((layer.query_heads * layer.key_dim for layer in layers), default=0)
    hidden = NUMBER * length * width
    pricing = rows = graph = 0.0
    if plan.strategy_spec.decided_by == "prices":
        logits = min(PRICED_LOGITS, length * inspection.vocabulary)
        kept = len(inspection.layers) + GRAPH_WIDTHS + 2 * DRAWS  # of all blocks, of the graph of one, and gradients
        pricing = LOGITS * NUMBER * logits + kept * hidden
    if plan.trains:
        rows = max((layer.query_heads * length * length for layer in layers), default=0) * plan.batch * NUMBER * 3
    if plan.resolved_lora:
        kept = len(inspection.layers) + STUDENT_WIDTHS  # of all blocks, and of the graph of one
        graph = NUMBER * (plan.batch * length * width * kept + LOGITS * TRAINED_LOGITS)
        weights *= 2  # a student is judged with its teacher's own weights
    sample = 6 * 8 * plan.samples**2
    work = max(sample, judging, pricing, rows, graph)
    return PROCESS_BYTES + WEIGHTS * weights + work + resume_bytes(plan, inspection)


@dataclass(frozen=True)
class Machine:
    """The device of a plan, with its free memory and the free disk."""

    device: str  # its product name
    kernels: str  # that read with a student on it
    free_memory: int  # bytes, of the device, or of all GPUs if the plan names none
    free_disk: int  # bytes, on the disk of the runs

    def fits(self, forecast: RunForecast) -> bool:
        """Whether there is room for the forecast memory and disk of a run."""
        return forecast.memory_bytes <= self.free_memory and forecast.disk_bytes <= self.free_disk


def describe_machine(plan: Plan | EncoderPlan, runs: Path) -> Machine:
    """Describe the machine that a plan would run on."""
    device = torch.device(choose_device(plan.device))
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
    return Machine(
        describe_device(device),
        describe_kernels(device),
        sum(free_bytes(torch.device(place)) for place in rooms_for_weights(plan.device)),
        shutil.disk_usage(place).free,
    )
