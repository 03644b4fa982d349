"""Tiny random models: one config for each kind of attention and each architecture that must be served, or refused."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 199
SPAN = 24
"""Sliding window, or chunk, of the configs that have one: shorter than the tests' sequences."""

IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {**IDS, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
BASE = {
    **IDS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GQA = {**BASE, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **GROUPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
SLIDING_THEN_FULL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
SHARED_KV = {
    "head_dim": 16,
    "sliding_window": SPAN,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "layer_types": SLIDING_THEN_FULL,
}
GEMMA3N = {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [64] * 6}
LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": SPAN,
    "num_hidden_layers": 4,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 1, 0],
}

SERVED: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "smollm3": GQA,
    "qwen2": GQA,
    "qwen2 sliding": {
        **GQA,
        "use_sliding_window": True,
        "sliding_window": SPAN,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {**GQA, "head_dim": 16},
    "qwen2_moe": {**GQA, **ROUTED, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**GQA, **ROUTED, "head_dim": 16},
    "mistral": {**GQA, "sliding_window": SPAN},
    "mixtral": {**GQA, **EXPERTS},
    "gemma": {**GQA, "head_dim": 16},
    "gemma2": {**GQA, "head_dim": 16, "sliding_window": SPAN, "query_pre_attn_scalar": 16},
    "gemma3_text": {**GQA, "head_dim": 16, "sliding_window": SPAN, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "gemma3n_text": {**GQA, **SHARED_KV, **GEMMA3N},
    "gemma4_text": {**GQA, **SHARED_KV, "global_head_dim": 32},
    "phi": GQA,
    "phi3": {**GQA, "sliding_window": SPAN},
    "phimoe": {**GQA, **EXPERTS},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": BASE,
    "gptj": {**GPT2, "rotary_dim": 8},
    "codegen": {**GPT2, "n_ctx": 256, "rotary_dim": 8},
    "opt": {**BASE, "ffn_dim": 64, "word_embed_proj_dim": 64},
    "gpt_oss": {
        **GQA,
        **EXPERTS,
        "head_dim": 16,
        "sliding_window": SPAN,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {**BASE, **LATENT},
    "deepseek_v3": {**BASE, **LATENT},
    "llama4_text": {**GQA, **LLAMA4, "head_dim": 16},
    "olmo2": GQA,
    "olmo3": {**GQA, "sliding_window": SPAN, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": GQA,
    "cohere2": {
        **GQA,
        "head_dim": 16,
        "sliding_window": SPAN,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "starcoder2": {**GQA, "sliding_window": SPAN},
    "granite": GQA,
    "granitemoe": {**GQA, **EXPERTS},
    "stablelm": GQA,
    "glm4": {**GQA, "head_dim": 16},
    "glm4_moe": {**GQA, **GROUPED, "head_dim": 16},
    "exaone4": {**GQA, "sliding_window": SPAN, "num_hidden_layers": 4},
    "ernie4_5": {**GQA, "head_dim": 16},
    "nemotron": {**GQA, "head_dim": 16},
    "persimmon": BASE,
    "biogpt": BASE,
    "minimax_m2": {**GQA, **EXPERTS, "head_dim": 16, "rotary_dim": 8},
    "seed_oss": {**GQA, "head_dim": 16},
    "hunyuan_v1_dense": {**GQA, "head_dim": 16},
}
"""By transformers' model type, with a word for the variant after a space."""

SAMPLE = (
    "llama",
    "qwen2 sliding",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "gemma3n_text",
    "mixtral",
    "opt",
)
"""Those that differ from one another in what attention must do; the rest run in the full suite."""


def random_model(name: str) -> PreTrainedModel:
    """A random model of one of the SERVED; its weights spread wider than usual, so that attention matters."""
    torch.manual_seed(1)
    config = CONFIG_MAPPING[name.split(maxsplit=1)[0]](**SERVED[name])
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    served: PreTrainedModel = model
    return served
