"""A worker of PyCUDA and PoolSession alone: `python -m tests.gpu.cuda_worker MEMD`, told by lines what to do.

Each line on standard input is a JSON object with "do"; each is answered by a line on standard output. An error of the
vocabulary is answered with its reason and message, and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pagekernels.cuda.identity import open_driver
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagepool.errors import PagepoolError
from pagepool.pool_values import Commit, Draining, Grant, Lost, Step, TableRequest
from pagepool_client import cuda_mapping
from pagepool_client.cuda_mapping import CudaMapping
from pagepool_client.session import Attachment, PoolSession
from pagepool_client.wire import geometry_message

GEOMETRY = geometry_message(PagedLayout(16, (LayerShape(1, 128, 128),), Format.BF16, 2), b"d" * 32, "tiny")


class Worker:
    """One session, and what may be done with it."""

    def __init__(self, target: str, api: Any) -> None:
        self._api = api
        self._target = target
        self._attach()

    def _attach(self) -> None:
        self._session = PoolSession(Attachment(self._target, f"worker-{os.getpid()}", GEOMETRY))
        assert isinstance(self._session.memory, CudaMapping)
        self._memory = self._session.memory

    def hello(self) -> dict[str, Any]:
        info = self._session.info
        return {"epoch": info.epoch, "num_blocks": info.num_blocks, "size": info.slab_bytes, "pid": os.getpid()}

    def write(self, offset: int, byte: int, size: int) -> dict[str, Any]:
        self._api.memset_d8(self._memory.address + offset, byte, size)
        self._api.Context.synchronize()
        return {}

    def read(self, offset: int, size: int) -> dict[str, Any]:
        """The bytes that occur there."""
        seen: set[int] = set()
        piece = bytearray(min(size, 64 << 20))
        for start in range(offset, offset + size, len(piece)):
            self._api.memcpy_dtoh(piece, self._memory.address + start)
            seen |= set(piece[:4096]) | set(piece[-4096:]) if piece.count(piece[0]) == len(piece) else set(piece)
        return {"bytes": sorted(seen)}

    def table(self, num_tokens: int) -> dict[str, Any]:
        """A table of so many tokens, all but the last committed."""
        tokens = list(range(num_tokens))
        self._session.submit(Step(creates=[TableRequest(1, tokens, -(-num_tokens // 16), no_match=True)]))
        grant = self._event(Grant)
        self._session.submit(Step(commits=[Commit(grant.table_id, tokens[:-1])]))
        return {"entries": list(grant.entries)}

    def until_lost(self) -> dict[str, Any]:
        """Waits for the loss of the pool, gives up the mapping, and says so."""
        event = self._event(Lost)
        self._session.close()
        return {"lost": event.message}

    def until_drained(self) -> dict[str, Any]:
        """Waits until memd asks to detach, and does."""
        event = self._event(Draining)
        self._session.close()
        return {"grace": event.grace_s}

    def reattach(self, times: int) -> dict[str, Any]:
        """Detaches and attaches again and again; what this process sees free of the GPU before and after."""
        before, _ = self._api.mem_get_info()
        for _ in range(times):
            self._session.close()
            self._attach()
        after, _ = self._api.mem_get_info()
        return {"leases": self._session.info.lease_id, "lost_bytes": before - after}

    def close(self) -> dict[str, Any]:
        self._session.close()
        return {"address": self._memory.address}

    def _event(self, kind: type) -> Any:
        while True:
            self._session.wait(20)
            events = self._session.poll()
            assert events, f"no {kind.__name__} within 20 s"
            for event in events:
                if isinstance(event, kind):
                    return event


def serve(target: str, api: Any) -> None:
    worker = Worker(target, api)
    tell(worker.hello())
    for line in sys.stdin:
        words = json.loads(line)
        work: Callable[..., dict[str, Any]] = getattr(worker, words.pop("do"))
        tell(work(**words))
    worker.close()


def tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(target: str, *flags: str) -> int:
    if "--blindly" in flags:  # to see what CUDA itself says
        cuda_mapping.require_other_pid = lambda _: None
    api = open_driver().api
    context = api.Device(0).retain_primary_context()
    context.push()
    try:
        serve(target, api)
    except PagepoolError as error:
        tell({"error": str(error.reason), "message": error.message})
        return 3
    finally:
        context.pop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
