"""The paper's tables hold every choice, every loss and the baselines, and what is measured is kept."""

import json
import re

import pytest

from tests.benchmarks import paper, paper_table


def test_the_command_measures_each_cell_once_and_writes_every_table(tmp_path, capsys, monkeypatch):
    for name, few in {"JUDGED": 2, "SHARES": (1,), "WRITTEN": 4}.items():
        monkeypatch.setattr(paper, name, few)
    out = tmp_path / "paper-gpt2"
    command = "--steps 1 --seeds 0 --length 64 --texts 2 --batch 2 --losses softmax".split()
    command += ["--out", str(out), "--work", str(tmp_path / "work")]
    paper.main(command)
    cells, text = json.loads(out.with_suffix(".json").read_text()), capsys.readouterr().out
    assert len([name for name in cells if name.count("/") == 3]) == 3 + len(paper.BASELINES)
    fixed, clipped = cells["freedoms"]["chosen"]["fix"], cells["freedoms"]["chosen"]["dof+clip"]
    assert set(fixed) == {cells["facts"]["features"]} == {max(clipped)}
    assert cells["teacher"]["loss"] < min(cells[f"{row}/softmax/1/0"]["loss"] for row in paper.CHOICES)
    assert "(5.4082 printed)" in text, "GPT-2's figures stand beside those of a model of its name"
    paper.main(command)
    assert not re.search(r"^fix/", capsys.readouterr().out, re.MULTILINE), "nothing is measured again"
    with pytest.raises(SystemExit, match="ask for the same"):
        paper.main([*command, "--features", "16"])


def test_the_order_of_choices_is_that_of_their_losses_and_the_gain_is_paired_by_seed():
    losses = {"fix": (5.0, 7.0), "dof": (4.0, 6.0), "dof+clip": (6.0, 8.0)}
    cells = {f"{row}/l2/9/{seed}": {"loss": loss} for row, of in losses.items() for seed, loss in enumerate(of)}
    assert "| 9 | l2 | DoF < Fix < DoF + clip | 1.0000 ± 0.0000 |" in paper_table.of_order(cells, {})
