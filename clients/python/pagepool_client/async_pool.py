"""PoolClient for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from pagepool.durations import to_duration
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1.pool_service_pb2_grpc import PoolServiceStub
from pagepool.memd.v1.types_pb2 import Block, BlockState, BlockTable, Pool
from pagepool_client.async_lease import AsyncPoolLease
from pagepool_client.channels import answered, channel_options, default_target, dialled
from pagepool_client.lease_words import Retention, pin_prefix, unpin_prefix
from pagepool_client.pool import DEFAULT_TIMEOUT_S
from pagepool_client.streams import AsyncServerStream


class AsyncPoolClient:
    """A client of memd at `target` (unix:PATH or HOST:PORT; memd's default socket if not given).

    For one event loop, and made in it. Every call raises PagepoolError; unary calls end after `timeout_s`. Use it in an
    `async with` block or close it. Over TCP, memd refuses whatever changes the pool.
    """

    def __init__(self, target: str | None = None, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        self.target = target or default_target("memd")
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(dialled(self.target), options=channel_options())
        self._stub = PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def call(self, method: str, request: Any) -> Any:
        """One unary call of PoolService by its name."""
        return await answered(getattr(self._stub, method)(request, timeout=self._timeout_s), self.target)

    async def pool(self) -> Pool:
        """The pool as it is now."""
        pool: Pool = (await self.call("GetPool", pb.GetPoolRequest())).pool
        return pool

    async def blocks(self, state: BlockState | None = None, *, page_size: int = 0) -> AsyncIterator[Block]:
        """All blocks by rising id, fetched a page at a time; only those in `state` if it is given."""
        request = pb.ListBlocksRequest(page_size=page_size, state=state)
        while True:
            page = await self.call("ListBlocks", request)
            for block in page.blocks:
                yield block
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def block(self, block_id: int, *, epoch: int = 0) -> Block:
        """One block. NOT_FOUND if it is gone."""
        block: Block = (await self.call("GetBlock", pb.GetBlockRequest(block_id=block_id, epoch=epoch))).block
        return block

    async def tables(self, *, page_size: int = 0) -> AsyncIterator[BlockTable]:
        """All block tables by rising id, without token ids, fetched a page at a time."""
        request = pb.ListBlockTablesRequest(page_size=page_size)
        while True:
            page = await self.call("ListBlockTables", request)
            for table in page.block_tables:
                yield table
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def table(self, table_id: int, *, epoch: int = 0) -> BlockTable:
        """One block table with its token ids. NOT_FOUND if it is gone."""
        request = pb.GetBlockTableRequest(table_id=table_id, epoch=epoch)
        table: BlockTable = (await self.call("GetBlockTable", request)).block_table
        return table

    def watch(self, min_interval_s: float = 0.1) -> AsyncServerStream[Pool]:
        """The pool now, and after each change. Cancelled when it is closed or dropped."""
        call = self._stub.WatchPool(pb.WatchPoolRequest(min_interval=to_duration(min_interval_s)))
        return AsyncServerStream(call, lambda answer: answer.pool, self.target)

    async def pin_prefix(
        self, token_ids: Sequence[int], retention: Retention, *, salt: bytes = b""
    ) -> pb.PinPrefixResponse:
        """Keep the blocks of a prefix that the pool has, whoever computed it; NOT_FOUND if it has none.

        It belongs to no lease: it ends with its time, or by `unpin_prefix`.
        """
        answer: pb.PinPrefixResponse = await self.call("PinPrefix", pin_prefix(token_ids, salt, retention))
        return answer

    async def unpin_prefix(self, token_ids: Sequence[int], *, salt: bytes = b"") -> pb.UnpinPrefixResponse:
        """Let the blocks of a prefix be evicted like all others."""
        answer: pb.UnpinPrefixResponse = await self.call("UnpinPrefix", unpin_prefix(token_ids, salt))
        return answer

    async def lease(self, *, ttl_s: float = 30.0, holder: str = "") -> AsyncPoolLease:
        """A lease, which renews itself until it is released: `async with await client.lease() as lease`.

        What it holds is freed when it ends: on release, or `ttl_s` (1 second to 1 hour) after it was dropped or this
        process has died.
        """
        return await AsyncPoolLease.create(self.call, ttl_s, holder)

    async def close(self) -> None:
        """Close the channel; what runs on it is cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
