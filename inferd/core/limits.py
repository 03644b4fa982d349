"""What an engine takes on at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.core.speculation import MAX_SPECULATE_TOKENS
from pagepool.errors import invalid_field

SCORED_ROWS = 128
"""Rows of a step whose logits are kept for prompt logprobs: 128 MB of them for a vocabulary of 256 Ki tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch_tokens per step, of at most max_num_seqs sequences; max_queue requests may wait beyond those that run.

    Without chunked_prefix no request takes from the pool what it has of its prompt: all of it is computed.
    speculate_tokens are the most that a sequence guesses a step where its request does not say; 0 is none.
    With exact no KV of a request is stored lossily, where the request does not say.
    A request waits up to prefix_wait_s for a prefix that another one is computing, 0: not at all.
    PagepoolError (INVALID_FIELD, naming the flag) where no step could be built.
    """

    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    max_queue: int = 1024
    speculate_tokens: int = 0
    chunked_prefix: bool = True
    prefix_wait_s: float = 10.0
    exact: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise invalid_field("--max-num-seqs", self.max_num_seqs, "at least 1", "64 is the default")
        if self.max_batch_tokens < self.max_num_seqs:
            limit = f"at least --max-num-seqs ({self.max_num_seqs}), one token for each sequence that decodes"
            raise invalid_field("--max-batch-tokens", self.max_batch_tokens, limit, "raise it, or lower --max-num-seqs")
        if self.max_queue < 0:
            raise invalid_field("--max-queue", self.max_queue, "0 or more", "0 refuses whatever cannot run at once")
        if not 0 <= self.speculate_tokens <= MAX_SPECULATE_TOKENS:
            limit = f"0 to {MAX_SPECULATE_TOKENS}"
            raise invalid_field("--speculate-tokens", self.speculate_tokens, limit, "0 is off")
