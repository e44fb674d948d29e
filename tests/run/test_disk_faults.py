"""A run survives each call to the disk that fails; `python -m tests.benchmarks.abuse --disk` fails all of them."""

import pytest

from tests.support.disk_faults import ERRORS, fail_and_resume, run_whole

SHARES = (0.02, 0.2, 0.4, 0.6, 0.8, 0.98)  # of the calls, from the first to the last


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_whole(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("share", SHARES)
def test_a_call_that_fails_is_said_in_a_sentence_and_the_run_resumes_to_the_same_bits(share, whole, tmp_path, capsys):
    product, calls = whole
    code, again = fail_and_resume(tmp_path / "run", int(share * len(calls)), ERRORS[int(100 * share) % 2])
    said = capsys.readouterr().err
    assert code in (0, 2) and "Traceback" not in said
    assert code == 0 or "linearizer: " in said
    assert again == product
