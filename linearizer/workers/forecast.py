"""Forecasts of a run or an evaluation on this machine, right within a factor of about two.

A run: from the sizes of its model and the speeds of this machine. An evaluation: from the time that judging the same
student took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from linearizer.evaluate.evaluate_run import JUDGING, MAX_WRITTEN_TOKENS, needle_lengths
from linearizer.evaluate.needle import DEPTHS
from linearizer.evaluate.speed import LENGTHS
from linearizer.method.by_prices import MOST_DEAR
from linearizer.method.decide import sinks_to_try
from linearizer.method.degrees_of_freedom import degrees_of_freedom
from linearizer.method.head_prices import options_to_price
from linearizer.method.head_prices_by_gradient import DRAWS
from linearizer.plan.head_bytes import Head, Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.run.disk import NUMBER, SAVE_EVERY, checkpoint_bytes, most_rows, other_bytes, resume_bytes
from linearizer.run.evaluation_request import Request
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.devices import device_kind
from linearizer.teacher.logits import MAX_LOGITS
from linearizer.teacher.streaming import bytes_for_weights, bytes_in_memory, streams

STUDENT_SHAPES = ((1, 256, 64), (8, 256, 64))  # KV heads, tokens, size of a head
HEAD_SHARE = 0.25  # of a head's time that does not hang on its size, where that is 64
SPECTRUM_POINTS = 512  # of the sample that the speed of degrees of freedom is measured on
PROCESS_BYTES = 620e6  # of Python, PyTorch and what runs import
JUDGED_LOGITS, PRICED_LOGITS = 6.5, 3.5  # copies of the logits of texts that are in memory at once
PACKED_SHARE = 0.3  # of a block's weights that its largest matrix has: a CPU packs it anew for a product
GRAPH_WIDTHS = 24  # numbers that a block's graph keeps of a token, in sizes of its hidden state
LARGEST_FILE = 5e9  # bytes of weights that are read at once
START_SECONDS = 8.0  # until a process has imported everything and loaded a small model
READ_RATE = 4e8  # bytes of weights in a second
JUDGED_SHARE = 1.2  # of a text: it is read once, in a pair with another, and on from one place for every gap
JUDGING_PASSES = JUDGING.texts * JUDGED_SHARE * 3  # of a text: teacher, student and window
LOGIT_OPERATIONS = 1000  # that judging takes for each entry of a token's logits, beside its product
ESTIMATING_PASSES = 1 + 1.2 * DRAWS  # of a text, forward and back
DEAR_SHARE = 0.5  # of the dear offers that may be measured
COMPARED = 4  # students that are measured before one of them is made
HEALING_PASSES = 3  # of the student, forward and back, for every text that adapters are trained on
TRAINING_FACTOR = 25.0  # of the products of the features: losses compare rows with all keys

SUBJECTS = 4  # teacher, student, window, untrained student
WITH_RIVALS = 1.5  # times as long as without the caches in few bits, which attend as a teacher does
TOKEN_PASSES = 0.2  # that writing one token of all texts takes
HEAD_ERROR_PASSES = 60  # that the errors of every head take, the curve of errors included
CHOICES = 4  # of a sample of a task, each read by itself
CHOICE_TOKENS = 64
TASK_SAMPLES = 1000  # of a task without a limit
Clock = Callable[[], float]


@dataclass(frozen=True)
class Speeds:
    """Amounts of work that this machine does in a second."""

    products: float  # multiplications and additions of matrices in float32
    small_products: float  # likewise in bfloat16
    students: float  # tokens of a KV head of size 64 with a window and slots
    spectra: float  # cubed points of a spectrum
    reads: float  # bytes of weights
    calls: float = 0.0  # seconds that a layer takes for a token of a student, however many heads it has
    room: float | None = None  # bytes of weights that memory holds; None: what is free here


@dataclass(frozen=True)
class RunForecast:
    """Time, memory, disk and download of a run."""

    seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float


@dataclass(frozen=True)
class EvaluationForecast:
    """How long an evaluation will take."""

    seconds: dict[str, float]  # by part; none where the log does not say how long judging took
    device: str | None  # that the student was judged at


@cache
def measure_speeds(device: str, clock: Clock = time.perf_counter) -> Speeds:
    """Measure this machine, in well under a second; only once."""
    size = matrix_size(device)
    matrices = [torch.ones(size, size, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    points = torch.randn(SPECTRUM_POINTS, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    products, small = (2 * size**3 / seconds_of(lambda x=x: float((x @ x)[0, 0]), 5, clock) for x in matrices)  # type: ignore[misc]
    spectra = seconds_of(lambda: degrees_of_freedom(points.to(device), [2.0**-8]), 2, clock)
    students, calls = students_speed(device, clock)
    return Speeds(products, small, students, SPECTRUM_POINTS**3 / spectra, READ_RATE, calls)


def students_speed(device: str, clock: Clock) -> tuple[float, float]:
    """Measure how many tokens KV heads read in a second, and the seconds that their layer takes besides for each."""
    few, many = (student_seconds(device, clock, *shape) for shape in STUDENT_SHAPES)
    head = max((many - few) / (STUDENT_SHAPES[1][0] - STUDENT_SHAPES[0][0]), many / 100)  # if a clock was disturbed
    return 1 / head, max(few - head, 0.0)


@torch.inference_mode()
def student_seconds(device: str, clock: Clock, heads: int, tokens: int, dim: int) -> float:
    """Measure what a layer of a student takes for a token of a text."""
    student = LayerStudent([Head(window=16, slots=48).held] * heads, 0, dim, "prf").to(device)
    student.reset(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, heads, tokens, dim, generator=generator).to(device)

    def read() -> float:
        return float(student(text, text, text, dim**-0.5, None, None)[0, 0, 0, 0])

    return seconds_of(read, 3, clock) / tokens


def matrix_size(device: str) -> int:
    """Choose matrices large enough for a device to show its speed."""
    return 2048 if device_kind(device) == "cuda" else 512


def seconds_of(work: Callable[[], object], times: int, clock: Clock) -> float:
    """Time a piece of work, the fastest of a few times."""
    seconds = []
    for _ in range(times + 1):  # the first warms up
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return min(seconds[1:])


def forecast_run(plan: Plan, inspection: Inspection, speeds: Speeds, download: float) -> RunForecast:
    """Say what a plan will take on a machine, where so many bytes are still to be downloaded."""
    return RunForecast(
        forecast_seconds(plan, inspection, speeds),
        run_memory(plan, inspection),
        resume_bytes(plan, inspection) + checkpoint_bytes(plan, inspection) + other_bytes(inspection) + download,
        download,
    )


def replaced_layers(inspection: Inspection) -> list[Layer]:
    """List the layers whose memory a student replaces: those without a window of their own."""
    return [layer for layer in inspection.layers if layer.native_window is None]


def forecast_seconds(plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Say how many seconds the steps take."""
    layers, length = replaced_layers(inspection), plan.kept_length(inspection.max_positions)
    attention = sum(2 * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in layers) * length
    token = 2 * inspection.active + attention  # operations
    heads = sum(layer.kv_heads for layer in layers)
    spectra = heads * plan.kept_samples**3 / speeds.spectra
    products = product_speed(plan, inspection, speeds)
    teacher = length * token / products  # seconds for a text
    reading = inspection.weight_bytes / speeds.reads
    weights = bytes_in_memory(inspection, plan.dtype, plan.device)
    if weights > speeds.room if speeds.room else streams(inspection, plan.dtype, plan.device):
        reading += sweeps(plan, layers) * weights / speeds.reads
    sizes = [
        layer.kv_heads * (HEAD_SHARE + (1 - HEAD_SHARE) * layer.key_dim / STUDENT_SHAPES[0][2]) for layer in layers
    ]
    own = length * (sum(sizes) / speeds.students + len(layers) * speeds.calls)  # that a student takes besides
    logits = length * LOGIT_OPERATIONS * inspection.vocabulary / speeds.products
    joined = 2 * length <= (inspection.max_positions or 2 * length)  # texts in pairs, of which a teacher sees all
    longer = length * attention / products if joined else 0.0
    judging = JUDGING.texts * JUDGED_SHARE * (3 * (teacher + logits) + longer + 2 * own)
    pricing = 0.0
    if plan.rules.decided_by == "prices":
        pricing = plan.texts_priced * pricing_seconds(plan, layers, length, teacher, own)
    training = training_seconds(plan, layers, length, token, products)
    if plan.heals and plan.minutes is None:
        passes = HEALING_PASSES if plan.kept_lora else 1
        training = plan.steps * plan.batch * (teacher + passes * (teacher + own))
    return START_SECONDS + spectra + plan.kept_texts * teacher + pricing + training + judging + reading


