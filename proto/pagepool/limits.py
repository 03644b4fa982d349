"""Limits of what a request may say, the same for memd, for workers and for clients. Standard library only."""

from __future__ import annotations

from pagepool.errors import invalid_field

MAX_SALT_BYTES = 64
MAX_PRIORITY = 100
"""Priorities go from its negative to it; 0 is everybody's."""

MAX_STEP_REFERENCES = 65_536
"""What a worker's step may cost memd, in references to blocks that it adds or drops: some 50 ms, for others wait.

Its commits, operations, releases and freed blocks count. The first of the latter three may cost more if nothing else
does, for a table may have more blocks; commits may not.
"""
OPERATION_REFERENCES = 16
"""What each of these costs beside its references, and again for each block of the reserve that it names.

And for a commit each block that it writes to.
"""
MAX_COMMIT_BLOCKS = MAX_STEP_REFERENCES // OPERATION_REFERENCES
"""Blocks that the commits of one step may write to: 64 Ki tokens, 16 a block."""
MAX_STEP_REQUESTS = 256
"""Requests for blocks in a worker's step: each may match a long prompt, or look through all tables for one to yield."""

PRIORITY_RANGE = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"


def check_salt(field: str, salt: bytes) -> None:
    """INVALID_FIELD if a salt is too long."""
    if len(salt) > MAX_SALT_BYTES:
        raise invalid_field(field, f"{len(salt)} bytes long", f"at most {MAX_SALT_BYTES} bytes", "use a digest of it")


def check_priority(field: str, priority: int) -> None:
    """INVALID_FIELD if a priority is none."""
    if not is_priority(priority):
        raise invalid_field(field, priority, PRIORITY_RANGE, "0 is everybody's, higher is more urgent")


def num_blocks_written(num_tokens: int, count: int, block_size: int) -> int:
    """Blocks that a commit of `count` tokens writes to, after which its table has `num_tokens`; none counts as one."""
    return max(-(-num_tokens // block_size) - (num_tokens - count) // block_size, 1)


def is_priority(priority: int) -> bool:
    """Whether a number is a priority."""
    return -MAX_PRIORITY <= priority <= MAX_PRIORITY
