"""Block tables."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Table:
    """A sequence's blocks. Its committed token ids stand in the blocks.

    Of n = num_tokens committed tokens, by position in blocks:

        [0, cached_tokens)          found in the prefix index when the table was created
        [cached_tokens, n)          written by the lease that holds it
        [n, len(frames) * B)        granted, not yet written

    The blocks of [0, n // B * B) are sealed; the rest of n is in its one partly written block. What was found may end
    inside a block of the table's own, the copy of a part of another one (Lease.copy_sources).

    A suspended table has no blocks and no committed tokens; `kept` is the packed ids of the tokens that it had and of
    those that were to come next.
    """

    table_id: int
    lease_id: int
    salt: bytes
    priority: int
    touched: float
    frames: array[int] = field(default_factory=lambda: array("I"))
    num_tokens: int = 0
    cached_tokens: int = 0
    arrival: float = 0.0  # of its request, on the host's monotonic clock
    exact: bool = False  # whether none of its blocks may be lossy
    lossy: bool = False  # whether an exact block has replaced a lossy one, which what it writes now may have read
    kept: bytes | None = None
    yielding_since: float | None = None  # when it was named as a victim
    yields: int = 0  # how often it was and let go; of a fork, its origin's too

    def suspend(self, kept: bytes) -> None:
        """Its blocks are on their way back, and so it has yielded."""
        self.yields += self.yielding_since is not None
        self.kept, self.yielding_since = kept, None
