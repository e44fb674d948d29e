"""A run survives any call that the disk fails or a kill ends; `python -m tests.benchmarks.abuse --disk` tries all."""

import shutil

import pytest

from tests.support.disk_faults import fail_calls

CASES = 5  # spread over all calls, each fault in turn


@pytest.mark.skipif(not shutil.which("cc"), reason="the faults are preloaded, and written in C")
def test_a_call_that_fails_is_said_in_a_sentence_and_the_run_resumes_to_the_same_bits(tmp_path):
    calls, *outcomes = fail_calls(tmp_path, CASES)
    assert calls > 100 and len(outcomes) == CASES and all(outcome.call for outcome in outcomes)
    for outcome in outcomes:
        outcome.check()
