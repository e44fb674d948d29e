"""The rate through HTTP is measured for student and teacher."""

import json

from tests.benchmarks.http_rate import main


def test_student_and_teacher_are_served_and_timed(quick_run, tmp_path):
    main(f"--run {quick_run} --clients 1 2 --read 20 --write 2 --out {tmp_path / 'rate.json'}".split())
    found = json.loads((tmp_path / "rate.json").read_text(encoding="utf-8"))
    assert found["student by teacher"].keys() == {"1", "2"}
    assert all(rate > 0 for rates in found["tokens/s by clients"].values() for rate in rates.values())