def sweeps(plan: Plan, layers: list[Layer]) -> float:
    """Say how often a run reads all weights that are read block by block; texts share a reading."""
    count = 8.0  # until it is profiled, and of all that is judged together the texts in two parts, and passages
    if plan.rules.decided_by == "prices":
        priced = 1.0 if plan.prices == "measured" else DEAR_SHARE  # of the layers, from each on to the last
        count += 6 + COMPARED + priced * len(layers) / 2
    if plan.trains:
        count += 3 + plan.steps / SAVE_EVERY
    return count


def product_speed(plan: Plan, inspection: Inspection, speeds: Speeds) -> float:
    """Give the speed of products in the type that a plan computes in."""
    if plan.dtype == "auto" and inspection.number_bytes == 2:
        return max(speeds.products, speeds.small_products)
    return speeds.products if plan.dtype in ("auto", "float32") else speeds.small_products


def pricing_seconds(plan: Plan, layers: list[Layer], length: int, teacher: float, own: float) -> float:
    """Say how many seconds sinks, prices and the comparison take for a text."""
    heads = sum(layer.kv_heads for layer in layers)
    offered = len(options_to_price(length, plan.rules.far_field, 16, plan.fewer_bits))
    students = len(sinks_to_try(plan)) + COMPARED
    priced = ESTIMATING_PASSES + MOST_DEAR * DEAR_SHARE / 2
    if plan.prices == "measured":
        priced = heads * offered / 2
    return students * (teacher + own) + priced * teacher + offered * own


