"""Damaged files and hostile commands, requests and calls, as many as one likes: python -m tests.benchmarks.abuse.

With --disk, each call of a run to the disk meets an error, a full disk and a kill, and the run is resumed: an hour, or
what is left of it from the call of a number on.

The first example that ends in anything but one sentence ends the benchmark, as small as Hypothesis finds it.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linearizer.cli.main import main as serve
from linearizer.run.folder import Run
from tests.support import abuse
from tests.support.disk_faults import COMMAND, FAULTS, fail_calls

ASSETS = Path(__file__).parents[2] / "assets"
EXAMPLE, DEMO = ASSETS / "example-run", ASSETS / "demo-model"
ALL_KINDS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: %(default)g)")
    parser.add_argument("--at-once", type=int, default=500, help="examples between two lines (default: %(default)s)")
    parser.add_argument(
        "--disk", type=int, nargs="?", const=0, metavar="CALL", help="let calls to the disk fail, from CALL"
    )
    arguments = parser.parse_args(arguments)
    if arguments.disk is not None:
        return fail_every_call(arguments.disk)
    last, many = time.monotonic() + 60 * arguments.minutes, settings(ALL_KINDS, max_examples=arguments.at_once)
    drawn = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LINEARIZER_RUNS"] = f"{folder}/runs"
        serve([*COMMAND, "--out", f"{folder}/made"])
        while time.monotonic() < last:
            for kind, draw in KINDS.items():
                draw(many, Path(folder) / kind.replace(" ", "-"), Path(folder) / "made")
                drawn[kind] += arguments.at_once
            print(dict(drawn), flush=True)


def damage_run(how, folder, made):
    """Damage a file of the example, and look at the run."""
    damage_files(how, folder, EXAMPLE, lambda: abuse.look_at(Run(folder)))


def damage_teacher(how, folder, made):
    """Damage a file of the demo model, and load its tokenizer."""
    damage_files(how, folder, DEMO, lambda: abuse.read_tokenizer(folder))


def damage_student(how, folder, made):
    """Damage a file of a checkpoint, and let it answer: as before, or not at all."""
    expected = abuse.answer(made)

    def ask():
        answer = abuse.answer(folder)
        assert answer is None or abuse.same(answer, expected)

    damage_files(how, folder, made, ask, "checkpoint/")


def damage_files(how, folder, original, look, within=""):
    """Damage a file of a copy of a folder, look at it, and repair it."""
    shutil.copytree(original, folder, dirs_exist_ok=True)
    names = sorted(str(path.relative_to(original)) for path in (original / within).glob("*.json*"))

    @how
    @given(data=st.data(), name=st.sampled_from(names))
    def damage(data, name):
        (folder / name).write_bytes(data.draw(abuse.damaged((original / name).read_bytes())))
        try:
            look()
        finally:
            shutil.copyfile(original / name, folder / name)

    damage()


def give_commands(how, folder, made):
    """Give commands odd words, a copy of the example among them, in an empty folder."""
    shutil.copytree(EXAMPLE, folder / "run", dirs_exist_ok=True)
    (empty := folder / "empty").mkdir(exist_ok=True)
    how(given(words=abuse.commands())(lambda words: abuse.give_words(words, folder / "run", empty)))()


def send_bodies(how, folder, made):
    """Read hostile bodies as requests."""
    how(given(content=abuse.BODIES)(abuse.read_hostile_body))()


def call_page(how, folder, made):
    """Call the endpoints of the page, whose only run is a copy of the example."""
    shutil.copytree(EXAMPLE, Path(os.environ["LINEARIZER_RUNS"]) / "run", dirs_exist_ok=True)
    how(given(call=abuse.page_calls())(abuse.call_page))()


KINDS = {
    "files of a run": damage_run,
    "files of a teacher": damage_teacher,
    "files of a student": damage_student,
    "commands": give_commands,
    "bodies": send_bodies,
    "calls of the page": call_page,
}


def fail_every_call(first):
    """Let each call of a run to the disk meet each fault, and count which are said, which kill, which go unnoticed."""
    survived = Counter()
    with tempfile.TemporaryDirectory() as folder:
        calls = next(outcomes := fail_calls(Path(folder), first=first))
        for outcome in outcomes:
            outcome.check()
            survived[outcome.fault, outcome.code] += 1
            if survived.total() % (10 * len(FAULTS)) == 0:
                done = first + survived.total() // len(FAULTS)
                print(
                    f"{done} of {calls} calls; what became of them, by fault and exit code: {dict(survived)}",
                    flush=True,
                )
    print(f"all calls from {first} to {calls}: {dict(survived)}", flush=True)


if __name__ == "__main__":
    main()
