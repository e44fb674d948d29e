"""Which published models are served: python -m tests.benchmarks.families. Nothing is downloaded.

Each line states a kind, a published example, how many of its layers grow with the text, and how it is served or why
not: in whole runs on random weights, with text alone, or by the same checks without a test of its own. The last lines
count the kinds of transformers with their default configs; some of these are incomplete, and cannot be built.
"""

from collections.abc import Iterable
from contextlib import suppress

from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from linearizer.amounts import columns
from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.plan.inspection import Inspection
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.support import ENCODER, text_tower
from tests.support.published import PUBLISHED

SOURCE = Source("published", None, "org/published", "c0ffee", False, Weights((), 1, 2), {})
NO_DECODER = (ENCODER, "it is an encoder–decoder")
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SEEING = {
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
}


def main() -> None:
    rows = [("kind", "example", "layers that grow", "served")]
    for name, published in PUBLISHED.items():
        inspection = inspect_model(SOURCE, text_tower(published.build()))
        grows = f"{len(inspection.replaced_layers)} of {len(inspection.layers)}" if inspection.supported else "–"
        rows.append((published.kind, name, grows, describe(inspection)))
    print(columns(rows))
    decoders = [found for found in inspect_kinds(CAUSAL) if not (found.reason or "").startswith(NO_DECODER)]
    print(count("causal decoders", [found for found in decoders if not found.tower_of]))
    print(count("kinds that read pictures or sounds", inspect_kinds(SEEING)))


def describe(inspection: Inspection) -> str:
    """Say how a model is served, or why it is not."""
    if not inspection.supported:
        return f"no: {inspection.reason}"
    depth = "tested in whole runs on random weights" if inspection.tested else "compared with its teacher"
    return f"as text, {depth}" if inspection.tower_of else depth


def inspect_kinds(kinds: Iterable[str]) -> list[Inspection]:
    """Inspect kinds of transformers by their default configs, as far as these can be made."""
    found = []
    for kind in sorted(kinds):
        with suppress(Exception):  # each kind checks its config in its own way, with errors of many types
            found.append(inspect_model(SOURCE, text_tower(AutoConfig.for_model(kind))))
    return found


def count(name: str, inspections: list[Inspection]) -> str:
    served = sum(inspection.supported for inspection in inspections)
    return f"{served} of {len(inspections)} {name} are served"


if __name__ == "__main__":
    main()
