"""The cache layer of a linearized attention layer: a state of fixed size where a teacher keeps all keys."""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .state import change_tensors, tensors


class LinearizedLayer(CacheLayerMixin):
    """Holds the states of one layer's head groups. `update` keeps nothing: attention itself writes the states."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens_read = 0
        self.memory: list = []
        self.is_initialized = True
        self.device = torch.device("cpu")

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """States are made by the first attention, which knows their sizes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens_read += key_states.shape[-2]
        self.device = key_states.device
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only."""
        return query_length, self.tokens_read

    def get_seq_length(self) -> int:
        return self.tokens_read

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def bytes(self) -> int:
        """What is remembered, without counters."""
        held = [tensor for state in self.memory for tensor in tensors(state).values()]
        return sum(x.numel() * x.element_size() for x in held if x.is_floating_point() or x.dtype == torch.int8)

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for state in self.memory:
            change_tensors(state, change)

    def reset(self) -> None:
        self.tokens_read, self.memory = 0, []

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.change(lambda tensor: tensor[indices])

    def offload(self) -> None:
        self.change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Bring an offloaded state back to where its layer computes."""
        self.change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, *args: object) -> None:
        raise ValueError(
            "a linearized model cannot forget tokens that it has read, because they are summed into a state of fixed "
            "size: generate without an assistant model and without prompt lookup"
        )


def empty_cache(base_config: object, linearized: list[bool]) -> Cache:
    """A cache with a fixed-size layer where `linearized` says so, and the teacher's own kind of layer elsewhere."""
    own = DynamicCache(config=base_config).layers if not all(linearized) else []
    return Cache(layers=[LinearizedLayer() if mine else own[index] for index, mine in enumerate(linearized)])
