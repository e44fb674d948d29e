"""Whatever a disk or a hand did to the files of a run, and whatever a client sends: one sentence, no traceback.

`python -m tests.benchmarks.abuse --minutes 60` draws more of the same.
"""

from hypothesis import settings

from tests.benchmarks.abuse import ALL_KINDS, damage_files, send_bodies

FEW = settings(ALL_KINDS, max_examples=60, derandomize=True)


def test_a_damaged_file_of_a_run_is_refused_in_a_sentence(tmp_path):
    damage_files(FEW, tmp_path / "run")


def test_a_hostile_body_is_a_request_or_refused_in_a_sentence():
    send_bodies(FEW)
