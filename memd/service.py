"""PoolService: every method decodes, makes one call of the core, and encodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from memd import limits, messages, paging
from memd.copying import Copier
from memd.core.pool import Pool
from memd.core.values import TableRequest
from memd.recoding import recode
from memd.requests import RequestMemory
from memd.sessions import Sessions, draining_error
from pagepool.durations import to_seconds, to_timestamp
from pagepool.errors import PagepoolError, Reason, invalid_field
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2

_POLL_S = (0.01, 0.1)
_AT_ONCE = 200

Answer = TypeVar("Answer", bound=Message)


@dataclass(slots=True)
class MemdLife:
    """What the PoolServices of one memd life share. `start_time` is wall-clock; `cuda_device` None is shared memory."""

    pool: Pool
    clock: Callable[[], float]
    start_time: float
    sessions: Sessions
    copier: Copier
    cuda_device: types_pb2.CudaDevice | None = None
    requests: RequestMemory = field(default_factory=RequestMemory)


class PoolService:
    """The pool as an API. A read-only one refuses what changes the pool and shows no token ids."""

    def __init__(self, life: MemdLife, *, read_only: bool) -> None:
        self._life = life
        self._pool = life.pool
        self._read_only = read_only

    async def get_pool(self, _request: pb.GetPoolRequest, _context: Any) -> pb.GetPoolResponse:
        """The pool as it is now."""
        return pb.GetPoolResponse(pool=self._pool_message())

    async def list_blocks(self, request: pb.ListBlocksRequest, _context: Any) -> pb.ListBlocksResponse:
        """A page of blocks by rising id."""
        size = paging.page_size(request.page_size, 1000, 10_000)
        state = limits.block_state(request.state)
        after = paging.decode(request.page_token, b"B", request.state, self._pool.require_epoch)
        page: paging.Page[types_pb2.Block] = paging.Page(b"B", request.state, self._pool.epoch, size)
        while last := self._pool.block_id_after(after, min(page.room, _AT_ONCE) if state is None else _AT_ONCE):
            views = self._pool.blocks_between(after, last, state, self._life.clock())
            all(page.add(messages.block_message(view)) for view in views)
            if page.is_full:
                break
            after = last
            await asyncio.sleep(0)  # a large page must not keep workers waiting
        token = page.next_token(page.messages[-1].block_id if page.messages else 0)
        return pb.ListBlocksResponse(blocks=page.messages, next_page_token=token, epoch=self._pool.epoch)

    async def get_block(self, request: pb.GetBlockRequest, _context: Any) -> pb.GetBlockResponse:
        """One block."""
        self._require_epoch_if_given(request.epoch)
        view = self._pool.block(request.block_id, self._life.clock())
        return pb.GetBlockResponse(block=messages.block_message(view), epoch=self._pool.epoch)

    async def list_block_tables(self, request: pb.ListBlockTablesRequest, _context: Any) -> pb.ListBlockTablesResponse:
        """A page of block tables by rising id."""
        size = paging.page_size(request.page_size, 100, 1000)
        after = paging.decode(request.page_token, b"T", 0, self._pool.require_epoch)
        page: paging.Page[types_pb2.BlockTable] = paging.Page(b"T", 0, self._pool.epoch, size)
        for view in self._pool.tables_after(after, page.room, self._life.clock()):
            if not page.add(messages.table_message(view)):
                break
            await asyncio.sleep(0)  # one may have very many blocks
        token = page.next_token(page.messages[-1].table_id if page.messages else 0)
        return pb.ListBlockTablesResponse(block_tables=page.messages, next_page_token=token, epoch=self._pool.epoch)

    async def get_block_table(self, request: pb.GetBlockTableRequest, _context: Any) -> pb.GetBlockTableResponse:
        """One block table; its token ids only where they may be seen."""
        self._require_epoch_if_given(request.epoch)
        view = self._pool.table(request.table_id, self._life.clock())
        table = messages.table_message(view, () if self._read_only else view.token_ids)
        return pb.GetBlockTableResponse(block_table=table, epoch=self._pool.epoch)

    async def watch_pool(self, request: pb.WatchPoolRequest, _context: Any) -> AsyncIterator[pb.WatchPoolResponse]:
        """The pool now, and after each change, at most once an interval."""
        interval = limits.interval(request.min_interval)
        poll = min(max(interval, _POLL_S[0]), _POLL_S[1])
        while True:
            version, sent = self._pool.version, self._life.clock()
            yield pb.WatchPoolResponse(pool=self._pool_message())
            while self._pool.version == version or self._life.clock() < sent + interval:
                if self._life.sessions.draining:
                    raise draining_error()
                await asyncio.sleep(poll)

    async def create_lease(self, request: pb.CreateLeaseRequest, _context: Any) -> pb.CreateLeaseResponse:
        """A lease for a client."""

        def call(now: float) -> pb.CreateLeaseResponse:
            if not request.HasField("ttl"):
                raise invalid_field("ttl", "not set", "above 0", "say how long the lease shall live without a renewal")
            if self._life.sessions.draining:
                raise draining_error()
            lease = self._pool.create_lease(request.holder, to_seconds(request.ttl), now)
            return pb.CreateLeaseResponse(lease=messages.lease_message(lease, now), epoch=self._pool.epoch)

        return self._changing(request, call)

    async def renew_lease(self, request: pb.RenewLeaseRequest, _context: Any) -> pb.RenewLeaseResponse:
        """More time for a lease."""

        def call(now: float) -> pb.RenewLeaseResponse:
            lease = self._pool.renew_lease(request.lease_id, now)
            return pb.RenewLeaseResponse(lease=messages.lease_message(lease, now))

        return self._changing(request, call)

    async def release_lease(self, request: pb.ReleaseLeaseRequest, _context: Any) -> pb.ReleaseLeaseResponse:
        """The end of a lease."""

        def call(now: float) -> pb.ReleaseLeaseResponse:
            self._pool.release_lease(request.lease_id, now)
            return pb.ReleaseLeaseResponse()

        return self._changing(request, call)

    async def allocate_blocks(self, request: pb.AllocateBlocksRequest, _context: Any) -> pb.AllocateBlocksResponse:
        """Blocks for a lease."""

        def call(now: float) -> pb.AllocateBlocksResponse:
            limits.require_few(request.num_blocks)
            run = self._pool.allocate_blocks(request.lease_id, request.num_blocks, now)
            return pb.AllocateBlocksResponse(block_ids=run.block_ids, entries=run.entries)

        return self._changing(request, call)

    async def free_blocks(self, request: pb.FreeBlocksRequest, _context: Any) -> pb.FreeBlocksResponse:
        """References dropped."""

        def call(now: float) -> pb.FreeBlocksResponse:
            self._pool.free_blocks(request.lease_id, request.block_ids, now)
            return pb.FreeBlocksResponse()

        return self._changing(request, call)

    async def share_blocks(self, request: pb.ShareBlocksRequest, _context: Any) -> pb.ShareBlocksResponse:
        """References added."""

        def call(now: float) -> pb.ShareBlocksResponse:
            self._pool.share_blocks(request.lease_id, request.block_ids, now)
            return pb.ShareBlocksResponse()

        return self._changing(request, call)

    async def copy_blocks(self, request: pb.CopyBlocksRequest, _context: Any) -> pb.CopyBlocksResponse:
        """Blocks copied."""

        def call(now: float) -> pb.CopyBlocksResponse:
            run, copies = self._pool.sharing.copy_blocks(request.lease_id, request.block_ids, now)
            self._life.copier(copies, self._pool.unit_bytes)
            return pb.CopyBlocksResponse(block_ids=run.block_ids, entries=run.entries)

        return self._changing(request, call)

    async def compress_blocks(self, request: pb.CompressBlocksRequest, _context: Any) -> pb.CompressBlocksResponse:
        """Blocks stored as FP8 blocks."""
        self._require_may_change(request)
        return await recode(self._life, request, self._pool.compression.compress, pb.CompressBlocksResponse)

    async def decompress_blocks(
        self, request: pb.DecompressBlocksRequest, _context: Any
    ) -> pb.DecompressBlocksResponse:
        """Blocks stored in the native format."""
        self._require_may_change(request)
        return await recode(self._life, request, self._pool.compression.decompress, pb.DecompressBlocksResponse)

    async def create_block_table(
        self, request: pb.CreateBlockTableRequest, _context: Any
    ) -> pb.CreateBlockTableResponse:
        """A table, its prefix matched."""

        def call(now: float) -> pb.CreateBlockTableResponse:
            limits.require_few(request.num_blocks)
            asked = TableRequest(
                request.token_ids, request.num_blocks, request.salt, request.priority, exact=request.exact
            )
            view = self._pool.create_table(request.lease_id, asked, now)
            return pb.CreateBlockTableResponse(block_table=messages.table_message(view))

        return self._changing(request, call)

    async def extend_block_table(
        self, request: pb.ExtendBlockTableRequest, _context: Any
    ) -> pb.ExtendBlockTableResponse:
        """More blocks for a table."""

        def call(now: float) -> pb.ExtendBlockTableResponse:
            limits.require_few(request.num_blocks)
            run = self._pool.extend_table(request.lease_id, request.table_id, request.num_blocks, now)
            return pb.ExtendBlockTableResponse(block_ids=run.block_ids, entries=run.entries)

        return self._changing(request, call)

    async def fork_block_table(self, request: pb.ForkBlockTableRequest, _context: Any) -> pb.ForkBlockTableResponse:
        """A table that shares another one's blocks."""

        def call(now: float) -> pb.ForkBlockTableResponse:
            view = self._pool.sharing.fork_table(request.lease_id, request.table_id, now)
            return pb.ForkBlockTableResponse(block_table=messages.table_message(view))

        return self._changing(request, call)

    async def truncate_block_table(
        self, request: pb.TruncateBlockTableRequest, _context: Any
    ) -> pb.TruncateBlockTableResponse:
        """A table without its end."""

        def call(now: float) -> pb.TruncateBlockTableResponse:
            asked = (request.lease_id, request.table_id, request.num_tokens)
            view, copies = self._pool.sharing.truncate_table(*asked, now)
            self._life.copier(copies, self._pool.unit_bytes)
            return pb.TruncateBlockTableResponse(block_table=messages.table_message(view))

        return self._changing(request, call)

    async def release_block_table(
        self, request: pb.ReleaseBlockTableRequest, _context: Any
    ) -> pb.ReleaseBlockTableResponse:
        """The end of a table."""

        def call(now: float) -> pb.ReleaseBlockTableResponse:
            self._pool.release_table(request.lease_id, request.table_id, now)
            return pb.ReleaseBlockTableResponse()

        return self._changing(request, call)

    async def pin_prefix(self, request: pb.PinPrefixRequest, _context: Any) -> pb.PinPrefixResponse:
        """A prefix kept."""

        def call(now: float) -> pb.PinPrefixResponse:
            kept = self._pool.prefixes.pin(messages.pin_from(request), now)
            until = to_timestamp(time.time() + kept.until - now)
            return pb.PinPrefixResponse(num_tokens=kept.num_tokens, num_blocks=kept.num_blocks, expire_time=until)

        return self._changing(request, call)

    async def unpin_prefix(self, request: pb.UnpinPrefixRequest, _context: Any) -> pb.UnpinPrefixResponse:
        """A prefix not kept any more."""

        def call(now: float) -> pb.UnpinPrefixResponse:
            found = self._pool.prefixes.unpin(request.token_ids, request.salt, now)
            return pb.UnpinPrefixResponse(
                num_tokens=found.num_tokens, num_blocks=found.num_blocks, was_kept=found.was_kept
            )

        return self._changing(request, call)

    def _changing(self, request: Any, call: Callable[[float], Answer]) -> Answer:
        """One command: refused on a read-only listener or of another epoch, remembered by its request id."""
        self._require_may_change(request)
        now, named = self._life.clock(), request.DESCRIPTOR.fields_by_name
        request_id = request.request_id if "request_id" in named else ""
        answer = self._life.requests.once(request_id, request, now, lambda: call(now))
        self._life.sessions.publish()
        return answer

    def _require_may_change(self, request: Any) -> None:
        if self._read_only:
            raise read_only_error(request.DESCRIPTOR.name.removesuffix("Request"))
        if "epoch" in request.DESCRIPTOR.fields_by_name:
            self._pool.require_epoch(request.epoch)

    def _require_epoch_if_given(self, epoch: int) -> None:
        if epoch:
            self._pool.require_epoch(epoch)

    def _pool_message(self) -> Any:
        return messages.pool_message(self._pool, self._life.cuda_device, self._life.start_time)


def read_only_error(method: str) -> PagepoolError:
    """A call that TCP does not offer."""
    message = f"{method} is served on memd's Unix socket only, since there is no access control over TCP yet"
    return PagepoolError(Reason.READ_ONLY_LISTENER, message, method=method)
