"""bfloat16 on the GPU: logits are as near to float32's as those of transformers' own sdpa and eager attention."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from inferd.model.cuda_attention import StepAttention
from inferd.model.cuda_graphs import CompiledForward
from inferd.model.cuda_runner import RunnerLimits, compiled
from inferd.model.load import prepare
from pagekernels.cuda.device import CudaDevice
from tests.cpu.model_rig import random_prompts
from tests.gpu.model_rig import CudaRig

VOCAB = 49152
LENGTHS = (3, 16, 40, 64, 65, 150, 200, 333)


def smollm2() -> PreTrainedModel:
    """The shape of SmolLM2-135M with random weights: 9 query and 3 KV heads of 64, 30 layers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().to("cuda")


class Recording:
    """A forward that keeps the logits of its last call."""

    def __init__(self, forward: CompiledForward) -> None:
        self._forward = forward
        self.logits = torch.empty(0)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        logits = self._forward(ids, positions, rows, attention)
        self.logits = logits.float()
        return logits


@torch.inference_mode()
def own_logits(model: PreTrainedModel, attention: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The logits that follow each prompt, by transformers' own attention."""
    model.set_attn_implementation(attention)
    return [model(torch.tensor([prompt], device="cuda")).logits[0, -1].float() for prompt in prompts]


def distances(rows: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    """Relative distance of each prompt's logits from the exact ones."""
    return torch.stack([(row - right).norm() / right.norm() for row, right in zip(rows, exact, strict=True)])


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("budget", [512, 100], ids=["one chunk", "chunks of 100 after a prefix"])
def test_logits_are_as_exact_as_transformers_own(device: CudaDevice, budget: int, compile_: bool) -> None:
    """Prompts up to 64 tokens take the decode kernel, longer ones flash attention, on gathered keys after a prefix."""
    prompts = random_prompts(LENGTHS, VOCAB)
    model = smollm2()
    exact = own_logits(model, "eager", prompts)
    model = model.to(torch.bfloat16)
    allowed = torch.maximum(*(distances(own_logits(model, name, prompts), exact) for name in ("sdpa", "eager")))
    served = prepare("smollm2 shape", model)
    limits = RunnerLimits(512, 8, 512, 1024, graphs=False)
    rig = CudaRig(device, served, 16, budget, limits)
    forward = Recording(compiled(served, compile_=compile_))
    rig.forward = forward
    ours = []
    for prompt in prompts:
        rig.generate([prompt], 1)
        ours.append(forward.logits[0].clone())
    assert (distances(ours, exact) <= 1.25 * allowed.max()).all(), (distances(ours, exact), allowed)
