"""Damaged files of a run and hostile bodies of requests, as many as one likes: python -m tests.benchmarks.abuse.

With --disk, each call of a run to the disk fails once, and the run is resumed (twenty minutes). The first example that
ends in anything but one sentence ends the benchmark, as small as Hypothesis finds it.
"""

import argparse
import io
import shutil
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linearizer.run.folder import Run
from tests.support.abuse import BODIES, damaged, look_at, read_hostile_body
from tests.support.disk_faults import ERRORS, fail_and_resume, run_whole

EXAMPLE = Path(__file__).parents[2] / "assets" / "example-run"
FILES = sorted(path.name for path in EXAMPLE.glob("*.json*"))
ALL_KINDS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: %(default)g)")
    parser.add_argument("--at-once", type=int, default=500, help="examples between two lines (default: %(default)s)")
    parser.add_argument("--disk", action="store_true")
    arguments = parser.parse_args(arguments)
    if arguments.disk:
        return fail_every_call()
    last, many, drawn = (
        time.monotonic() + 60 * arguments.minutes,
        settings(ALL_KINDS, max_examples=arguments.at_once),
        0,
    )
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < last:
            damage_files(many, Path(folder) / "run")
            send_bodies(many)
            drawn += arguments.at_once
            print(f"{drawn} files and {drawn} bodies", flush=True)


def damage_files(how, folder):
    """Damage a file of the example, look at the run, and repair it."""
    run = Run(shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True))

    @how
    @given(data=st.data(), name=st.sampled_from(FILES))
    def damage(data, name):
        (run.folder / name).write_bytes(data.draw(damaged((EXAMPLE / name).read_bytes())))
        try:
            look_at(run)
        finally:
            shutil.copyfile(EXAMPLE / name, run.folder / name)

    damage()


def send_bodies(how):
    """Read hostile bodies as requests."""
    how(given(content=BODIES)(read_hostile_body))()


def fail_every_call():
    """Let each call of a run to the disk fail, and count which are survived by a sentence, and which go unnoticed."""
    survived = Counter()
    with tempfile.TemporaryDirectory() as folder:
        product, calls = run_whole(Path(folder) / "whole")
        for number, call in enumerate(calls):
            errors = io.StringIO()
            with redirect_stderr(errors), redirect_stdout(io.StringIO()):
                code, again = fail_and_resume(Path(folder) / "run", number, ERRORS[number % 2])
            if code not in (0, 2) or "Traceback" in errors.getvalue() or again != product:
                raise SystemExit(f"{call}: code {code}, the same bits: {again == product}\n{errors.getvalue()}")
            survived["said" if code else "unnoticed"] += 1
            shutil.rmtree(Path(folder) / "run")
    print(f"{len(calls)} calls: {dict(survived)}", flush=True)


if __name__ == "__main__":
    main()
