"""What the engine needs from the outside, as Protocols: the pool, the model and the clock.

`pagepool_client.session.PoolSession` is the KvPool of a running worker; tests use memd's core in process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagepool.pool_values import (
    Capacity,
    Commit,
    Draining,
    Grant,
    Lost,
    PoolEvent,
    PoolInfo,
    Refusal,
    Remap,
    Step,
    TableRequest,
    Victim,
)

__all__ = [
    "BlockCopy",
    "Capacity",
    "Commit",
    "Draining",
    "Grant",
    "KvPool",
    "Lost",
    "PoolEvent",
    "PoolInfo",
    "Refusal",
    "Remap",
    "Step",
    "StepInput",
    "TableRequest",
    "Target",
    "Victim",
]


class KvPool(Protocol):
    """A worker's view of memd. Called from the engine's thread only; never blocks on memd but in `wait`."""

    @property
    def info(self) -> PoolInfo:
        """The pool this session is attached to."""

    @property
    def fenced(self) -> bool:
        """Whether memd has ended the lease, so that what steps read may be another's: their output is to be dropped."""

    def submit(self, step: Step) -> None:
        """Send one step message; answers come as events."""

    def poll(self) -> list[PoolEvent]:
        """Events since the last call, in order; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an event; False on time-out."""


@dataclass(frozen=True, slots=True)
class Target:
    """A token whose logprob is wanted, with the `top` likeliest, under the logits of row `row` of a step's tokens."""

    row: int
    token_id: int
    top: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block to copy before anything else is written: its packed entry, and that of the block that it is copied to."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward over packed, padding-free sequences; T tokens of S sequences.

    token_ids    [T]; -1 - r stands for the token that the step launched just before samples from logit_rows[r]: it
                 need not be known on the host. If it is -1 (logits not finite), any id will do: nobody wants the result
    positions    [T]
    slots        [T]; pagekernels.layout.slot_mapping of each token's position, negative: its KV is not written
    q_lens       [S]; query tokens of each sequence
    kv_lens      [S]; tokens to attend to, this step's included
    tables       [S]; packed entries of each sequence's block table, the same object as long as they do not change
    logit_rows   rows of T from which a token is sampled
    targets      whose logprobs are wanted; empty unless the model's pending steps are inferd.surroundings.Scoring
    copies       blocks to copy before the step writes anything
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    tables: Sequence[Sequence[int]]
    logit_rows: Sequence[int]
    targets: Sequence[Target] = ()
    copies: Sequence[BlockCopy] = ()
