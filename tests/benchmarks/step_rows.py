"""Rows of the kernels' benchmark: a layerwise training step beside the teacher's forward pass over the same text."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from linearizer.method.checkpoint import put_student_into
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.student.attention_interface import attending
from linearizer.train.losses import hidden_states
from linearizer.train.settings import TrainingSettings
from linearizer.train.trainer import Trainer
from tests.benchmarks.timing import DEVICE, DTYPE, GPU, attempt, own


def layerwise_steps(quick):
    """Layers as of an 8B model on a GPU, and small ones on a CPU; a vocabulary that costs nothing."""
    batch, tokens = (8, 2048) if GPU else (1, 1024)
    sizes = (
        dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
        if GPU
        else dict(hidden_size=512, intermediate_size=1792, num_attention_heads=8, num_key_value_heads=8)
    )
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=256, max_position_embeddings=tokens)
    teacher = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE, DTYPE).eval()
    dim, features = config.head_dim, 128 if GPU else 64
    layer = Layer(config.num_attention_heads, config.num_key_value_heads, dim, dim)
    heads = (Head(features=features),) * config.num_key_value_heads
    student = put_student_into(teacher.requires_grad_(False), [layer] * 2, Allocation("by hand", 0, (heads,) * 2))
    ids = torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(0))

    def forward():
        with torch.no_grad(), attending(student.base, "sdpa"):
            hidden_states(student.base, ids.to(DEVICE))

    for loss in ("softmax",) if quick else ("softmax", "l2", "output"):
        training = Trainer(
            student, ids, TrainingSettings(loss=loss, steps=10**6, batch=batch, repeats=0.0, window_dropout=0.0)
        )
        row = {"op": "layerwise step", "loss": loss, "size": [batch, tokens, *sizes.values()], "features": features}
        row |= own([training.take_step], least=20)
        yield row | {"rivals": {"the teacher's forward pass": attempt("teacher", lambda: [forward], least=20)}}
