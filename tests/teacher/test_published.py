"""What inspection says of the shapes of published models is true: which layers grow, or why a model is not served."""

import pytest

from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.support import text_tower
from tests.benchmarks import families
from tests.support.published import PUBLISHED


def inspect(name):
    return inspect_model(families.SOURCE, text_tower(PUBLISHED[name].build()))


ONE_OF_EACH_KIND = {published.kind: name for name, published in PUBLISHED.items()}.values()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_published_model_is_served_or_refused_with_its_true_reason(name):
    inspection, expected = inspect(name), PUBLISHED[name].grows
    if isinstance(expected, int):
        assert inspection.supported, inspection.reason
        assert len(inspection.replaced_layers) == expected
    else:
        assert not inspection.supported and expected in inspection.reason and inspection.remedy


def test_what_a_hybrid_keeps_beside_its_budget_is_stated():
    inspection = inspect("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert inspection.recurrent_layers == 36 and 50e6 < inspection.recurrent_bytes < 100e6
    assert "12 grow with the text, 36 keep 80.2 MB that does not" in dict(inspection.describe_shape())["layers"]


def test_the_table_of_families_counts_what_inspection_serves(monkeypatch, capsys):
    few = {
        name: PUBLISHED[name] for name in ("Qwen/Qwen3-0.6B", "google/recurrentgemma-2b", "llava-hf/llava-1.5-7b-hf")
    }
    monkeypatch.setattr(families, "PUBLISHED", few)
    monkeypatch.setattr(families, "CAUSAL", ["qwen3", "bloom", "bert"])
    monkeypatch.setattr(families, "SEEING", ["llava", "mllama"])
    families.main()
    *rows, decoders, seeing = capsys.readouterr().out.splitlines()
    assert [" no: " in row for row in rows[-3:]] == [False, True, False]
    assert (decoders, seeing) == (
        "1 of 2 causal decoders are served",
        "1 of 2 kinds that read pictures or sounds are served",
    )