def training_seconds(plan: Plan, layers: list[Layer], length: int, token: float, speed: float) -> float:
    """Say how many seconds training takes: a token takes some operations, and a second has room for `speed` of them."""
    if plan.minutes is not None:
        return 60 * plan.minutes
    share = 1 if plan.features else 0.5  # of a budget, which windows take, too
    products = sum(layer.query_heads * layer.key_dim * share * most_rows(plan, layer) for layer in layers)
    return plan.steps * plan.batch * length * (token + TRAINING_FACTOR * products) / speed


def run_memory(plan: Plan, inspection: Inspection) -> float:
    """Say how many bytes a run has in memory at once: the weights, and what the dearest of its steps takes besides."""
    layers, length = replaced_layers(inspection), plan.kept_length(inspection.max_positions)
    weights: float = bytes_in_memory(inspection, plan.dtype, plan.device)
    read = min(inspection.weight_bytes, LARGEST_FILE) if weights > inspection.weight_bytes else 0.0
    if streams(inspection, plan.dtype, plan.device):
        weights, read = min(weights, bytes_for_weights(plan.device)), 0.0
    sample = 6 * 8 * plan.kept_samples**2
    token = NUMBER * inspection.vocabulary  # the bytes of its logits
    judging = JUDGED_LOGITS * min(NUMBER * MAX_LOGITS, JUDGING.texts * length * token)
    pricing = rows = graph = 0.0
    if plan.rules.decided_by == "prices":
        pricing = PRICED_LOGITS * plan.texts_priced * length * token
    if plan.trains:
        rows = max((layer.query_heads * length * length for layer in layers), default=0) * plan.batch * NUMBER * 3
    if plan.kept_lora:  # the whole student is differentiated, and judged beside its teacher's own weights
        width = max((layer.query_heads * layer.key_dim for layer in layers), default=0)
        of_blocks = NUMBER * GRAPH_WIDTHS * width * len(inspection.layers)
        graph = plan.batch * length * (of_blocks + 2 * JUDGED_LOGITS * token)
        weights *= 2
    work = max(sample, judging, pricing, rows, graph)
    return PROCESS_BYTES + weights + max(read, work + packed_bytes(inspection)) + resume_bytes(plan, inspection)


def packed_bytes(inspection: Inspection) -> float:
    """Estimate the bytes of the largest matrix, in float32."""
    block = PACKED_SHARE * inspection.active / max(1, len(inspection.layers))
    width = max((layer.query_heads * layer.key_dim for layer in inspection.layers), default=0)
    return NUMBER * max(block, inspection.vocabulary * width)


def forecast_evaluation(run: Run, request: Request) -> EvaluationForecast:
    """Say how long the parts of an evaluation will take."""
    return EvaluationForecast(part_seconds(run, request), run.evaluation_file["made_with"].get("device"))


def part_seconds(run: Run, request: Request) -> dict[str, float]:
    """Estimate the seconds of every part that was asked for; the first part waits for a process to start."""
    if (pass_time := pass_seconds(run)) is None:
        return {}
    usual = run.plan.kept_length(run.positions)
    length = request.length or usual
    share = length / usual  # of a pass, in tokens
    passages = JUDGED_SHARE - 1 if "language" in request.chosen else JUDGED_SHARE  # both parts read a text once
    hidden = request.lengths or needle_lengths(usual, run.positions)
    passes = {
        "language": request.texts * share,
        "recall": request.texts * share * (passages + (not request.short)),
        "needle": max(1, request.texts // 2) * len(DEPTHS) * sum(hidden) / usual,
        "generation": 2 * MAX_WRITTEN_TOKENS * TOKEN_PASSES,
        "approximation": HEAD_ERROR_PASSES * min(request.texts, 2) / 2 / SUBJECTS * share**2,
    }
    if not request.short:
        passes |= {part: WITH_RIVALS * passes[part] for part in ("language", "recall")}
    seconds = {part: 1 + SUBJECTS * count * pass_time for part, count in passes.items()}
    seconds["speed"] = 3 * len(LENGTHS) / 2 * min(request.seconds, 60.0)
    samples = len(request.tasks) * (request.limit or TASK_SAMPLES)
    seconds["tasks"] = START_SECONDS + SUBJECTS * samples * CHOICES * pass_time * CHOICE_TOKENS / usual
    first = next(iter(request.chosen))
    return {part: took + START_SECONDS * (part == first) for part, took in seconds.items() if part in request.chosen}


def pass_seconds(run: Run) -> float | None:
    """Say what one text of the run's own length took, in the mean over teacher, student and window."""
    begun = None
    for event in run.events():
        if run.owns_event(event) and event["event"] == EventName.EVALUATE and begun is None:
            begun = event["time"]
        elif run.owns_event(event) and event["event"] == EventName.STARTED:
            begun = None  # what was judged before a stop is judged again
        elif run.owns_event(event) and event["event"] == EventName.EVALUATED and begun is not None:
            return max(event["time"] - begun, 0.01) / JUDGING_PASSES
    return None
