"""What a call of PoolService may ask for, where that is no matter of the pool."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from memd.core.values import BlockState
from pagepool.durations import to_seconds
from pagepool.errors import invalid_field

MAX_CALL_BLOCKS = 16_384
"""Blocks that one call may ask for: others wait some 100 ms if all of them have to be evicted first."""

_MAX_INTERVAL_S = 3600.0
_DEFAULT_INTERVAL_S = 0.1


def interval(message: Duration) -> float:
    """Seconds between two messages of a stream; INVALID_FIELD if that is no time to wait."""
    wanted = to_seconds(message)
    if not 0 <= wanted <= _MAX_INTERVAL_S:
        raise invalid_field("min_interval", f"{wanted} s", "from 0 to 1 hour", "leave it out to get 100 ms")
    return wanted or _DEFAULT_INTERVAL_S


def block_state(number: int) -> BlockState | None:
    """The state that blocks are asked for by, None for all; INVALID_FIELD if there is no such state."""
    if number and number not in set(BlockState):
        raise invalid_field("state", number, "a BlockState", "leave it out to get all blocks")
    return BlockState(number) if number else None


def require_few(num_blocks: int) -> None:
    """INVALID_FIELD if a call asks for so many blocks that others would wait too long."""
    if num_blocks > MAX_CALL_BLOCKS:
        limit = f"at most {MAX_CALL_BLOCKS} in one call"
        raise invalid_field("num_blocks", num_blocks, limit, "ask for the rest in further calls")
