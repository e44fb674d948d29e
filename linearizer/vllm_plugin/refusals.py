"""Says which students and versions of vLLM are not served, and what to do."""

from __future__ import annotations

from typing import Any

VERSIONS = ("0.32",)  # of vLLM that the tests have run with: it changes what this room uses between releases
OTHER_VERSION = "vLLM {} is not served by this version of linearizer: install vLLM {}, or use `linearizer serve`"
OWN_LAYER = (
    "layer {} of this student is its teacher's own, recurrent or with a sliding window, which vLLM's plugin serves by "
    "vLLM's own layers alone, and these are not used: serve it with `linearizer serve`"
)
WHOLE_ATTENTION = (
    "layer {} of this student keeps its teacher's attention to all tokens, and vLLM's plugin serves states of fixed "
    "size: serve it with `linearizer serve`"
)
SHARED = (
    "layer {} of this student reads the keys and values of another layer, which vLLM's plugin does not serve: serve it "
    "with `linearizer serve`"
)
OTHER_LAYERS = (
    "vLLM's {} has other attention layers than this student: serve it with "
    '--additional-config \'{{"linearizer_layers": "checkpoint"}}\', or with `linearizer serve`'
)
PIPELINE = (
    "vLLM's plugin keeps the layers of a student together: use tensor parallelism in place of pipeline parallelism"
)
PARALLEL = "tensor parallelism needs vLLM's own layers, which are not used for this student: leave it out"
SPECULATIVE = "a student's state cannot be rolled back: leave speculative decoding out"
OF_PICTURES = (
    "this student reads pictures, and vLLM's plugin serves students of text: make one with --text-only, or use "
    "AutoModelForImageTextToText"
)
UNSERVED_HEADS = (
    "a KV head of this student keeps all tokens (--may-grow), and vLLM's plugin serves states of fixed size: make a "
    "student without --may-grow, or serve this one with `linearizer serve`"
)
OTHER_WEIGHTS = "the checkpoint {} {}: it is damaged, or of another version of linearizer: download or make it again"


def version_problem(version: str | None = None) -> str:
    """Say why a version of vLLM, or the installed one, is not served; nothing if it is."""
    if version is None:
        import vllm

        version = str(vllm.__version__)
    served = any(version == known or version.startswith(f"{known}.") for known in VERSIONS)
    return "" if served else OTHER_VERSION.format(version, " or ".join(VERSIONS))


def student_problem(layers: list[dict[str, Any] | None], vllms_layers: bool = True) -> str:
    """Say why a student with such layers is not served, with vLLM's layers or without; nothing if it is."""
    for index, layer in enumerate(layers):
        if layer is None:
            if not vllms_layers:
                return OWN_LAYER.format(index)
        elif "reads" in layer:
            return SHARED.format(index)
        elif any(head.get("softmax") for head in layer["heads"]):
            return UNSERVED_HEADS
    return ""
