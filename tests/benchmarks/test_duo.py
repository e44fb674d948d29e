"""DuoAttention keeps the cache of the head that needs it, within the bytes of the budget."""

import torch

from linearizer.plan.head_bytes import Layer, cache_bytes
from linearizer.progress import finish
from tests.benchmarks.duo import allocate_by_gates, learn_gates
from tests.support.models import layers_of, teacher_of, tokens


def test_the_head_that_needs_its_cache_keeps_its_gate():
    """Values of one head only are read: the gates of all others may close."""
    teacher = teacher_of("llama").requires_grad_(False)
    attention = teacher.model.layers[1].self_attn
    for layer in teacher.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    attention.o_proj.weight[:, :32] = 3 * torch.eye(64)[:, :32]  # the queries of KV head 0
    gates = finish(learn_gates(teacher, tokens(4, 40), layers_of(teacher), window=2, sinks=0, steps=60))
    flat = {(index, head): gate for index, row in enumerate(gates) for head, gate in enumerate(row)}
    assert max(flat, key=flat.get) == (1, 0)
    assert max(gate for place, gate in flat.items() if place != (1, 0)) < 0.2


def test_open_gates_are_served_first_and_the_rest_shares_what_is_left():
    layers, gates = (Layer(4, 2, 16, 16),) * 2, [[0.1, 0.9], [0.2, 0.3]]
    allocation = allocate_by_gates(gates, layers, budget=64, sinks=4, length=128)
    assert allocation.heads[0][1].softmax and sum(head.softmax for row in allocation.heads for head in row) == 1
    assert allocation.state_bytes(layers, 128) <= cache_bytes(layers, 64)
    assert allocation.heads[0][0].window == (4 * 64 - 128) // 3 - 4
    assert not any(head.softmax for row in allocate_by_gates(gates, layers, 64, 4, 10_000).heads for head in row)
