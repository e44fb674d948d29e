"""The entry of checkpoints whose heads hold features, memories or all tokens: it brings the code of these heads."""

from .modeling_linearized import LinearizedConfig, LinearizedForCausalLM
from .other_heads import make_group

__all__ = ["LinearizedConfig", "LinearizedForCausalLM", "make_group"]
