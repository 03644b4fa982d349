"""What cannot be served over a paged pool is refused with the reason, by capability; what RoPE limits is limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, T5Config

from inferd.model import capability
from inferd.model.load import choose_dtype, load_model, prepare
from pagepool.errors import PagepoolError, Reason
from tests.cpu.model_configs import BASE, GPT2, GQA, random_model

TINY_FALCON = {**BASE, "new_decoder_architecture": True, "num_kv_heads": 2}
TINY_BLOOM = {"vocab_size": 199, "hidden_size": 64, "n_layer": 2, "n_head": 4}
TINY_MPT = {"vocab_size": 199, "d_model": 64, "n_layers": 2, "n_heads": 4}
TINY_MAMBA = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
TINY_NEO = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("gpt_neo", TINY_NEO, "does not support transformers' attention interface"),
        ("falcon", TINY_FALCON, "does not support transformers' attention interface"),
        ("bloom", TINY_BLOOM, "does not support transformers' attention interface"),
        ("mpt", TINY_MPT, "does not support transformers' attention interface"),
        ("qwen3_next", {**GQA, "layer_types": ["linear_attention", "full_attention"]}, "keeps state"),
        (
            "mamba2",
            TINY_MAMBA,
            "keeps state",
        ),
        ("lfm2", {**GQA, "layer_types": ["conv", "full_attention"]}, "layer types conv keep state"),
        ("falcon_h1", GQA, "keeps state"),
    ],
)
def test_a_model_without_the_needed_capability_is_refused_before_its_weights_are_read(
    kind: str, options: dict[str, Any], why: str
) -> None:
    config = CONFIG_MAPPING[kind](**options)

    with pytest.raises(PagepoolError, match=why) as refusal:
        capability.check_config("some/model", config)

    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.field == "--model"
    assert "some/model" in refusal.value.message


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(PagepoolError, match="encoder-decoder"):
        capability.check_config("t5", T5Config())


def test_a_mask_of_the_models_own_is_refused() -> None:
    config = CONFIG_MAPPING["doge"](**GQA)

    with pytest.raises(PagepoolError, match="attention mask of its own"):
        prepare("doge", AutoModelForCausalLM.from_config(config))


class ShiftedMlp(nn.Module):
    """An MLP that looks at the token before as well: state outside attention, which no config speaks of."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + torch.roll(x, 1, dims=1))


def test_state_outside_attention_that_no_config_admits_is_found_by_running_the_model() -> None:
    model = random_model("llama")
    layer = model.model.layers[0]
    layer.mlp = ShiftedMlp(layer.mlp)

    with pytest.raises(PagepoolError, match="keeps state outside attention"):
        prepare("shifty", model)


class NoAttention(nn.Module):
    """A layer that does without attention."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states


def test_a_layer_that_does_not_call_attention_is_found() -> None:
    model = random_model("llama")
    model.model.layers[1] = NoAttention()

    with pytest.raises(PagepoolError, match="1 of its 2 layers"):
        prepare("half", model)


def rope(**parameters: Any) -> PretrainedConfig:
    return LlamaConfig(**GQA, rope_parameters={"rope_theta": 1e4, **parameters})


def test_longrope_is_served_up_to_the_length_at_which_it_would_change_cached_keys() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    limit = capability.context_limit(rope(rope_type="longrope", original_max_position_embeddings=64, **factors))

    assert limit.tokens == 64
    assert "longrope" in limit.reason


def test_dynamic_ntk_is_served_up_to_the_length_at_which_it_would_change_cached_keys() -> None:
    limit = capability.context_limit(rope(rope_type="dynamic", factor=4.0))

    assert limit.tokens == 256
    assert "dynamic" in limit.reason


def test_rope_that_does_not_change_limits_nothing() -> None:
    assert capability.context_limit(rope(rope_type="linear", factor=4.0)) == capability.ContextLimit(256)


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(PagepoolError, match="--dtype is int8, but must be one of auto, float32"):
        choose_dtype("int8", torch.float32)


def test_gpt2s_convolutions_by_name_are_no_obstacle() -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**GPT2))

    assert len(prepare("gpt2", model).geometry.shapes) == 2


@pytest.mark.parametrize("config", ['{"model_type": "no_such_architecture"}', "{not json"])
def test_a_config_that_transformers_cannot_read_is_a_refusal(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PagepoolError, match="transformers cannot read its config") as caught:
        load_model(tmp_path)
    assert caught.value.reason is Reason.INVALID_FIELD
