"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.compiling import CASES  # noqa: E402

SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}  # KiB that one block of threads may have

MERGING = ("merge_text", "prepare_token")
WITHOUT_PRODUCTS = ("scan_segments", "stabilise", "join_parts", "lay_columns")  # the last of 16 bits alone


def say_what_compiles(option, folder):
    """Ask a process of its own, because kernels are interpreted in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.compiling", option],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """What all launches would compile, with what is known of it."""
    return say_what_compiles("--prepare", tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def reports(launches, tmp_path_factory):
    """What all kernels take: those that changed are compiled."""
    known = all("registers" in row for row in launches if row["size"] != "texts")
    return launches if known else say_what_compiles("--all", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("chip, size", CASES)
def test_triton_prepares_every_launch(chip, size, launches):
    assert len({row["kernel"] for row in launches if (row["chip"], row["size"]) == (chip, size)}) == 18


def test_texts_of_all_sizes_share_their_kernels(launches):
    counted = Counter(row["kernel"] for row in launches if row["size"] == "texts")
    of_models = 3  # whose heads or sinks are one, or neither
    assert counted.pop("text_features_kernel") == 2  # of two alignments
    assert counted == dict.fromkeys(("lay_columns", "merge_text", "attend_periods"), of_models)


@pytest.mark.parametrize("chip, size", CASES)
def test_kernels_fit(chip, size, reports):
    # bytes, of all copies of a loop, and on AMD what functions that are called keep for their callers
    spilled = 768 if size.startswith("256") else 960 if chip == "gfx942" else 64
    merging = spilled + 512  # what is kept from block to block: on an H200 a form that spilled less took longer
    rows = [row for row in reports if (row["chip"], row["size"]) == (chip, size)]
    assert rows
    for row in rows:
        assert row["spilled"] <= (merging if row["kernel"] in MERGING else spilled), row
        assert row["shared"] <= SHARED[chip] * 1024, row
        assert row["tensor_cores"] or row["kernel"] in WITHOUT_PRODUCTS, row
