"""Gradients that are computed block by block are those of one graph."""

import pytest
import torch

from linearizer.measure.block_gradients import at_once, by_blocks, is_chain, recording
from linearizer.measure.head_prices_by_gradient import recording_of
from linearizer.model.layers import blocks_of
from tests.support.models import layers_of, teacher_of, tokens


def recordings_of(teacher):
    return {
        index: recording_of(layer, 2, lambda student, index: None, index, teacher.device)
        for index, layer in enumerate(layers_of(teacher))
        if layer.native_window is None
    }


def likelihoods(logits):
    logs = logits.float().log_softmax(-1)
    return [logs[..., token].sum() for token in (5, 9)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_neox"])
def test_blocks_one_by_one_give_the_bits_of_one_graph(family):
    teacher, ids = teacher_of(family), tokens(2, 20)
    recordings = recordings_of(teacher)
    assert is_chain(teacher, recordings, ids)
    with recording(teacher, recordings):
        whole = dict(at_once(teacher, recordings, ids, likelihoods))
        kept = {index: (each.inputs, each.output.detach()) for index, each in recordings.items()}
        for index, gradient in by_blocks(teacher, recordings, ids, likelihoods):
            assert torch.equal(gradient, whole.pop(index)) and gradient.any()
            assert torch.equal(recordings[index].output, kept[index][1])
            assert all(map(torch.equal, recordings[index].inputs[:3], kept[index][0][:3]))
    assert not whole


def test_blocks_that_hand_on_more_than_hidden_states_are_no_chain():
    teacher, ids = teacher_of("llama"), tokens(1, 20)
    first, _, last = blocks_of(teacher)
    seen = []
    first.register_forward_hook(lambda block, args, answer: seen.append(answer))
    last.register_forward_pre_hook(
        lambda block, args, kwargs: (args, {**kwargs, "aside": (seen[-1],)}), with_kwargs=True, prepend=True
    )
    assert not is_chain(teacher, recordings_of(teacher), ids)
