"""What is not served is refused in a sentence that says what to do."""

from pathlib import Path

import pytest

from linearizer.vllm_plugin.refusals import student_problem, version_problem

HEADS = {"heads": [{"window": 8}, {"window": 4, "slots": 6, "block": 2}]}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32"])
def test_a_version_that_was_tested_is_served(version):
    assert version_problem(version) == ""


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0"])
def test_another_version_is_named_beside_one_that_works(version):
    problem = version_problem(version)
    assert version in problem and "install vLLM 0.32" in problem


def test_students_that_grow_or_need_vllms_layers_are_refused_and_others_are_not():
    assert student_problem([HEADS, HEADS]) == student_problem([HEADS, None]) == ""
    assert "layer 1 " in student_problem([HEADS, None], vllms_layers=False)
    assert "layer 1 " in student_problem([HEADS, {"reads": 0, "heads": []}])
    assert "--may-grow" in student_problem([HEADS, {"heads": [{"window": 8}, {"softmax": True, "bits": 8}]}])


def test_readme_shows_the_sessions_that_a_command_prints():
    from tests.benchmarks.vllm_sessions import rows

    readme = Path("README.md").read_text(encoding="utf-8")
    for row in rows(24e9, 32_768, [256, 1024]):
        assert "| " + " | ".join(row) + " |" in readme
