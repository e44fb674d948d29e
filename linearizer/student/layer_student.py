"""The student of one attention layer: its KV heads, in groups that keep the same, and how few bits are stored.

Heads with a window, alone or with slots, are read as attention_of_student.py defines it, or faster by the kernels of
the installed package, which are compared with it before their first use. Other files have other heads: `code_of`.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from .attention_of_student import FEWER, GAIN, HeadKind, HeadState, Merging, Scores, read, working_dtype

Tensor = torch.Tensor
DOOR, VERSION = "linearizer.kernels.door", 3  # of kernels that fit this code
SLOW = (
    "PyTorch reads with this linearized model, which takes several times as long as with the kernels of the package "
    "linearizer: install that package from its repository to use them"
)
FEATURE_MAPS = ("prf", "performer", "dijiang", "hedgehog", "mlp", "clusters")
_kernels: Any = False  # not looked for yet


def find_kernels() -> Any:
    """Return the kernels of the installed package; None, with a warning, if there are none."""
    global _kernels
    if _kernels is False:
        _kernels = load_kernels()
    return _kernels


def load_kernels() -> Any:
    """Import the kernels if they fit this code."""
    try:
        door = importlib.import_module(DOOR)
    except ImportError:
        door = None
    if door is not None and door.VERSION == VERSION:
        return door
    warnings.warn(SLOW, RuntimeWarning, stacklevel=3)
    return None


class Merger(nn.Module):
    """What heads merge by: see `Merging`."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.mean_query = nn.Parameter(torch.zeros(heads, dim + 1), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters: offloading libraries load them for a forward only."""
        return self.metric, self.gain, self.mean_query

    def reset(self) -> None:
        """Start with the same weight for all directions and all keys."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)
        self.mean_query.data.zero_()


class StoredBasis(nn.Module):
    """The basis in which heads of few bits store keys and values, so that rounding costs every direction alike.

    A key x, multiplied by `root`, becomes the rotated (x - middle) / steps, a value the rotated x - middle, and queries
    what leaves q·k unchanged: a common shift of all keys does not change a softmax, and the middle of the values is
    added to its output. The rotation leaves no few numbers large.
    """

    key_steps: Tensor  # (heads, key_dim)
    key_middle: Tensor
    value_middle: Tensor  # (heads, value_dim)

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        for name, dim in (("key_steps", key_dim), ("key_middle", key_dim), ("value_middle", value_dim)):
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, dim), requires_grad=False))
        nn.init.ones_(self.key_steps)

    def forward(self, compute: Any, *inputs: Any) -> Any:
        """Call one of the methods: offloading libraries load parameters for a forward only."""
        return compute(*inputs)

    @torch.no_grad()
    def reset(self) -> None:
        """Start for vectors around 0 with the same variance in all directions."""
        self.key_steps.fill_(1.0)
        self.key_middle.zero_()
        self.value_middle.zero_()

    def to_stored(self, q: Tensor, k: Tensor, v: Tensor, root: float, heads: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries (batch, heads, group, tokens, dim), keys and values (batch, heads, tokens, dim) of heads."""
        q, k, v = (x.to(working_dtype(x)) for x in (q, k, v))
        steps, middle, value_middle = (
            x[heads].to(k.dtype)[:, None] for x in (self.key_steps, self.key_middle, self.value_middle)
        )
        return rotate(q * (steps / root)[:, None]), rotate((k * root - middle) / steps), rotate(v - value_middle)

    def left_out(self, q: Tensor, heads: Any) -> Tensor:
        """Return what queries times changed keys leave out: queries times the middle, (batch, heads, group, tokens)."""
        return (q.to(working_dtype(q)) @ self.key_middle[heads].to(working_dtype(q))[:, None, :, None])[..., 0]

    def from_stored(self, out: Tensor, heads: Any) -> Tensor:
        """Change outputs (batch, heads, group, tokens, dim) of some heads back."""
        return rotate(out) + self.value_middle[heads].to(out.dtype)[:, None, None]


def has_stored_basis(bits: int, *dims: int) -> bool:
    """Whether vectors are stored in a basis of their own: if the bits of their numbers fill bytes."""
    return bits < 16 and not any(dim % 8 for dim in dims)


def rotate(x: Tensor) -> Tensor:
    """Rotate vectors (…, dim) so that no few of their numbers are large; a second rotation undoes the first."""
    x = x.to(working_dtype(x))
    return x @ rotation(x.shape[-1], x.dtype, x.device)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # so that training may use it later
def rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Hadamard's matrix, or several along the diagonal if the size is no power of two; it is its own inverse."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < rotated_at_once(dim):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * math.sqrt(0.5)
    return torch.block_diag(*[matrix] * (dim // len(matrix)))


def rotated_at_once(dim: int) -> int:
    """Return how many numbers of a vector are rotated together: the largest power of two that divides its size."""
    return dim & -dim


class HeadGroup(nn.Module):
    """KV heads of one layer that keep the same, a window alone or with slots; `heads` are their places in it."""

    def __init__(self, heads: list[int], kind: HeadKind, sinks: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        if kind.slots and not 0 < kind.block <= kind.window:
            raise ValueError(
                f"KV heads {heads} merge {kind.block} tokens at once and have a window of {kind.window}: set a window, "
                "and merge at most its tokens"
            )
        if kind.bits in FEWER and any(dim % 2 or dim * (kind.bits - 4) % 8 for dim in (key_dim, value_dim)):
            raise ValueError(
                f"KV heads {heads} have vectors of {key_dim} and {value_dim} numbers, which do not fill bytes in "
                f"{kind.bits} bits a number: set 8 or 16 bits"
            )
        self.heads, self.kind, self.sinks = heads, kind, sinks
        self.window, self.bits, self.has_basis = kind.window, kind.bits, has_stored_basis(kind.bits, key_dim, value_dim)
        self.merger = Merger(len(heads), key_dim) if kind.slots else None

    def merging(self, scale: float) -> Merging | None:
        """Return how the heads merge, whose scores have this scale; None if they have no slots."""
        if self.merger is None:
            return None
        metric, gain, mean_query = self.merger()
        return Merging(metric, gain, mean_query, 1.0 if self.has_basis else scale**0.5)  # the basis multiplies by it

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: HeadState | None,
        scores: Scores | None = None,
    ) -> tuple[Tensor, HeadState]:  # fmt: skip
        q = q.to(working_dtype(q)) * scale
        return read(self.kind, self.merging(scale), self.sinks, state, q, k, v, real, scores)


def named_head(head: dict | list | str) -> dict:
    """Return what a head keeps, by name; format 1 of checkpoints has lists, or "softmax" and its bits."""
    if isinstance(head, str):
        head = {"softmax": True, "bits": int(head.removeprefix("softmax") or 16)}
    if not isinstance(head, dict):
        head = dict(zip(("window", "features", "slots", "block", "bits", "memory"), head, strict=False))
    return {name: x for name, x in head.items() if x and (name, x) != ("bits", 16)}


def code_of(head: dict, feature_map: str) -> str:
    """Name the module that has the code of a head; empty for a window, alone or with slots."""
    if head.get("softmax"):
        return "other_heads"
    if not head.keys() - {"window", "slots", "block", "bits"}:
        return ""
    return "feature_maps" if head.get("memory", feature_map) in FEATURE_MAPS else "matrix_rule"


class LayerStudent(nn.Module):
    """Attention of one layer; `heads` says of each KV head what it keeps, by name:

    window, slots, block and bits as in HeadKind; features, and memory, the name of a rule; softmax: all tokens.
    Texts of at most `exact_tokens` tokens are read by the teacher's attention instead (cache.py).
    """

    reader: str | None = None  # "pytorch", "c" or "triton"; None: the fastest that passes its trial

    def __init__(
        self, heads: list, sinks: int, key_dim: int, feature_map: str, value_dim: int = 0, exact_tokens: int = 0
    ) -> None:
        super().__init__()
        kinds: dict[tuple, list[int]] = {}
        for place, head in enumerate(map(named_head, heads)):
            kinds.setdefault(tuple(sorted(head.items())), []).append(place)

        def group(head: dict, places: list[int]) -> nn.Module:
            if not head.keys() - {"block", "bits"} and not sinks:
                raise ValueError(f"KV heads {places} hold nothing: set a window, features, sinks or softmax")
            if module := code_of(head, feature_map):
                others: Any = importlib.import_module(f".{module}", __package__)
                return others.make_group(head, places, sinks, (key_dim, value_dim), feature_map)
            return HeadGroup(places, HeadKind(**{"window": 0, **head}), sinks, key_dim, value_dim)

        value_dim = value_dim or key_dim
        self.kv_heads, self.sinks, self.exact_tokens = len(heads), sinks, exact_tokens
        self.groups = nn.ModuleList(group(dict(kind), places) for kind, places in kinds.items())
        has_basis = any(each.has_basis for each in self.head_groups())
        self.turns = StoredBasis(len(heads), key_dim, value_dim) if has_basis else None

    def head_groups(self) -> list[HeadGroup]:
        """Return the groups; those of other heads have the same attributes."""
        return cast(list[HeadGroup], [*self.groups])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, states: list | None,
        cap: float | None = None, sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend and update `states`; autocast changes only the type of the inputs.

        `cap` and `sink` (query heads,) are the model's, if it caps its scores or has learned sinks.
        """
        device, attend = query.device.type, self.attend
        scores = None
        if cap is not None or sink is not None:
            scores = Scores(cap, None if sink is None else sink.view(self.kv_heads, -1))
        if torch.compiler.is_dynamo_compiling():  # the definition reads values, which breaks graphs
            kernels = find_kernels()
            served = kernels is not None and kernels.serves_graph(self, query, key, real, states)
            attend = attend if served else self.attend_uncompiled
        if device == "meta" or not torch.is_autocast_enabled(device):
            return attend(query, key, value, scale, real, states, scores)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return attend(query.to(dtype), key.to(dtype), value.to(dtype), scale, real, states, scores)

    @torch.compiler.disable
    def attend_uncompiled(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, states: list | None,
        scores: Scores | None,
    ) -> Tensor:  # fmt: skip
        real = None if real is not None and real.all() else real
        return self.attend(query, key, value, scale, real, states, scores)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, states: list | None,
        scores: Scores | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend and update `states`, a list with the state of every group: by kernels with as many as they serve."""
        batch, count, tokens, dim = query.shape
        query = query.view(batch, self.kv_heads, count // self.kv_heads, tokens, dim)
        # the output lies in memory token by token, as the layer needs it
        out = value.new_empty(batch, tokens, *query.shape[1:3], value.shape[-1]).permute(0, 2, 3, 1, 4)
        kernels = None if self.reader == "pytorch" else find_kernels()
        done = [] if kernels is None else kernels.read(self, states, query, key, value, scale, real, out, scores)
        if states is not None:
            states += [None] * (len(self.groups) - len(states))
        for index, group in enumerate(self.head_groups()):
            if index not in done:
                heads, state = as_slice(group.heads), None if states is None else states[index]
                inputs = query[:, heads], key[:, heads], value[:, heads]
                part, state = self.attend_in_basis(group, heads, inputs, scale, real, state, scores)
                out[:, heads] = part.to(out.dtype)
                if states is not None:
                    states[index] = state
        return out.flatten(1, 2)

    def attend_in_basis(
        self, group: HeadGroup, heads: Any, inputs: tuple, scale: float, real: Tensor | None, state: Any,
        scores: Scores | None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Attend with one group, in the basis in which it stores keys and values."""
        if scores is not None and scores.sink is not None:
            scores = replace(scores, sink=scores.sink[heads])
        if self.turns is None or not group.has_basis:
            return group(*inputs, scale, real, state, scores)
        if scores is not None:
            scores = replace(scores, offset=self.turns(self.turns.left_out, inputs[0], heads) * scale**0.5)
        inputs = self.turns(self.turns.to_stored, *inputs, scale**0.5, heads)
        part, state = group(*inputs, scale, real, state, scores)
        return self.turns(self.turns.from_stored, part, heads), state


class SharedStudent(nn.Module):
    """Attends in a layer without keys of its own, with the student of the layer that it `reads`.

    It gets a copy of that layer's state from before a call's tokens, reads the same tokens, and drops the new state.
    """

    def __init__(self, student: LayerStudent, reads: int) -> None:
        super().__init__()
        self.reads, self.shared = reads, (student,)  # no child: its weights belong to the other layer

    @property
    def exact_tokens(self) -> int:
        return self.shared[0].exact_tokens

    def forward(self, *inputs: Any) -> Tensor:
        return self.shared[0](*inputs)


def as_slice(heads: list[int]) -> slice | list[int]:
    """Return indices of heads, as a slice if they are evenly spaced: a slice selects without a copy."""
    apart = heads[1] - heads[0] if len(heads) > 1 else 1
    even = slice(heads[0], heads[-1] + 1, apart)
    return even if list(range(even.stop))[even] == heads else heads
