"""Denoisers of diffusers whose self-attention takes time linear in the patches of a picture.

The teacher's own code runs unchanged, and all weights have the names that they have in the teacher. Its processors call
PyTorch's scaled_dot_product_attention, whose place BothWays takes while a layer reads the picture itself; layers that
read a prompt stay as they are. diffusers downloads a single file of code for a part of a pipeline, so that a checkpoint
holds this file and those that it imports as one.
"""

from contextvars import ContextVar
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from .attention_both_ways import BothWays

SIDES: ContextVar[tuple[int, int]] = ContextVar("sides")  # height and width of the latents at work
SETTING = "_both_ways"  # of a config


class Replaced(TorchFunctionMode):
    """While this lasts, what calls scaled_dot_product_attention attends as BothWays says."""

    def __init__(self, how: BothWays) -> None:
        super().__init__()
        self.how = how

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **given)
        if given.get("attn_mask") is not None:
            raise ValueError("a linearized denoiser lets every patch see all others: masks are not served")
        query, key, value = args[:3]
        scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
        return self.how.attend(query, key, value, scale, grid_of(query.shape[2], *SIDES.get()))


class BothWaysProcessor:
    """Lets a processor of diffusers attend in another way; `how`: None for its own."""

    def __init__(self, own: Any, how: BothWays | None) -> None:
        self.own, self.how = own, how

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = hidden_states, encoder_hidden_states, attention_mask, temb
        if self.how is None or encoder_hidden_states is not None:
            return self.own(attn, *given)
        with Replaced(self.how):
            return self.own(attn, *given)


class BothWaysDenoiser:
    """What a denoiser of diffusers becomes a student by."""

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        made = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        if SETTING in config:
            how = config[SETTING]
            model = made[0] if isinstance(made, tuple) else made
            model.attend_with(BothWays(tuple(how["block"]), how["slots"]))
        return made

    def attend_with(self, how: Any) -> None:
        """Let all layers attend with another BothWays, or a control in its place; None: as the teacher does."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Attention):
                module.set_processor(BothWaysProcessor(getattr(module.processor, "own", module.processor), how))

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
    """Tell the grid on which so many patches of latents lie: a patch has the same size along both axes."""
    for size in range(1, max(height, width) + 1):
        grid = -(-height // size), -(-width // size)
        if grid[0] * grid[1] == tokens:
            return grid
    raise ValueError(f"{tokens} tokens are not the patches of latents of {height} × {width}")
