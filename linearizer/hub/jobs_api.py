"""Jobs and buckets of the Hub, through the Hub's own client: hardware, files of a bucket, a job and its log.

All requests use the token of the account that pays. Errors become a sentence: what failed, why, what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from linearizer.errors import RequestError
from linearizer.hub.errors import HUB_ERRORS, Use, describe_error, sign_in_advice
from linearizer.hub.models import access_token
from linearizer.hub.repository import organisations_of, without_bars

BUCKET = "linearizer-runs"  # name of each account's private bucket
LABEL = "linearizer-run"  # of a job: the id of its run
HOURS = {"second": 3600, "minute": 60, "hour": 1}  # units in an hour
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
ENDED = ("COMPLETED", "ERROR", "CANCELED", "DELETED")  # stages of a job
NOTHING_BEGUN = "nothing was begun, and nothing is charged"
TROUBLE = (*HUB_ERRORS, OSError)  # errors that a call may raise
JOBS = Use(
    "used",
    remedies={
        402: f"the account has no credit for it ({{detail}}): add some at {constants.ENDPOINT}/settings/billing",
        403: "the token in use may not do that ({detail}): sign in again and allow jobs, or use a token with the "
        f"permission to run jobs and to write, from {constants.ENDPOINT}/settings/tokens",
    },
)


@dataclass(frozen=True)
class Hardware:
    """A machine for jobs, and its price."""

    name: str
    title: str
    memory: str
    disk: str
    gpu: str  # empty: none
    usd_per_hour: float
    gpus: int = 0
    gpu_memory: str = ""  # of each GPU

    @property
    def disk_bytes(self) -> float:
        """The bytes of its disk; 0: unknown."""
        return parse_bytes(self.disk)

    @property
    def memory_bytes(self) -> float:
        """The bytes of the memory for weights: of all its GPUs, if it has any; 0: unknown."""
        return self.gpus * parse_bytes(self.gpu_memory) if self.gpus else parse_bytes(self.memory)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that a plan may name."""
        numbered = [f"cuda:{number}" for number in range(self.gpus)]
        return "auto", "cpu", *["cuda"] * bool(self.gpus), *numbered

    @property
    def in_words(self) -> str:
        parts = (self.title, f"${self.usd_per_hour:.2f} an hour", self.gpu, f"{self.memory} memory")
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Job:
    """A job on the Hub."""

    id: str
    url: str
    stage: str
    message: str

    @property
    def ended(self) -> bool:
        return self.stage in ENDED


def list_hardware(token: str | None = None) -> tuple[Hardware, ...]:
    """List the machines for jobs, with their current prices, the cheapest first."""
    with explain_job_errors("the hardware of jobs"):
        machines = HfApi(token=access_token(token)).list_jobs_hardware()
    return tuple(sorted(map(read_hardware, machines), key=lambda hardware: hardware.usd_per_hour))


def read_hardware(machine: Any) -> Hardware:
    """Read the hardware from the Hub's answer; refuse an unknown unit, which may mean any price."""
    if machine.unit_label not in HOURS:
        raise RequestError(
            f"the Hub states the price of {machine.name!r} per {machine.unit_label!r}, which is not one of "
            f"{', '.join(HOURS)}: look for a newer Linearizer; {NOTHING_BEGUN}"
        )
    price, disk = machine.unit_cost_usd * HOURS[machine.unit_label], getattr(machine, "ephemeral_storage", "")
    hardware = partial(Hardware, machine.name, machine.pretty_name, machine.ram, disk)
    if (gpu := machine.accelerator) is None:
        return hardware("", price)
    return hardware(f"{gpu.quantity} {gpu.model} with {gpu.vram}", price, int(gpu.quantity), gpu.vram)


def parse_bytes(text: str) -> float:
    """Read an amount such as '24 GB'; 0: there is none."""
    stated = re.fullmatch(r"([\d.]+)\s*([KMGT]B)", text.strip().upper())
    return float(stated[1]) * UNITS[stated[2]] if stated else 0.0


