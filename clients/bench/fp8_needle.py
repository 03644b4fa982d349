"""A needle in a haystack: whether a number that a text says in passing is still found when its blocks are FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8_context import Context, Policy, greedy

from inferd.text.tokenizer import Tokenizer

NUMBER = "48213"
NEEDLE = f"The secret number of Marbury is {NUMBER}."
QUESTION = "Question: What is the secret number of Marbury?\n\nAnswer: The secret number of Marbury is"
"""The model answers this. Asked by its chat template it speaks of the Constitution instead, with 16-bit blocks too."""
DEPTHS = (0.1, 0.5, 0.9)
NEW_TOKENS = 8

MakeContext = Callable[[Policy, int], Context]
"""A context under a policy, of so many tokens at most."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text with a needle: its token ids, and how deep the needle lies in the haystack."""

    depth: float
    token_ids: list[int]


def prompts(tokenizer: Tokenizer, text: str, length: int) -> list[Prompt]:
    """The prompts of about `length` tokens: paragraphs of the text with the needle among them, then the question."""
    paragraphs, used = [], 0
    for paragraph in text.strip().split("\n\n"):
        used += len(tokenizer.encode(paragraph + "\n\n"))
        if used > length:
            break
        paragraphs.append(paragraph)
    made = []
    for depth in DEPTHS:
        at = round(depth * len(paragraphs))
        parts = [*paragraphs[:at], NEEDLE, *paragraphs[at:], QUESTION]
        made.append(Prompt(depth, tokenizer.encode("\n\n".join(parts))))
    return made


def answer(tokenizer: Tokenizer, make: MakeContext, policy: Policy, prompt: Prompt, chunk: int) -> str:
    """What the model says, greedily, under a policy."""
    context = make(policy, len(prompt.token_ids) + NEW_TOKENS)
    said = greedy(context, prompt.token_ids, NEW_TOKENS, chunk)
    return tokenizer.decode(said, skip_special_tokens=True).strip()
