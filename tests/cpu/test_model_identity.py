"""Greedy tokens over the pool equal those of transformers' generate, for every architecture that is served."""

from __future__ import annotations

import pytest

from inferd.model.load import prepare
from tests.cpu.model_configs import SAMPLE, SERVED, VOCAB_SIZE, random_model
from tests.cpu.model_rig import Rig, random_prompts, reference

ALONE, MIXED = (41,), (1, 3, 8, 16, 17, 30, 41, 64)
FEW, MANY = 12, 64
BLOCK_SIZES = (8, 16, 32, 64)


def check_identity(name: str, block_sizes: tuple[int, ...], lengths: tuple[int, ...], new_tokens: int) -> None:
    """Random weights of one architecture, chunked prefill beside decoding neighbours, a poisoned pool."""
    prompts = random_prompts(lengths, VOCAB_SIZE)
    expected = reference(random_model(name), prompts, new_tokens)
    served = prepare(name, random_model(name))
    for block_size in block_sizes:
        rig = Rig(served, block_size)

        assert rig.generate(prompts, new_tokens) == expected, f"block size {block_size}"
        assert max(rig.batches) > len(lengths) // 2


@pytest.mark.parametrize("name", SAMPLE)
def test_tokens_equal_generate_in_a_mixed_batch(name: str) -> None:
    check_identity(name, (16,), MIXED, FEW)


def test_tokens_equal_generate_at_every_block_size() -> None:
    check_identity("llama", BLOCK_SIZES, ALONE, FEW)


@pytest.mark.full
@pytest.mark.parametrize("lengths", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize("name", SERVED)
def test_tokens_equal_generate_everywhere(name: str, lengths: tuple[int, ...]) -> None:
    check_identity(name, BLOCK_SIZES, lengths, MANY)
