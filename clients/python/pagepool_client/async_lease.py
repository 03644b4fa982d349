"""PoolLease for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from pagepool.durations import to_seconds
from pagepool.errors import PagepoolError
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1.types_pb2 import BlockTable, Lease
from pagepool_client.lease_words import LeaseWords, create_lease, is_over

AsyncCall = Callable[[str, Any], Awaitable[Any]]
"""A unary call of PoolService by name; raises PagepoolError."""


class AsyncPoolLease:
    """Blocks and block tables held by a client of one event loop. Made by AsyncPoolClient.lease.

    It is renewed three times in its time-to-live. If it is lost all the same (no renewal came through until its end, or
    memd restarted), every later call raises the error that says why. `epoch` and `lease_id` name it in other calls.
    """

    def __init__(self, call: AsyncCall, granted: pb.CreateLeaseResponse) -> None:
        self.epoch: int = granted.epoch
        self.lease_id: int = granted.lease.lease_id
        self._call = call
        self._words = LeaseWords(self.epoch, self.lease_id)
        self._renewal = AsyncRenewal(call, self._words, granted.lease)
        weakref.finalize(self, _stop_on, asyncio.get_running_loop(), self._renewal).atexit = False

    @classmethod
    async def create(cls, call: AsyncCall, ttl_s: float, holder: str) -> Self:
        """A new lease."""
        return cls(call, await call("CreateLease", create_lease(ttl_s, holder)))

    @property
    def lease(self) -> Lease:
        """The lease as of its last renewal."""
        return self._renewal.lease

    async def allocate(self, num_blocks: int) -> pb.AllocateBlocksResponse:
        """New blocks, unsealed, with one reference each; all or nothing."""
        answer: pb.AllocateBlocksResponse = await self._change("AllocateBlocks", self._words.allocate(num_blocks))
        return answer

    async def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference for each listed id; all or nothing."""
        await self._change("FreeBlocks", self._words.free(block_ids))

    async def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each listed block; all or nothing."""
        await self._change("ShareBlocks", self._words.share(block_ids))

    async def copy(self, block_ids: Sequence[int]) -> pb.CopyBlocksResponse:
        """Copies of blocks, contents and committed tokens, as new blocks of the lease; all or nothing."""
        answer: pb.CopyBlocksResponse = await self._change("CopyBlocks", self._words.copy(block_ids))
        return answer

    async def compress(self, block_ids: Sequence[int]) -> Sequence[pb.Compression]:
        """Have a worker store sealed blocks, whoever has them, as FP8 blocks; what became of each.

        A block that would lose too much stays as it is.
        """
        answer: pb.CompressBlocksResponse = await self._change("CompressBlocks", self._words.compress(block_ids))
        return answer.compressions

    async def decompress(self, block_ids: Sequence[int]) -> Sequence[pb.Compression]:
        """Have a worker store FP8 blocks in the native format; they do not become exact."""
        answer: pb.DecompressBlocksResponse = await self._change("DecompressBlocks", self._words.decompress(block_ids))
        return answer.compressions

    async def create_table(
        self, token_ids: Sequence[int] = (), num_blocks: int = 0, *, salt: bytes = b"", priority: int = 0
    ) -> BlockTable:
        """A table over the longest sealed prefix of the tokens, with blocks added up to `num_blocks` in all."""
        request = self._words.create_table(token_ids, num_blocks, salt, priority)
        table: BlockTable = (await self._change("CreateBlockTable", request)).block_table
        return table

    async def extend_table(self, table_id: int, num_blocks: int) -> pb.ExtendBlockTableResponse:
        """More blocks at a table's end; all or nothing."""
        request = self._words.extend_table(table_id, num_blocks)
        answer: pb.ExtendBlockTableResponse = await self._change("ExtendBlockTable", request)
        return answer

    async def fork_table(self, table_id: int) -> BlockTable:
        """A table that shares all blocks of another one of the lease."""
        table: BlockTable = (await self._change("ForkBlockTable", self._words.fork_table(table_id))).block_table
        return table

    async def truncate_table(self, table_id: int, num_tokens: int) -> BlockTable:
        """The table without its committed tokens from `num_tokens` on; inside a shared block by copy."""
        request = self._words.truncate_table(table_id, num_tokens)
        table: BlockTable = (await self._change("TruncateBlockTable", request)).block_table
        return table

    async def release_table(self, table_id: int) -> None:
        """Release a table: its sealed blocks stay cached."""
        await self._change("ReleaseBlockTable", self._words.release_table(table_id))

    async def release(self) -> None:
        """End the lease and free what it holds. Idempotent; a lease that is over already is no error."""
        self._renewal.over.set()
        await self._renewal.task

    async def _change(self, method: str, request: Any) -> Any:
        if self._renewal.failure is not None:
            raise self._renewal.failure
        return await self._call(method, request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AsyncRenewal:
    """Renews a lease until `over` is set, then releases it. Knows nothing of the lease object, so it can be dropped."""

    def __init__(self, call: AsyncCall, words: LeaseWords, lease: Lease) -> None:
        self._call, self._words, self.lease = call, words, lease
        self.over = asyncio.Event()
        self.failure: PagepoolError | None = None
        self.task = asyncio.create_task(self._run(), name="pagepool-lease")

    async def _run(self) -> None:
        try:
            while self.failure is None and not await self._rested():
                await self._renew()
            if self.failure is None:
                await self._call("ReleaseLease", self._words.release())
        except PagepoolError as error:
            self.failure = error
        except grpc.aio.UsageError:
            pass  # grpc's word for a closed channel: the lease ends with its time-to-live

    async def _rested(self) -> bool:
        """Waits a third of the time-to-live; True if the lease is to end."""
        try:
            await asyncio.wait_for(self.over.wait(), to_seconds(self.lease.ttl) / 3)
        except TimeoutError:
            return False
        return True

    async def _renew(self) -> None:
        try:
            self.lease = (await self._call("RenewLease", self._words.renew())).lease
        except PagepoolError as error:
            if is_over(error):
                self.failure = error


def _stop_on(loop: asyncio.AbstractEventLoop, renewal: AsyncRenewal) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(renewal.over.set)
