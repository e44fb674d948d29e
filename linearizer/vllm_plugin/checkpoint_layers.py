"""The checkpoint's own layers, as transformers runs them: for teachers that vLLM does not know.

They read all tokens of a step as one row, at the positions that vLLM gives; the students alone tell requests apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig

from linearizer.vllm_plugin.layer_reader import LayerReader, add_reader
from linearizer.vllm_plugin.refusals import OTHER_WEIGHTS

Tensor = torch.Tensor
OTHER_LOGITS = (
    "vLLM does not know this student's teacher, whose code changes the logits after its head, which is not served: use "
    "`linearizer serve`"
)


class CheckpointLayers(nn.Module):
    MADE_BY = "the checkpoint's own"

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        self.model = AutoModelForCausalLM.from_config(config, dtype=model_config.dtype).eval()
        self.decoder, self.head = self.model.get_decoder(), self.model.get_output_embeddings()
        self.readers: list[LayerReader] = []
        self.recurrent: dict = {}
        for layer, student in zip(config.linearized["layers"], self.model.students(), strict=True):
            dims = layer["key_dim"], layer.get("value_dim", layer["key_dim"])
            sizes = config.num_attention_heads, dims, model_config.dtype, config.linearized["exact_tokens"]
            reader = add_reader(self.readers, student, *sizes)
            student.exact_tokens = 0  # the reader knows the length of each text
            student.forward = MethodType(stand_in(reader), student)

    def embed_input_ids(self, input_ids: Tensor | None) -> Tensor:
        return self.model.get_input_embeddings()(input_ids)

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        mask = torch.ones(1, len(embeds), dtype=torch.long, device=embeds.device)  # else texts in a row are refused
        inputs = {"inputs_embeds": embeds[None], "position_ids": positions[None], "attention_mask": mask}
        return self.decoder(**inputs, use_cache=False)[0][0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.head(hidden_states).float()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        missing = {name for name, _ in self.model.named_parameters()}
        for name, weight in weights:
            if name not in own:
                raise ValueError(OTHER_WEIGHTS.format("has a strange weight", name))
            own[name].data.copy_(weight)
            missing.discard(name)
        self.model.tie_weights()
        if missing:
            raise ValueError(OTHER_WEIGHTS.format("lacks", min(missing)))
        self.refuse_other_logits()

    @torch.no_grad()
    def refuse_other_logits(self) -> None:
        """Refuse a teacher whose logits are not its head's outputs, which a few tokens show."""
        ids = torch.arange(2, device=self.head.weight.device)
        mine = self.compute_logits(self(ids, ids, None))
        whole = self.model.read_by_layers(input_ids=ids[None], position_ids=ids[None], use_cache=False).logits[0]
        if not torch.allclose(mine, whole.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(OTHER_LOGITS)


def stand_in(reader: LayerReader) -> Callable[..., Tensor]:
    """Return what a layer calls in place of its student: heads come first there, and one row holds all requests."""

    def forward(
        student: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, real: None, states: None,
        *scores: Any,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return reader.attend(q, k, v, scale, scores).transpose(0, 1)[None]

    return forward
