"""Damaged files of a run and hostile bodies of requests for as long as one likes: python -m tests.benchmarks.abuse.

With --disk, each call that a run makes to the disk fails once, and the run is resumed (twenty minutes).
Says how many of each kind were drawn; the first that ends in anything but a sentence ends it, as small as Hypothesis
finds it.
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
AT_ONCE = 500  # examples between two looks at the clock


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: %(default)g)")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=argparse.SUPPRESS)
    parser.add_argument("--disk", action="store_true")
    arguments = parser.parse_args(arguments)
    if arguments.disk:
        return fail_every_call()
    last, drawn = time.monotonic() + 60 * arguments.minutes, Counter()
    many = settings(
        max_examples=arguments.at_once, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(shutil.copytree(EXAMPLE, Path(folder) / "run"))
        while time.monotonic() < last:
            damage_files(run, many, drawn)
            many(given(content=BODIES)(lambda content: count(drawn, "bodies", read_hostile_body, content)))()
            print(", ".join(f"{number} {kind}" for kind, number in sorted(drawn.items())), flush=True)
    return drawn


def fail_every_call():
    """Let each call of a run to the disk fail, and say which are survived in another way than by a sentence."""
    survived = Counter()
    with tempfile.TemporaryDirectory() as folder:
        product, calls = run_whole(Path(folder) / "whole")
        for number, call in enumerate(calls):
            said = io.StringIO()
            with redirect_stderr(said), redirect_stdout(io.StringIO()):
                code, again = fail_and_resume(Path(folder) / "run", number, ERRORS[number % 2])
            if code not in (0, 2) or "Traceback" in said.getvalue() or again != product:
                raise SystemExit(f"{call}: code {code}, the same bits: {again == product}\n{said.getvalue()}")
            survived["said" if code else "of no matter"] += 1
            shutil.rmtree(Path(folder) / "run")
    print(f"{len(calls)} calls: {dict(survived)}", flush=True)
    return survived


def damage_files(run, many, drawn):
    """Damage a file of the example, look at the run, and repair it."""
    names = sorted(path.name for path in EXAMPLE.glob("*.json*"))

    @many
    @given(data=st.data(), name=st.sampled_from(names))
    def damage(data, name):
        whole = (EXAMPLE / name).read_bytes()
        (run.folder / name).write_bytes(data.draw(damaged(whole)))
        try:
            count(drawn, name, look_at, run)
        finally:
            (run.folder / name).write_bytes(whole)

    damage()


def count(drawn, kind, look, what):
    look(what)
    drawn[kind] += 1


if __name__ == "__main__":
    main()
