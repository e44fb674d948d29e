"""Gradients that are computed block by block equal those of one graph."""

import pytest
import torch

from linearizer.method.blockwise_pass import at_once, by_blocks, chain_of
from linearizer.method.head_prices import recording_of
from linearizer.method.recorder import Samples
from linearizer.method.substitute import attending_with
from linearizer.teacher.layers import blocks_of
from tests.support.models import layers_of, teacher_of, tokens


def recordings_of(teacher):
    return {
        index: recording_of(layer, 2, Samples((None,) * (index + 1)), index, teacher.device)
        for index, layer in enumerate(layers_of(teacher))
        if layer.native_window is None
    }


def likelihoods(batch, logits):
    logs = logits.float().log_softmax(-1)
    return [logs[..., token + batch].sum() for token in (5, 9)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_neox"])
def test_blocks_one_by_one_give_the_bits_of_one_graph(family):
    teacher, batches = teacher_of(family), tokens(3, 20).split(2)
    recordings, chain, expected = recordings_of(teacher), chain_of(teacher, batches[0]), {}
    with attending_with(teacher, recordings):
        for index, gradient in at_once(teacher, recordings, batches, likelihoods):
            recording = recordings[index]
            expected.setdefault(index, []).append((gradient, recording.output.detach(), *recording.inputs[:3]))
        for index, gradient in by_blocks(teacher, recordings, batches, likelihoods, chain):
            recording = recordings[index]
            assert all(map(torch.equal, (gradient, recording.output, *recording.inputs[:3]), expected[index].pop(0)))
            assert gradient.any()
    assert expected and not any(expected.values())


@pytest.mark.parametrize("handed", ["aside", "changed"])
def test_blocks_that_hand_on_more_than_hidden_states_are_no_chain(handed):
    teacher, answers = teacher_of("llama"), []
    first, _, last = blocks_of(teacher)
    first.register_forward_hook(lambda block, args, answer: answers.append(answer))

    def hand_on(block, args, kwargs):
        if handed == "aside":
            return args, {**kwargs, "aside": (answers[-1],)}
        return (args[0] + 0, *args[1:]), kwargs

    assert chain_of(teacher, tokens(1, 20)) is not None
    last.register_forward_pre_hook(hand_on, with_kwargs=True, prepend=True)
    assert chain_of(teacher, tokens(1, 20)) is None
