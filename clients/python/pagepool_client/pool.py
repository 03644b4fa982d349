"""memd for people and programs: look into the pool, and hold blocks and block tables under a lease of one's own.

Blocks, tables, pools and leases are the messages of `pagepool.memd.v1.types_pb2` themselves: the protos document every
field, and there is no second set of classes to keep in step with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from pagepool.durations import to_duration
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1.pool_service_pb2_grpc import PoolServiceStub
from pagepool.memd.v1.types_pb2 import Block, BlockState, BlockTable, Pool
from pagepool_client.channels import channel_options, default_target, dialled, failures
from pagepool_client.lease import PoolLease
from pagepool_client.lease_words import Retention, pin_prefix, unpin_prefix
from pagepool_client.streams import ServerStream

DEFAULT_TIMEOUT_S = 10.0


class PoolClient:
    """A client of memd at `target` (unix:PATH or HOST:PORT; memd's default socket if not given).

    Thread-safe. Every call raises PagepoolError; unary calls end after `timeout_s`. Use it in a `with` block or close
    it. Over TCP, memd refuses whatever changes the pool.
    """

    def __init__(self, target: str | None = None, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        self.target = target or default_target("memd")
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(dialled(self.target), options=channel_options())
        self._stub = PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any) -> Any:
        """One unary call of PoolService by its name."""
        with failures(self.target):
            return getattr(self._stub, method)(request, timeout=self._timeout_s)

    def pool(self) -> Pool:
        """The pool as it is now."""
        pool: Pool = self.call("GetPool", pb.GetPoolRequest()).pool
        return pool

    def blocks(self, state: BlockState | None = None, *, page_size: int = 0) -> Iterator[Block]:
        """All blocks by rising id, fetched a page at a time; only those in `state` if it is given."""
        request = pb.ListBlocksRequest(page_size=page_size, state=state)
        while True:
            page = self.call("ListBlocks", request)
            yield from page.blocks
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def block(self, block_id: int, *, epoch: int = 0) -> Block:
        """One block. NOT_FOUND if it is gone."""
        block: Block = self.call("GetBlock", pb.GetBlockRequest(block_id=block_id, epoch=epoch)).block
        return block

    def tables(self, *, page_size: int = 0) -> Iterator[BlockTable]:
        """All block tables by rising id, without token ids, fetched a page at a time."""
        request = pb.ListBlockTablesRequest(page_size=page_size)
        while True:
            page = self.call("ListBlockTables", request)
            yield from page.block_tables
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def table(self, table_id: int, *, epoch: int = 0) -> BlockTable:
        """One block table with its token ids. NOT_FOUND if it is gone."""
        request = pb.GetBlockTableRequest(table_id=table_id, epoch=epoch)
        table: BlockTable = self.call("GetBlockTable", request).block_table
        return table

    def watch(self, min_interval_s: float = 0.1) -> ServerStream[Pool]:
        """The pool now, and after each change. Cancelled when it is closed or dropped."""
        call = self._stub.WatchPool(pb.WatchPoolRequest(min_interval=to_duration(min_interval_s)))
        return ServerStream(call, lambda answer: answer.pool, self.target)

    def pin_prefix(self, token_ids: Sequence[int], retention: Retention, *, salt: bytes = b"") -> pb.PinPrefixResponse:
        """Keep the blocks of a prefix that the pool has, whoever computed it; NOT_FOUND if it has none.

        It belongs to no lease: it ends with its time, or by `unpin_prefix`.
        """
        answer: pb.PinPrefixResponse = self.call("PinPrefix", pin_prefix(token_ids, salt, retention))
        return answer

    def unpin_prefix(self, token_ids: Sequence[int], *, salt: bytes = b"") -> pb.UnpinPrefixResponse:
        """Let the blocks of a prefix be evicted like all others."""
        answer: pb.UnpinPrefixResponse = self.call("UnpinPrefix", unpin_prefix(token_ids, salt))
        return answer

    def lease(self, *, ttl_s: float = 30.0, holder: str = "") -> PoolLease:
        """A lease, which renews itself until it is released: use it in a `with` block.

        What it holds is freed when it ends: on release, when it is dropped, or `ttl_s` (1 second to 1 hour) after
        this process has died.
        """
        return PoolLease(self.call, ttl_s, holder)

    def close(self) -> None:
        """Close the channel; what runs on it is cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
