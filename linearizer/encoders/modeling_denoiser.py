"""Denoisers of diffusers whose self-attention takes time linear in the patches of a picture.

The teacher's code runs unchanged, and all weights keep their names. Its processors call PyTorch's
scaled_dot_product_attention, which BothWays replaces while a layer reads the picture itself; layers that read a prompt
are unchanged. diffusers downloads a single file of code for a part of a pipeline, so a checkpoint contains this file
and its imports as one.
"""

from contextvars import ContextVar
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from .attention_both_ways import BothWays

SIDES: ContextVar[tuple[int, int]] = ContextVar("sides")  # height and width of the current latents
SETTING = "_both_ways"  # of a config


class Replaced(TorchFunctionMode):
    """In this context, calls of scaled_dot_product_attention attend as BothWays does."""

    def __init__(self, way: BothWays) -> None:
        super().__init__()
        self.way = way

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        if kwargs.get("attn_mask") is not None:
            raise ValueError("a linearized denoiser lets every patch see all others: masks are not served")
        query, key, value = args[:3]
        scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
        return self.way.attend(query, key, value, scale, grid_of(query.shape[2], *SIDES.get()))


class BothWaysProcessor:
    """Makes a processor of diffusers attend in another way; `way`: None for the teacher's."""

    def __init__(self, processor: Any, way: BothWays | None) -> None:
        self.inner, self.way = processor, way

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = hidden_states, encoder_hidden_states, attention_mask, temb
        if self.way is None or encoder_hidden_states is not None:
            return self.inner(attn, *inputs)
        with Replaced(self.way):
            return self.inner(attn, *inputs)


class BothWaysDenoiser:
    """Makes a student of a denoiser of diffusers."""

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        if SETTING in config:
            setting = config[SETTING]
            model = result[0] if isinstance(result, tuple) else result
            model.attend_with(BothWays(tuple(setting["block"]), setting["slots"]))
        return result

    def attend_with(self, way: Any) -> None:
        """Make all layers attend with another BothWays, or with a control; None: as the teacher does."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Attention):
                module.set_processor(BothWaysProcessor(getattr(module.processor, "inner", module.processor), way))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        latents = args[0] if args else kwargs["sample"] if "sample" in kwargs else kwargs["hidden_states"]
        token = SIDES.set(tuple(latents.shape[-2:]))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            SIDES.reset(token)


class LinearizedDiT(BothWaysDenoiser, DiTTransformer2DModel):
    pass


class LinearizedPixArt(BothWaysDenoiser, PixArtTransformer2DModel):
    pass


class LinearizedUNet(BothWaysDenoiser, UNet2DConditionModel):
    pass


def grid_of(tokens: int, height: int, width: int) -> tuple[int, int]:
    """Return the grid of `tokens` patches of latents: a patch has the same size along both axes."""
    for size in range(1, max(height, width) + 1):
        grid = -(-height // size), -(-width // size)
        if grid[0] * grid[1] == tokens:
            return grid
    raise ValueError(f"{tokens} tokens are not the patches of latents of {height} × {width}")
