"""What inspection says of the shapes of published models is true: which layers grow, or why a model is not served."""

import pytest

from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.support import TESTED, TESTED_WHOLE
from linearizer.teacher.whole_models import choose_config
from tests.benchmarks import families
from tests.support.published import PUBLISHED


def inspect(name):
    return inspect_model(families.SOURCE, choose_config(PUBLISHED[name].build(), ()))


def make_shallow(config, layers):
    """Leave the first layers of a text model or of a tower, which are like the others."""
    for name in ("num_hidden_layers", "depth"):
        if hasattr(config, name):
            setattr(config, name, layers)
    for name in {"layer_types", "mlp_layer_types"} & vars(config).keys():
        setattr(config, name, getattr(config, name)[:layers])


ONE_OF_EACH_KIND = {published.kind: name for name, published in PUBLISHED.items()}.values()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_published_model_is_served_or_refused_with_its_true_reason(name):
    config, expected = PUBLISHED[name].build(), PUBLISHED[name].grows
    text, tower = config.get_text_config(decoder=True), getattr(config, "vision_config", None)
    if expected == text.num_hidden_layers:
        make_shallow(text, expected := 4)
    if tower is not None:
        make_shallow(tower, 1)
    inspection = inspect_model(families.SOURCE, choose_config(config, ()))
    if isinstance(expected, int):
        assert inspection.supported, inspection.reason
        assert len(inspection.replaced_layers) == expected
    else:
        assert not inspection.supported and expected in inspection.reason and inspection.remedy


def test_what_a_hybrid_keeps_beside_its_budget_is_stated():
    inspection = inspect("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert inspection.recurrent_layers == 36 and 50e6 < inspection.recurrent_bytes < 100e6
    assert "12 grow with the text, 36 keep 80.2 MB that does not" in dict(inspection.describe_shape())["layers"]


def test_the_table_of_families_counts_what_inspection_serves(monkeypatch, tmp_path, capsys):
    few = ("Qwen/Qwen3-0.6B", "google/recurrentgemma-2b", "llava-hf/llava-1.5-7b-hf")
    monkeypatch.setattr(families, "PUBLISHED", {name: PUBLISHED[name] for name in few})
    monkeypatch.setattr(families, "CAUSAL", ["qwen3", "bloom", "bert"])
    monkeypatch.setattr(families, "SEEING", ["llava", "mllama"])
    for name in ("README", "RESULTS"):
        monkeypatch.setattr(families, name, tmp_path / name)
    families.README.write_text(f"begin\n{families.BEGIN}old\n{families.END}end\n")
    families.main(["--write"])
    readme, results = families.README.read_text(), families.RESULTS.read_text()
    assert readme.startswith("begin") and readme.endswith("end\n") and "old" not in readme
    assert (
        "qwen3 28/28" in readme and "| with pictures, tested on random weights | " in readme and "llava 32/32" in readme
    )
    assert "| google/recurrentgemma-2b | recurrent_gemma | – | no: its recurrent layers keep" in results
    assert "1 of 2 kinds of decoders are served" in results and "sounds are served, 1 of them with pictures" in readme
    assert results.removeprefix("# Published models\n\n") in capsys.readouterr().out


def test_the_table_in_the_readme_says_what_inspection_says():
    """The command needs minutes; each published kind is inspected above."""
    table = families.README.read_text(encoding="utf-8").partition(families.BEGIN)[2].partition(families.END)[0]
    stated = {}
    for served, kinds in (row.strip("| ").split(" | ") for row in table.splitlines()[2:] if row.startswith("| ")):
        for kind, *growth in map(str.split, kinds.split(", ")):
            stated[kind] = int(growth[0].split("/")[0]) if growth else served
    expected = {published.kind: published.grows for published in reversed(PUBLISHED.values())}
    assert expected.keys() <= stated.keys() and stated.keys() - expected.keys() <= TESTED | TESTED_WHOLE
    for kind, grows in expected.items():
        assert stated[kind] == grows if isinstance(grows, int) else grows in stated[kind], kind
