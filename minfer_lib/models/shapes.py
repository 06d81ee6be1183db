"""Models without a download: public models' exact shapes with random weights, and a tiny one for tests.

Invariant: a shape has the layers, heads and sizes of the model it is named after, so that speed and memory measured on
it are those of the real model. Its answers are noise, and it has no tokenizer: prompts are token ids.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ..errors import ModelNotFound, one_of
from .names import SHAPE_PREFIX, short
from .tokenizer import bytes_to_letters

# The published configurations. Sizes that a reader will want to compare stand first.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(
        model_type="llama", num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100_000.0, bos_token_id=1, eos_token_id=2,
    ),
    "qwen2.5-0.5b": dict(
        model_type="qwen2", num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768,
        rms_norm_eps=1e-6, rope_theta=1_000_000.0, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen2.5-1.5b": dict(
        model_type="qwen2", num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768,
        rms_norm_eps=1e-6, rope_theta=1_000_000.0, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2", num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, max_position_embeddings=32768,
        rms_norm_eps=1e-6, rope_theta=1_000_000.0, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3", num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1_000_000.0, bos_token_id=151643,
        eos_token_id=151645,
    ),
    "llama-3.2-1b": dict(
        model_type="llama", num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
        max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001,
        rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=8192, rope_theta=500_000.0),
    ),
    "llama-3.1-8b": dict(
        model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=131072,
        rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=8192, rope_theta=500_000.0),
    ),
    "llama-2-7b": dict(
        model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000, tie_word_embeddings=False, max_position_embeddings=4096,
        rms_norm_eps=1e-5, rope_theta=10_000.0, bos_token_id=1, eos_token_id=2,
    ),
    "mistral-7b": dict(
        model_type="mistral", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32768, tie_word_embeddings=False,
        max_position_embeddings=32768, sliding_window=None, rms_norm_eps=1e-5, rope_theta=1_000_000.0,
        bos_token_id=1, eos_token_id=2,
    ),
    "gemma-2-2b": dict(
        model_type="gemma2", num_hidden_layers=26, hidden_size=2304, intermediate_size=9216, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=256000, tie_word_embeddings=True,
        max_position_embeddings=8192, sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, rms_norm_eps=1e-6, rope_theta=10_000.0, bos_token_id=2, eos_token_id=1,
        pad_token_id=0,
    ),
    "phi-3-mini": dict(
        model_type="phi3", num_hidden_layers=32, hidden_size=3072, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32064, tie_word_embeddings=False, max_position_embeddings=4096,
        sliding_window=2047, rms_norm_eps=1e-5, rope_theta=10_000.0, bos_token_id=1, eos_token_id=32000,
        pad_token_id=32000,
    ),
}  # fmt: skip


def shape_config(name: str) -> PreTrainedConfig:
    """The transformers config of a shape, "shape:" in front or not. Raises `ModelNotFound` with the possible names."""
    key = name.lower().removeprefix(SHAPE_PREFIX)
    if key not in SHAPES:
        raise ModelNotFound(f"There is no shape `{short(key)}`. Those known are {one_of(sorted(SHAPES))}.")
    return AutoConfig.for_model(**SHAPES[key])


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, made on the device itself; torch's own random state is left as it was.

    The weights are made where they will live, so that a 7B never stands in the memory of the host.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


# -- tiny-random ----------------------------------------------------------------------------------------------------

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258; the bytes are 0 to 255


def tiny_random(device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Llama of two layers and a tokenizer of single bytes: milliseconds to make, every text can be encoded."""
    config = AutoConfig.for_model(
        "llama", vocab_size=256 + len(SPECIALS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=257, eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    model = random_model(config, device, dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # transformers' own start of 0.02 makes all logits nearly equal, which hides mistakes
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.25
            parameter.data.copy_(values)
    return model, byte_tokenizer()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte (id = the byte), three special tokens, and a chat template in the ChatML manner."""
    letters = bytes_to_letters()
    backend = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIALS[2], pad_token=SPECIALS[0], bos_token=SPECIALS[1]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
