"""The forward that a GPU runs, its regions compiled once for all sizes; here on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from inferd.model import merge
from inferd.model.attention import ATTENTION_NAME, attending
from inferd.model.cuda_attention import CUDA_ATTENTION_NAME
from inferd.model.cuda_graphs import CompiledForward
from inferd.model.probe import Recorder, forward
from tests.cpu.model_configs import SERVED, random_model

SIZES = ((2, 2), (5, 4), (64, 4), (4, 4), (7, 7))
"""Tokens and logit rows, also as many of these as of those."""


class Dense:
    """The attention of one sequence without a prefix, as StepAttention."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See StepAttention."""
        rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        result = functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        out.copy_(result[0].transpose(0, 1))


@torch.inference_mode()
def check_compiled(name: str, backend: str = "inductor") -> None:
    """What is compiled at the first step computes every size as the model's code does, projections merged."""
    torch._dynamo.reset()
    counters.clear()
    model = random_model(name).requires_grad_(requires_grad=False)
    model.set_attn_implementation(ATTENTION_NAME)
    with merge.watching(model) as groups, attending(Recorder(name, model.config.get_text_config(decoder=True))):
        forward(model, torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([1]))
    merge.merge(model, groups, functional.linear)
    model.set_attn_implementation(CUDA_ATTENTION_NAME)
    inputs = [(torch.arange(t)[None] + 3, torch.arange(t)[None], torch.arange(r) % t) for t, r in SIZES]
    eager = CompiledForward(model, compile_=False)
    expected = [eager(*each, Dense()) for each in inputs]
    compiled = CompiledForward(model, compile_=True, backend=backend)
    graphs = []
    for each, logits in zip(inputs, expected, strict=True):
        torch.testing.assert_close(compiled(*each, Dense()), logits, rtol=1e-3, atol=1e-3)
        assert not compiled.eager
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * len(SIZES), f"{name}: graphs after each size: {graphs}"


def test_what_is_compiled_at_the_first_step_computes_every_size() -> None:
    check_compiled("qwen2")


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "mixtral", "opt"])
def test_what_is_compiled_at_the_first_step_computes_every_size_of_each_kind(name: str) -> None:
    check_compiled(name)


def kinds() -> list[Any]:
    """All architectures; in `make test` those with several kinds of layers, which are compiled more than once."""
    sample = {"gemma3_text", "deepseek_v3", "phimoe"}
    return [pytest.param(name, marks=() if name in sample else pytest.mark.full) for name in SERVED]


@pytest.mark.parametrize("name", kinds())
def test_no_architecture_is_compiled_again_for_another_size(name: str) -> None:
    check_compiled(name, "eager")
