"""Lets several processes work on a run together: those of a launcher, or one for each GPU of this machine.

  accelerate launch --multi_gpu -m linearizer run MODEL …     or: torchrun --nproc-per-node 2 -m linearizer run MODEL …

Ranks of several machines share the folder of the run. Without a launcher, the process of a run starts the others by
torch.multiprocessing, which ends them with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from linearizer.errors import LinearizerError, RankEnded
from linearizer.progress import quiet
from linearizer.run.folder import Run
from linearizer.run.stopping import log_end, memory_explained
from linearizer.teacher.devices import choose_device, device_name, visible_name

if TYPE_CHECKING:
    from linearizer.teacher.ranks import Ranks

MEETING = timedelta(minutes=10)  # that a started process has to begin: it may have died
LAUNCH_ENDED = "a process of the launch has ended, or the launcher was told to stop: resume the run"


def launched(variable: str = "RANK") -> int:
    """Return a number that a launcher has given to this process; 0 without a launcher."""
    return int(os.environ[variable]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def devices_of(run: Run) -> list[str]:
    """Name the devices of this machine that a run works on, its own first: several only if it makes a student."""
    device, count = choose_device(run.plan.device), launched("LOCAL_WORLD_SIZE")
    if device != "cuda" or run.task is not None or run.checkpoint.is_dir():
        return [device_name(device)]
    import torch

    return [device_name(f"cuda:{index}") for index in range(count or torch.cuda.device_count())]


def devices_to_hold(run: Run) -> list[str]:
    """Name the devices that a run waits for: those that it works on, or all if only all hold the model."""
    if run.is_encoder_run:
        return [device_name(choose_device(run.encoder_plan.device))]
    plan = run.plan
    if choose_device(plan.device) == "cuda":
        from linearizer.teacher.streaming import rooms_for_weights, spreads

        if spreads(run.inspection, plan.dtype, plan.device):
            return [device_name(device) for device in rooms_for_weights(plan.device)]
    return devices_of(run)


@contextmanager
def ranks_for(run: Run, token: str | None = None) -> Iterator[Ranks]:
    """Meet the ranks that work on a run, of which this process is the first; start them without a launcher."""
    from linearizer.teacher.ranks import ALONE, connect

    if count := launched("WORLD_SIZE"):
        with log_end(run):
            ranks = connect(0, count)
            ranks.hear((str(run.folder.resolve()), token))
        yield ranks
        dismiss(ranks)
    elif not run.is_encoder_run and (count := len(devices_of(run))) > 1:
        with started(run, count, token) as ranks:
            yield ranks
    else:
        yield ALONE


@contextmanager
def started(run: Run, count: int, token: str | None = None) -> Iterator[Ranks]:
    """Start the other ranks of a run; they end with this context, or with this process."""
    from torch.distributed import destroy_process_group
    from torch.multiprocessing import start_processes

    from linearizer.teacher.ranks import connect

    with TemporaryDirectory() as folder:
        place = f"file://{folder}/ranks"
        others = start_processes(begin_rank, (place, count), nprocs=count - 1, join=False, daemon=True)
        try:
            with log_end(run):
                ranks = connect(0, count, place, MEETING)
                ranks.hear((str(run.folder.resolve()), token))
            yield ranks
            dismiss(ranks)
        finally:
            for process in others.processes:
                process.kill()
                process.join()
            destroy_process_group()


def dismiss(ranks: Ranks) -> None:
    """Let the other ranks end, as far as they still live: nothing is asked of them any more."""
    with suppress(RankEnded):
        ranks.hear()


def begin_rank(index: int, place: str, count: int) -> None:
    """Work as another rank, in a process that was just started, or that a launcher has started."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_name(index + 1)  # before CUDA begins
    sys.exit(follow(index + 1, count, place))


def follow(number: int, count: int, place: str = "env://") -> int:
    """Do the share of a rank other than the first, and return an exit code; on failure say why on standard error."""
    from linearizer import pipeline
    from linearizer.teacher.ranks import connect

    try:
        ranks = connect(number, count, place)
        folder, token = ranks.hear()
        with quiet(), memory_explained():
            pipeline.follow(Run(Path(folder)), ranks, token)
    except RankEnded:  # which says itself why
        return RankEnded.exit_code
    except LinearizerError as error:
        sys.stderr.write(f"linearizer: rank {number} works no more: {error}\n")
        return error.exit_code
    return 0


def follow_launched() -> int:
    """Work as another rank of a launcher."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_name(launched("LOCAL_RANK"))
    return follow(launched(), launched("WORLD_SIZE"))
