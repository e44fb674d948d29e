"""What checkpoints of other versions meet: heads of format 1, formats to come, and no kernels that fit."""

import pytest
import torch
from transformers import LlamaConfig

from linearizer.student import layer_student
from linearizer.student.layer_student import LayerStudent
from linearizer.student.modeling_linearized import LinearizedConfig
from tests.support.layers import SCALE, layer, text

LISTED = [[8, 0, 6, 4], [9, 0, 0, 0, 8], "softmax 8", "softmax", [4, 5, 0, 0, 16, "gdn"]]
NAMED = [
    {"window": 8, "slots": 6, "block": 4},
    {"window": 9, "bits": 8},
    {"softmax": True, "bits": 8},
    {"softmax": True},
    {"window": 4, "features": 5, "memory": "gdn"},
]


def test_heads_of_format_1_are_read_and_written_by_name():
    older = {"model_type": "linearized", "base": {"model_type": "llama", "vocab_size": 99}, "dtype": "bfloat16"}
    config = LinearizedConfig.from_dict({**older, "layers": [{"heads": LISTED, "key_dim": 8}, None], "sinks": 2})
    content = config.to_dict()
    assert isinstance(config, LlamaConfig) and (config.vocab_size, config.dtype) == (99, torch.bfloat16)
    assert content["model_type"] == "linearized" and content["vocab_size"] == 99 and "base" not in content
    named = content["linearized"]
    assert named["layers"] == [{"heads": NAMED, "key_dim": 8}, None] and (named["sinks"], named["format"]) == (2, 3)
    assert named == LinearizedConfig.from_dict(content).linearized
    student, named = (LayerStudent(heads, 2, 8, "prf") for heads in (LISTED, NAMED))
    assert [*student.state_dict()] == [*named.state_dict()]
    assert [group.heads for group in student.groups] == [group.heads for group in named.groups]


def test_a_format_to_come_is_refused():
    with pytest.raises(ValueError, match="format 4, and this code reads 3"):
        LinearizedConfig.from_dict({"model_type": "linearized", "linearized": {"format": 4, "teacher_type": "llama"}})


@pytest.mark.parametrize("door, version", [("linearizer.no_such_door", 1), (layer_student.DOOR, 99)])
@torch.no_grad()
def test_without_fitting_kernels_pytorch_reads_and_says_so_once(door, version, monkeypatch):
    expected, given = layer([[8, 0, 6, 4]]), text(1, 30)
    expected.reader = "pytorch"
    for name, value in (("DOOR", door), ("VERSION", version), ("_kernels", False)):
        monkeypatch.setattr(layer_student, name, value)
    student = layer([[8, 0, 6, 4]])
    with pytest.warns(RuntimeWarning, match="install that package") as said:
        for _ in range(2):
            found = student(*given, SCALE, None, None)
    assert len(said) == 1 and torch.equal(found, expected(*given, SCALE, None, None))
