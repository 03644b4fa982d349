"""A client's lease on blocks and block tables, renewed in the background."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from pagepool.durations import to_seconds
from pagepool.errors import PagepoolError
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1.types_pb2 import BlockTable, Lease
from pagepool_client.lease_words import LeaseWords, create_lease, is_over

Call = Callable[[str, Any], Any]
"""A unary call of PoolService by name; raises PagepoolError."""


class PoolLease:
    """Blocks and block tables held by a client. Made by PoolClient.lease; thread-safe.

    It is renewed three times in its time-to-live. If it is lost all the same (no renewal came through until its end, or
    memd restarted), every later call raises the error that says why. `epoch` and `lease_id` name it in other calls.
    """

    def __init__(self, call: Call, ttl_s: float, holder: str) -> None:
        answer = call("CreateLease", create_lease(ttl_s, holder))
        self.epoch: int = answer.epoch
        self.lease_id: int = answer.lease.lease_id
        self._call = call
        self._words = LeaseWords(self.epoch, self.lease_id)
        self._renewal = Renewal(call, self._words, answer.lease)
        weakref.finalize(self, self._renewal.over.set)

    @property
    def lease(self) -> Lease:
        """The lease as of its last renewal."""
        return self._renewal.lease

    def allocate(self, num_blocks: int) -> pb.AllocateBlocksResponse:
        """New blocks, unsealed, with one reference each; all or nothing."""
        answer: pb.AllocateBlocksResponse = self._change("AllocateBlocks", self._words.allocate(num_blocks))
        return answer

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference for each listed id; all or nothing."""
        self._change("FreeBlocks", self._words.free(block_ids))

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each listed block; all or nothing."""
        self._change("ShareBlocks", self._words.share(block_ids))

    def copy(self, block_ids: Sequence[int]) -> pb.CopyBlocksResponse:
        """Copies of blocks, contents and committed tokens, as new blocks of the lease; all or nothing."""
        answer: pb.CopyBlocksResponse = self._change("CopyBlocks", self._words.copy(block_ids))
        return answer

    def compress(self, block_ids: Sequence[int]) -> Sequence[pb.Compression]:
        """Have a worker store sealed blocks, whoever has them, as FP8 blocks; what became of each.

        A block that would lose too much stays as it is.
        """
        answer: pb.CompressBlocksResponse = self._change("CompressBlocks", self._words.compress(block_ids))
        return answer.compressions

    def decompress(self, block_ids: Sequence[int]) -> Sequence[pb.Compression]:
        """Have a worker store FP8 blocks in the native format; they do not become exact."""
        answer: pb.DecompressBlocksResponse = self._change("DecompressBlocks", self._words.decompress(block_ids))
        return answer.compressions

    def create_table(
        self, token_ids: Sequence[int] = (), num_blocks: int = 0, *, salt: bytes = b"", priority: int = 0
    ) -> BlockTable:
        """A table over the longest sealed prefix of the tokens, with blocks added up to `num_blocks` in all."""
        request = self._words.create_table(token_ids, num_blocks, salt, priority)
        table: BlockTable = self._change("CreateBlockTable", request).block_table
        return table

    def extend_table(self, table_id: int, num_blocks: int) -> pb.ExtendBlockTableResponse:
        """More blocks at a table's end; all or nothing."""
        request = self._words.extend_table(table_id, num_blocks)
        answer: pb.ExtendBlockTableResponse = self._change("ExtendBlockTable", request)
        return answer

    def fork_table(self, table_id: int) -> BlockTable:
        """A table that shares all blocks of another one of the lease."""
        table: BlockTable = self._change("ForkBlockTable", self._words.fork_table(table_id)).block_table
        return table

    def truncate_table(self, table_id: int, num_tokens: int) -> BlockTable:
        """The table without its committed tokens from `num_tokens` on; inside a shared block by copy."""
        request = self._words.truncate_table(table_id, num_tokens)
        table: BlockTable = self._change("TruncateBlockTable", request).block_table
        return table

    def release_table(self, table_id: int) -> None:
        """Release a table: its sealed blocks stay cached."""
        self._change("ReleaseBlockTable", self._words.release_table(table_id))

    def release(self) -> None:
        """End the lease and free what it holds. Idempotent; a lease that is over already is no error."""
        self._renewal.over.set()
        self._renewal.thread.join()

    def _change(self, method: str, request: Any) -> Any:
        if self._renewal.failure is not None:
            raise self._renewal.failure
        return self._call(method, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Renewal:
    """Renews a lease until `over` is set, then releases it. Knows nothing of the lease object, so it can be dropped."""

    def __init__(self, call: Call, words: LeaseWords, lease: Lease) -> None:
        self._call, self._words, self.lease = call, words, lease
        self.over = threading.Event()
        self.failure: PagepoolError | None = None
        self.thread = threading.Thread(target=self._run, name="pagepool-lease", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self.failure is None and not self.over.wait(to_seconds(self.lease.ttl) / 3):
                self._renew()
            if self.failure is None:
                self._call("ReleaseLease", self._words.release())
        except ValueError:
            pass  # grpc's word for a closed channel: the lease ends with its time-to-live
        except PagepoolError as error:
            self.failure = error

    def _renew(self) -> None:
        try:
            self.lease = self._call("RenewLease", self._words.renew()).lease
        except PagepoolError as error:
            if is_over(error):
                self.failure = error
