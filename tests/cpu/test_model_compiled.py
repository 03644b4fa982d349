"""The forward that a GPU runs, compiled once for all sizes around the attention operator; here on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from inferd.model import merge
from inferd.model.attention import ATTENTION_NAME, attending
from inferd.model.cuda_attention import CUDA_ATTENTION_NAME, stepping
from inferd.model.cuda_graphs import CompiledForward
from inferd.model.probe import Recorder, forward
from tests.cpu.model_configs import random_model

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
def check_compiled(name: str) -> None:
    """One graph computes every size as the model's code does, its projections merged."""
    torch._dynamo.reset()
    counters.clear()
    model = random_model(name).requires_grad_(requires_grad=False)
    model.set_attn_implementation(ATTENTION_NAME)
    with merge.watching(model) as groups, attending(Recorder(name, model.config.get_text_config(decoder=True))):
        forward(model, torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([1]))
    merge.merge(model, groups, functional.linear)
    model.set_attn_implementation(CUDA_ATTENTION_NAME)
    compiled = CompiledForward(model, compile_=True)
    with stepping(Dense()):
        for tokens, rows in SIZES:
            ids, positions = torch.arange(tokens)[None] + 3, torch.arange(tokens)[None]
            wanted = torch.arange(rows) % tokens
            expected = forward(model, ids, positions, wanted)
            torch.testing.assert_close(compiled(ids, positions, wanted), expected, rtol=1e-3, atol=1e-3)
            assert compiled._compiled is not None, "it runs eagerly"
    assert counters["stats"]["unique_graphs"] == 1


def test_one_graph_computes_every_size() -> None:
    check_compiled("qwen2")


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "mixtral", "opt"])
def test_one_graph_computes_every_size_of_each_kind(name: str) -> None:
    check_compiled(name)
