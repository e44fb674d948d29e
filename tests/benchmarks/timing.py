"""How the kernels' benchmark times calls, on whatever device there is."""

import re
import statistics
import time
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


def seconds(calls, least=50, graph=False):
    """Median time of a call; `calls` take turns, so that their inputs do not stay in the caches of a GPU."""
    for call in calls:
        start = time.perf_counter()
        call()
    if not GPU:
        least = min(least, max(3, int(3 / (time.perf_counter() - start))))  # of what is slow, as many as take 3 s
        times = []
        for index in range(least):
            start = time.perf_counter()
            calls[index % len(calls)]()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    if graph:
        calls = [captured(call) for call in calls]
    times = []
    for index in range(least):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def captured(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    return recorded.replay


def peak_bytes(call):
    """Memory that a call takes at most, above what there was."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def attempt(name, make, **kwargs):
    """Time a rival, or say why it cannot be timed here."""
    try:
        calls = make()
        return {"seconds": seconds(calls, **kwargs), "bytes": peak_bytes(calls[0])}
    except Exception as error:  # Triton's own are no RuntimeError, and no rival is worth the table
        return {"failed": f"{name}: {type(error).__name__}: {str(error)[:200]}"}


def own(calls, parts=1, **kwargs):
    """What a row says of ours: the time of one of the parts of a call, and memory; or why there is none."""
    result = attempt("ours", lambda: calls, **kwargs)
    return {"ours": result["seconds"] / parts, "bytes": result["bytes"]} if "seconds" in result else {"ours": result}


def compiled(function, **how):
    """Compile for these sizes alone: after others they would be variable, and after eight nothing is compiled."""
    torch.compiler.reset()
    return torch.compile(function, **how)


def ceilings():
    """What this machine reaches: bytes copied and operations of a product, per second."""
    size = 2**29 if GPU else 2**25
    x, n = torch.empty(size, dtype=torch.uint8, device=DEVICE), 8192 if GPU else 1024
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    return {"copy": 2 * size / seconds([x.clone]), "product": 2 * n**3 / seconds([lambda: a @ a])}


def draw(*shape, seed=0, dtype=DTYPE):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def peak_so_far():
    """The most memory that this process has had; what getrusage says includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