class Account:
    """The jobs and the bucket of an account, or of an organisation that pays for a member."""

    def __init__(self, token: str | None, owner: str | None = None) -> None:
        self.token = str(access_token(token) or "")
        if not self.token:
            raise RequestError(f"nobody is signed in, so no job can be begun: {sign_in_advice()}")
        self.api = HfApi(token=self.token)
        with explain_job_errors("the Hub"):
            signed_in = self.api.whoami()
        me, organisations = signed_in["name"], organisations_of(signed_in)
        self.name: str = owner or me
        if self.name not in (me, *organisations):
            allowed = f" or one of its organisations ({', '.join(organisations)})" if organisations else ""
            raise RequestError(
                f"jobs of {self.name!r} cannot be used, {me!r} is signed in: name {me!r}{allowed}, or sign in as "
                f"{self.name!r} or a member who may write; {NOTHING_BEGUN}"
            )
        self.bucket = f"{self.name}/{BUCKET}"

    def make_bucket(self) -> None:
        """Make the bucket unless it exists, and refuse a public one."""
        with explain_job_errors(f"the bucket {self.bucket!r}"):
            self.api.create_bucket(self.bucket, private=True, exist_ok=True)
            if not self.api.bucket_info(self.bucket).private:
                raise RequestError(
                    f"the bucket {self.bucket!r} is public, and runs are only sent to a private one: make it private "
                    f"at {constants.ENDPOINT}/buckets/{self.bucket}; {NOTHING_BEGUN}"
                )

    def list_files(self, prefix: str) -> list[str]:
        """List the files below a prefix by their paths in the bucket."""
        tree = self.api.list_bucket_tree(self.bucket, prefix=prefix, recursive=True)
        return [entry.path for entry in tree if entry.type == "file" and entry.path.startswith(prefix + "/")]

    def send(self, files: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Write files by their paths in the bucket, and remove others, in one request."""
        with without_bars():
            add: list[tuple[str | Path | bytes, str]] = [(content, path) for path, content in files.items()]
            self.api.batch_bucket_files(self.bucket, add=add, delete=list(removed))

    def send_folder(self, folder: Path, prefix: str, exclude: Sequence[str], include: Sequence[str] = ()) -> None:
        """Make the bucket below a prefix equal to a folder; or only write the files that `include` names."""
        place, only = f"hf://buckets/{self.bucket}/{prefix}", [*include]
        self.api.sync_bucket(str(folder), place, delete=not only, exclude=[*exclude], include=only, quiet=True)

    def fetch_folder(self, prefix: str, folder: Path, exclude: Sequence[str] = (), include: Sequence[str] = ()) -> None:
        """Download changed files below a prefix of the bucket, perhaps only those that `include` names."""
        place = f"hf://buckets/{self.bucket}/{prefix}"
        self.api.sync_bucket(place, str(folder), exclude=[*exclude], include=[*include], quiet=True)

    def begin_job(self, image: str, command: list[str], flavor: str, minutes: int, run_id: str) -> Job:
        """Begin a job that the account pays for; the token is a secret of the job."""
        environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if constants.ENDPOINT != "https://huggingface.co":
            environment["HF_ENDPOINT"] = constants.ENDPOINT
        with explain_job_errors(f"a job on {flavor}"):
            return described(
                self.api.run_job(
                    image=image,
                    command=command,
                    env=environment,
                    secrets={"HF_TOKEN": self.token},
                    flavor=flavor,
                    timeout=60 * minutes,
                    labels={LABEL: run_id},
                    namespace=self.name,
                )  # fmt: skip
            )

    def find_job(self, job_id: str) -> Job:
        return described(self.api.inspect_job(job_id=job_id, namespace=self.name))

    def find_live_job(self, run_id: str) -> Job | None:
        """Find a job of a run that has not ended, even if its start was not logged because of a crash."""
        jobs = (job for job in self.api.list_jobs(namespace=self.name) if (job.labels or {}).get(LABEL) == run_id)
        return next((job for job in map(described, jobs) if not job.ended), None)

    def cancel_job(self, job_id: str) -> None:
        self.api.cancel_job(job_id=job_id, namespace=self.name)

    def read_log(self, job_id: str) -> Iterable[str]:
        """Return the lines of a job's log."""
        return self.api.fetch_job_logs(job_id=job_id, namespace=self.name)


def described(info: Any) -> Job:
    """Read the job from the Hub's answer."""
    stage = getattr(info.status.stage, "value", info.status.stage)
    return Job(info.id, info.url, str(stage), info.status.message or "")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an answer of the Hub; None: there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


@contextmanager
def explain_job_errors(subject: str, note: str = NOTHING_BEGUN) -> Iterator[None]:
    """Turn an error of the Hub into a sentence."""
    try:
        yield
    except TROUBLE as error:
        raise describe_error(subject, error, JOBS, note) from error
