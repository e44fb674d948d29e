"""Runs of the demo model, and reads with their students, on a disk that fails at one of their calls.

python -m tests.support.disk_faults FOLDER CASES FIRST, with disk_faults.c preloaded, makes a run in the folder, then
the same again for each case, with the fault and then without, in processes forked from one that has imported all it
needs. It prints a JSON object for each.
"""

import ctypes
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from linearizer.cli.main import main
from linearizer.train.training_state import NEWEST, PREVIOUS

SOURCE = Path(__file__).with_suffix(".c")
SHIM = ctypes.CDLL(None)  # where it is preloaded
FAULTS = ("an error once", "a full disk from then on", "a kill")  # by their numbers in disk_faults.c, from 1
SMALL = ["--texts", "2", "--length", "64", "--dtype", "float32", "--recipe", "features"]
COMMAND = ["run", "demo", "--budget", "64", *SMALL, "--steps", "2"]
TEXT = "A module is a file that holds definitions. " * 4


@dataclass
class Outcome:
    """What became of a run with a fault, and of the same without it."""

    fault: str
    call: str  # that met it
    code: int  # the exit code, or the signal below 0
    said: str  # on standard error
    again: int  # the exit code without the fault
    said_again: str
    others: list  # the files that are then not as those of a run without a fault

    def check(self):
        """Check that what failed was said in a sentence, or was a kill, and that nothing is lost."""
        codes = (0, 2, -signal.SIGKILL) if self.fault == "a kill" else (0, 2)
        assert self.code in codes and "Traceback" not in self.said, self
        assert self.code != 2 or "linearizer: " in self.said, self
        assert self.again == 0 and not self.others, self


def fail_calls(folder, cases=0, first=0):
    """Yield the number of calls, then outcomes for `cases` spread over all calls, or 0: for all calls from a first."""
    library = folder / "disk_faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.support.disk_faults", str(folder), str(cases), str(first)]
    variables = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        yield json.loads(process.stdout.readline())
        for line in process.stdout:
            yield Outcome(**json.loads(line))
    assert process.returncode == 0


def serve_cases(folder, cases, first):
    """Make the run without a fault, then fork the cases."""
    disk = folder / "disk"
    (disk / "kept").mkdir(parents=True)
    with open(folder / "calls", "wb") as report:
        begin_faults(disk, report=report.fileno())
        make(disk)
        begin_faults("")
    calls, product = (folder / "calls").read_text().splitlines(), product_of(disk)
    say(len(calls))
    for number, kind in choose(calls, cases, first):
        shutil.rmtree(disk)
        (disk / "kept").mkdir(parents=True)
        code, said, call = fork(disk, number, kind)
        again, said_again, _ = fork(disk)
        others = sorted({name for name, _ in product_of(disk).items() ^ product.items()})
        say(asdict(Outcome(FAULTS[kind - 1], call, code, said, again, said_again, others)))


def choose(calls, cases, first):
    """Choose the numbers of calls, and of the faults that they meet: all, or some, among them those met in Rust."""
    kinds = range(1, 1 + len(FAULTS))
    if not cases:
        return itertools.product(range(first, len(calls)), kinds)
    numbers = [number for number, call in enumerate(calls) if not call.endswith(".py")]  # code: many that are alike
    torn = [number for number in numbers if calls[number].startswith("write") and ".tmp" in calls[number]][::2]
    rust = [(number, kinds[-1]) for number in torn]  # safetensors, and what saves a tokenizer
    rust += [
        (number, kinds[0])
        for number in numbers
        if calls[number].startswith("open64") and "/tokenizer.json" in calls[number]
    ]
    others = cases - len(rust)
    spread = [numbers[len(numbers) * case // others] for case in range(others)]
    return [*rust, *zip(spread, itertools.cycle(kinds))]


def begin_faults(folder, number=-1, kind=0, report=-1):
    """Begin to count the calls that write below a folder, and let the one of that number meet a fault."""
    SHIM.begin_faults(os.fsencode(folder), number, kind, report)


def say(value):
    print(json.dumps(value), flush=True)  # noqa: T201


def fork(folder, number=-1, kind=0):
    """Make a run in a process of its own; return its exit code, what it said on standard error, and the call named."""
    errors, call = folder.with_name("errors"), folder.with_name("call")
    if not (child := os.fork()):
        code = 1
        try:
            with open(errors, "wb") as said, open(call, "wb") as report:
                os.dup2(said.fileno(), 2)
                torch.set_num_threads(1)  # before threads do: they would all make a pool in place of the parent's
                begin_faults(folder, number, kind, report.fileno())
                code = make(folder)
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, errors.read_text(errors="replace"), call.read_text().strip()


def make(folder):
    """Make a run, or go on with it, and let its student read a text; return the exit code."""
    run, text, state = folder / "run", folder.with_name("text.txt"), folder / "kept" / "text.state"
    text.write_text(TEXT)
    again = ["--resume"] if (run / "plan.json").exists() else []
    with open(os.devnull, "w") as sys.stdout:
        code = main([*COMMAND, "--out", str(run), *again])
        if code == 0 and not state.exists():
            code = main(["read", str(run), str(text), "--state", str(state)])
    sys.stdout = sys.__stdout__
    return code


def product_of(folder):
    """List the files of a run and its state, with hashes of those that decide what a student answers.

    A training has its state under one of two names, and under both where it was saved twice.
    """
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)).replace(PREVIOUS, NEWEST): hash_of(path) for path in files}


def hash_of(path):
    """Hash a file that decides what a student answers; the header of a state has its facts in any order."""
    if path.suffix == ".state":
        return safe_open(path, "pt").metadata()["checksum"]
    decides = path.suffix == ".safetensors" or path.name in ("allocation.json", "profile.json")
    decides &= path.name not in (NEWEST, PREVIOUS)  # a training that is resumed after its end is saved with other facts
    return hashlib.sha256(path.read_bytes()).hexdigest() if decides else ""


if __name__ == "__main__":
    serve_cases(Path(sys.argv[1]), *map(int, sys.argv[2:]))
