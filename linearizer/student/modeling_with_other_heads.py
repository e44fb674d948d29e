"""The entry of checkpoints whose heads hold features, memories or all tokens: it brings the code of these heads."""

from .modeling_linearized import LinearizedForCausalLM as LinearizedWithSlots
from .other_heads import make_group  # noqa: F401


class LinearizedForCausalLM(LinearizedWithSlots):
    """A linearized model with heads of any kind."""
