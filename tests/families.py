"""Tiny random models of many families, and the oracle that every engine is compared with: `model.generate`.

Weights are drawn from N(0, 0.25): with transformers' own start of 0.02 all logits are nearly equal, and a wrong mask or
a wrong position changes no token.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from minfer_lib import LanguageModel, SamplingParams
from minfer_lib.models.hf_compat import cache_argument

VOCAB = 199
WINDOW = 7
# Unequal lengths, one longer than the window and one of a single token.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [100, 3, 50], [9] * 9 + [4, 77], [42]]
NEW_TOKENS = 10

BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT: dict[str, Any] = dict(n_embd=64, n_layer=2, n_head=4, n_positions=256)
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LOCAL_EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
DELTA: dict[str, Any] = dict(
    head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4
)
SSM: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8, num_hidden_layers=4
)
LATENT: dict[str, Any] = dict(
    kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, n_group=1,
    topk_group=1, num_key_value_heads=4,
)  # fmt: skip

# What every engine has to run, token for token.
EXACT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=WINDOW),
    "gemma2": dict(head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
                   final_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=LAYERS),
    "phi3": dict(sliding_window=WINDOW),
    "olmo2": {},
    "gpt2": GPT,
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64),
    "gpt_oss": dict(head_dim=16, sliding_window=WINDOW, layer_types=LAYERS, **LOCAL_EXPERTS),
    "qwen3_moe": dict(head_dim=16, **EXPERTS),
}  # fmt: skip

# Attention of their own making, or a state beside it: right, or refused by name, never wrong.
RIGHT_OR_REFUSED: dict[str, dict[str, Any]] = {
    "bloom": dict(n_layer=2, n_head=4),
    "falcon": dict(new_decoder_architecture=False, alibi=True),
    "mpt": dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256),
    "openai-gpt": GPT,  # keeps no cache at all
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4, window_size=WINDOW),
    "deepseek_v3": LATENT,  # keys and values of different sizes
    # a window that their masks know and their attention functions are not told
    "phimoe": dict(sliding_window=WINDOW, **LOCAL_EXPERTS),
    "qwen2_moe": dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS,
                      shared_expert_intermediate_size=32, **EXPERTS),
    "gemma4_text": dict(head_dim=16, global_head_dim=32, sliding_window=WINDOW, layer_types=LAYERS * 2,
                        num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                        vocab_size_per_layer_input=VOCAB),
    "llama4_text": dict(head_dim=16, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=8),
    "mamba": dict(state_size=8),
    "mamba2": dict(num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=8),
    "qwen3_next": dict(shared_expert_intermediate_size=32, num_hidden_layers=4, **EXPERTS, **DELTA),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1,
                      mamba_chunk_size=8, head_dim=16),
    "bamba": dict(attn_layer_indices=[1, 3], **SSM),
    "jamba": dict(num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
                  expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4,
                  use_mamba_kernels=False),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=96,
                             **(SSM | dict(num_hidden_layers=2))),
    "recurrent_gemma": dict(lru_width=64, attention_window_size=8, conv1d_width=4, num_hidden_layers=3,
                            block_types=["recurrent", "recurrent", "attention"]),
    "rwkv": dict(attention_hidden_size=64),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
}  # fmt: skip

ALL = EXACT | RIGHT_OR_REFUSED


def save(name: str, folder: Path) -> None:
    """Writes the tiny random model of a family as `save_pretrained` does; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(BASE | ALL[name])))
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 or key.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.25)
            if key.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(folder)


@contextmanager
def neutral_generation_config(lm: LanguageModel, config: GenerationConfig) -> Iterator[None]:
    """transformers fills what a config leaves open from the model's own, where some have a repetition penalty."""
    own, lm.model.generation_config = lm.model.generation_config, config
    try:
        yield
    finally:
        lm.model.generation_config = own


def hf_generate(
    lm: LanguageModel,
    ids: Sequence[int],
    max_new_tokens: int = NEW_TOKENS,
    eos_ids: Collection[int] = (),
    cache: Any = None,
    **settings: Any,
) -> list[int]:
    """The oracle: new token ids of a greedy `model.generate` for this prompt alone, the ending EOS included.

    cache: a cache of transformers in place of the one that it would make.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(eos_ids) or None, pad_token_id=0, **settings
    )
    prompt = torch.tensor([list(ids)], device=lm.device)
    asked = {} if cache is None else {cache_argument(lm.model): cache}
    with neutral_generation_config(lm, config), torch.no_grad():
        result = lm.model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
    return result[0, len(ids) :].tolist()


def scripted(script: Sequence[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits processor that makes any model say exactly these tokens."""

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[script[len(token_ids)]] = 0.0
        return forced

    return processor


def saying(script: Sequence[int], **others: Any) -> SamplingParams:
    """Parameters under which the model says exactly these tokens, unless it stops before."""
    return SamplingParams(**(dict(max_tokens=len(script), logits_processors=[scripted(script)]) | others))
