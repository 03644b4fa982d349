"""The requests of a client's lease, built once for the sync and the async client."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pagepool.durations import to_duration
from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2 as pool


def request_id() -> str:
    """A name for one change, so that a repeated call changes nothing twice."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Retention:
    """How a prefix is kept, for `ttl_s` (1 second to 24 hours): not evicted, or by a priority from -100 to 100."""

    ttl_s: float
    pinned: bool = True
    priority: int = 0


class LeaseWords:
    """Requests under one lease. Each change has a request id of its own."""

    def __init__(self, epoch: int, lease_id: int) -> None:
        self.epoch, self.lease_id = epoch, lease_id

    def renew(self) -> pool.RenewLeaseRequest:
        """More time."""
        return pool.RenewLeaseRequest(epoch=self.epoch, lease_id=self.lease_id)

    def release(self) -> pool.ReleaseLeaseRequest:
        """The end."""
        return pool.ReleaseLeaseRequest(epoch=self.epoch, lease_id=self.lease_id)

    def allocate(self, num_blocks: int) -> pool.AllocateBlocksRequest:
        """New blocks."""
        return pool.AllocateBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, num_blocks=num_blocks
        )

    def free(self, block_ids: Sequence[int]) -> pool.FreeBlocksRequest:
        """References dropped."""
        return pool.FreeBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, block_ids=block_ids
        )

    def share(self, block_ids: Sequence[int]) -> pool.ShareBlocksRequest:
        """References added."""
        return pool.ShareBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, block_ids=block_ids
        )

    def create_table(
        self, token_ids: Sequence[int], num_blocks: int, salt: bytes, priority: int
    ) -> pool.CreateBlockTableRequest:
        """A table over the longest sealed prefix."""
        return pool.CreateBlockTableRequest(
            request_id=request_id(),
            epoch=self.epoch,
            lease_id=self.lease_id,
            token_ids=token_ids,
            num_blocks=num_blocks,
            salt=salt,
            priority=priority,
        )

    def extend_table(self, table_id: int, num_blocks: int) -> pool.ExtendBlockTableRequest:
        """More blocks at a table's end."""
        return pool.ExtendBlockTableRequest(
            request_id=request_id(),
            epoch=self.epoch,
            lease_id=self.lease_id,
            table_id=table_id,
            num_blocks=num_blocks,
        )

    def copy(self, block_ids: Sequence[int]) -> pool.CopyBlocksRequest:
        """Copies of blocks."""
        return pool.CopyBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, block_ids=block_ids
        )

    def compress(self, block_ids: Sequence[int]) -> pool.CompressBlocksRequest:
        """FP8 blocks."""
        return pool.CompressBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, block_ids=block_ids
        )

    def decompress(self, block_ids: Sequence[int]) -> pool.DecompressBlocksRequest:
        """Blocks of the native format."""
        return pool.DecompressBlocksRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, block_ids=block_ids
        )

    def fork_table(self, table_id: int) -> pool.ForkBlockTableRequest:
        """A table that shares another one's blocks."""
        return pool.ForkBlockTableRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, table_id=table_id
        )

    def truncate_table(self, table_id: int, num_tokens: int) -> pool.TruncateBlockTableRequest:
        """A table without its tokens from a length on."""
        return pool.TruncateBlockTableRequest(
            request_id=request_id(),
            epoch=self.epoch,
            lease_id=self.lease_id,
            table_id=table_id,
            num_tokens=num_tokens,
        )

    def release_table(self, table_id: int) -> pool.ReleaseBlockTableRequest:
        """A table's end."""
        return pool.ReleaseBlockTableRequest(
            request_id=request_id(), epoch=self.epoch, lease_id=self.lease_id, table_id=table_id
        )


def pin_prefix(token_ids: Sequence[int], salt: bytes, retention: Retention) -> pool.PinPrefixRequest:
    """A prefix to be kept."""
    return pool.PinPrefixRequest(
        request_id=request_id(),
        token_ids=token_ids,
        salt=salt,
        priority=retention.priority,
        pinned=retention.pinned,
        ttl=to_duration(retention.ttl_s),
    )


def unpin_prefix(token_ids: Sequence[int], salt: bytes) -> pool.UnpinPrefixRequest:
    """A prefix not to be kept any more."""
    return pool.UnpinPrefixRequest(request_id=request_id(), token_ids=token_ids, salt=salt)


def create_lease(ttl_s: float, holder: str) -> pool.CreateLeaseRequest:
    """A new lease."""
    return pool.CreateLeaseRequest(request_id=request_id(), ttl=to_duration(ttl_s), holder=holder)


def is_over(error: PagepoolError) -> bool:
    """Whether a failed renewal means that the lease has ended; any other may work the next time."""
    return error.reason in {Reason.LEASE_NOT_FOUND, Reason.EPOCH_MISMATCH}
