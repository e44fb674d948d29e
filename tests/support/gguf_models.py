"""Tiny GGUF files, written by the package `gguf` as llama.cpp lays a llama out, with the demo's tokenizer."""

import json

import gguf
import torch
from transformers import AutoModelForCausalLM

from linearizer.hub.models import find_model
from tests.support.models import teacher_of

Kind = gguf.GGMLQuantizationType
FILE_TYPES = {Kind.F32: 0, Kind.F16: 1, Kind.Q4_1: 3, Kind.Q8_0: 7}


def llama_of(**overrides):
    """A tiny llama with the vocabulary of the demo, in rows of whole blocks of 32 numbers."""
    words = dict(vocab_size=4096, hidden_size=64, intermediate_size=96, bos_token_id=0, eos_token_id=0)
    return teacher_of("llama", **{**words, "tie_word_embeddings": False, **overrides})


def write_gguf(model, path, kind=Kind.Q8_0, **metadata):
    """Write a file of a tiny llama, its matrices of a kind; give the model that the file stands for."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    add_words(writer)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32 if isinstance(value, int) else None
        (add or writer.add_float32)(key.replace("__", "."), value)
    held, names = {}, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        own = kind if weight.ndim == 2 else Kind.F32
        stored = gguf.quantize(turned(name, weight, config).numpy(), own)
        writer.add_tensor(names.get_name(name, (".weight",)), stored, raw_dtype=own)
        held[name] = turned(name, torch.tensor(gguf.dequantize(stored, own)), config, back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    expected.load_state_dict(held)
    return expected


def add_words(writer):
    """Add the demo's tokenizer."""
    model = json.loads((find_model("demo").folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def turned(name, weight, config, back=False):
    """Lay the rows of queries and keys as llama.cpp rotates them: neighbours in the place of halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    shape = (heads, -1, 2) if back else (heads, 2, weight.shape[0] // heads // 2)
    return weight.unflatten(0, shape).transpose(1, 2).flatten(0, 2).contiguous()
