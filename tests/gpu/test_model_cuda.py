"""Models on the GPU, over the pool, a step ahead: greedy tokens equal those of transformers' own generate."""

from __future__ import annotations

import pytest
import torch

from inferd.model.cuda_runner import RunnerLimits
from inferd.model.load import prepare
from pagekernels.cuda.device import CudaDevice
from tests.cpu.model_configs import SERVED, VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts
from tests.gpu.model_rig import CudaRig, num_graphs

LENGTHS = (1, 3, 8, 16, 17, 30, 41, 64)
NEW = 24


@torch.inference_mode()
def reference(name: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers says on this GPU, each prompt alone."""
    model = random_model(name).to("cuda")
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(output[0][len(prompt) :].tolist())
    return answers


def check(device: CudaDevice, name: str, block_size: int, limits: RunnerLimits, *, compile_: bool = False) -> None:
    """Random weights of one architecture, chunked prefill beside decoding neighbours, a poisoned pool."""
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    model = random_model(name)
    if not type(model)._supports_attention_backend:
        pytest.skip(f"this transformers has no attention interface for {name}, so it is refused")
    served = prepare(name, model.to("cuda"))
    rig = CudaRig(device, served, block_size, limits=limits, compile_=compile_)
    assert rig.generate(prompts, NEW) == reference(name, prompts, NEW)
    assert num_graphs() == rig.graphs, "something was compiled after the runner was ready"


@pytest.mark.parametrize("name", SERVED)
def test_tokens_equal_generate(device: CudaDevice, name: str) -> None:
    """Launched kernel by kernel, without compilation."""
    check(device, name, 16, RunnerLimits(64, 16, 256, 1024, graphs=False))


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_tokens_equal_generate_at_every_block_size(device: CudaDevice, block_size: int) -> None:
    check(device, "llama", block_size, RunnerLimits(64, 16, 256, 1024, graphs=False))


@pytest.mark.parametrize("name", SERVED)
def test_captured_steps_equal_generate(device: CudaDevice, name: str) -> None:
    """Steps are graphs, replayed with other lengths, tables and sizes; where no graph can hold them, they are not."""
    check(device, name, 16, RunnerLimits(64, 16, 256, 1024))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_compiled_and_captured_steps_equal_generate(device: CudaDevice, name: str) -> None:
    check(device, name, 16, RunnerLimits(64, 16, 256, 1024), compile_=True)


def test_long_chunks_beside_decodes_equal_generate(device: CudaDevice) -> None:
    """More query tokens than the decode kernels take: the paged kernel in float32."""
    prompts = random_prompts((150, 5, 201, 90), VOCAB_SIZE)
    served = prepare("llama", random_model("llama").to("cuda"))
    rig = CudaRig(device, served, 16, 120, RunnerLimits(128, 8, 256, 1024))
    assert rig.generate(prompts, NEW) == reference("llama", prompts, NEW)
