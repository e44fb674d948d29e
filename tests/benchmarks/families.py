"""Which published models are served: python -m tests.benchmarks.families --write. Nothing is downloaded.

Writes results/families.md, a line for each published model: its kind, how many of its layers grow with the text, and
how it is served or why not; and the table of kinds in README.md. The counts are of all kinds of transformers, each with
a published config where one is listed here, else with its default, which for some is incomplete and cannot be built.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.plan.inspection import Inspection
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.support import ENCODER, TESTED, TESTED_WHOLE
from linearizer.teacher.whole_models import choose_config
from tests.support.published import PUBLISHED

SOURCE = Source("published", None, "org/published", "c0ffee", False, Weights((), 1, 2), {})
NO_DECODER = (ENCODER, "it is an encoder–decoder")
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SEEING = {
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
}
TEXT_TESTED, COMPARED = "as text, tested on random weights", "as text, compared with its teacher in each run"
TOWER = "as text, by the text tower alone"
SEES_TESTED, SEES = "with pictures, tested on random weights", "with pictures, compared with its teacher on text"
README, RESULTS = Path("README.md"), Path("tests/benchmarks/results/families.md")
BEGIN, END = "<!-- python -m tests.benchmarks.families -->\n", "<!-- end of families -->\n"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS} and the table in {README}")
    write = parser.parse_args(arguments).write
    found = {name: inspect_model(SOURCE, choose_config(published.build(), ())) for name, published in PUBLISHED.items()}
    served = {PUBLISHED[name].kind: each for name, each in found.items() if each.supported}
    decoders = [each for each in inspect_kinds(CAUSAL, served) if not (each.reason or "").startswith(NO_DECODER)]
    seeing = inspect_kinds(SEEING, served)
    counts = [count("kinds of decoders", decoders), count("kinds that read pictures or sounds", seeing)]
    lines, kinds = "\n".join([*list_models(found), "", *counts]), "\n".join([*group_kinds(found), "", *counts])
    if write:
        RESULTS.write_text(f"# Published models\n\n{lines}\n", encoding="utf-8")
        before, rest = README.read_text(encoding="utf-8").split(BEGIN)
        README.write_text(f"{before}{BEGIN}{kinds}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(f"{lines}\n\n{kinds}")


def list_models(found: Mapping[str, Inspection]) -> list[str]:
    """List the published models in a table, a line each."""
    rows = ["| published model | kind | layers that grow | served |", "|---|---|--:|---|"]
    for name, inspection in found.items():
        grows = growth(inspection) if inspection.supported else "–"
        rows.append(f"| {name} | {PUBLISHED[name].kind} | {grows} | {describe(inspection)} |")
    return rows


def group_kinds(found: Mapping[str, Inspection]) -> list[str]:
    """List the kinds by how they are served, or why not, with the layers that grow in the first example of each."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name, inspection in found.items():
        kind = PUBLISHED[name].kind
        if all(kind not in group for group in groups.values()):
            groups[describe(inspection)][kind] = f"{kind} {growth(inspection)}" if inspection.supported else kind
    for served, tested in ((TEXT_TESTED, TESTED), (SEES_TESTED, TESTED_WHOLE)):
        for kind in tested - groups[served].keys():
            groups[served][kind] = kind
    order = sorted(groups, key=lambda served: (served.startswith("no"), -len(groups[served])))
    rows = [f"| {served} | {', '.join(each for _, each in sorted(groups[served].items()))} |" for served in order]
    return ["| served | kinds, with the layers that grow of those of a published model |", "|---|---|", *rows]


def growth(inspection: Inspection) -> str:
    return f"{len(inspection.replaced_layers)}/{len(inspection.layers)}"


def describe(inspection: Inspection) -> str:
    """Say how a model is served, or why it is not."""
    if not inspection.supported:
        return f"no: {inspection.reason}"
    if inspection.reads_pictures:
        return SEES_TESTED if inspection.tested else SEES
    if inspection.tower_of:
        return TOWER
    return TEXT_TESTED if inspection.tested else COMPARED


def inspect_kinds(kinds: Iterable[str], served: Mapping[str, Inspection]) -> list[Inspection]:
    """Inspect kinds of transformers by their default configs, if these can be made, unless a published one is known."""
    found = []
    for kind in sorted(kinds):
        with suppress(Exception):  # each kind checks its config in its own way, with errors of many types
            found.append(served.get(kind) or inspect_model(SOURCE, choose_config(AutoConfig.for_model(kind), ())))
    return found


def count(name: str, inspections: list[Inspection]) -> str:
    served = sum(inspection.supported for inspection in inspections)
    pictures = sum(inspection.reads_pictures for inspection in inspections)
    whole = f", {pictures} of them with pictures" if pictures else ""
    return f"Of transformers {transformers.__version__}, {served} of {len(inspections)} {name} are served{whole}."


if __name__ == "__main__":
    main()
