"""A student and a window of its bytes are judged on what follows a long text, beside presses where these can run."""

import re

from tests.benchmarks import presses

SMALL = "--model demo --texts builtin --budget 16 --length 128 --following 16 --count 2 --run texts=2 length=64".split()


def test_student_and_window_are_judged_and_the_farther_of_them_stands_first(tmp_path, capsys):
    presses.main([str(tmp_path / "run"), *SMALL, "--work", str(tmp_path), "--out", str(tmp_path / "table.md")])
    table = capsys.readouterr().out
    assert "2 documents; a budget of 16 tokens" in table
    rows = re.findall(r"^(student|window) +([\d.]+) ", table, re.MULTILINE)
    kls = [float(kl) for _, kl in rows]
    assert {name for name, _ in rows} == {"student", "window"} and kls == sorted(kls, reverse=True) and kls[-1] > 0
    assert (tmp_path / "table.md").read_text() == table.rstrip("\n") + "\n"
