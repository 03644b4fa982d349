"""A pool, and a worker that serves requests on it one after the other, for the tests of prefix reuse."""

from __future__ import annotations

from collections.abc import Sequence

from memd.core.geometry import Geometry
from memd.core.pool import Pool
from memd.core.values import Commit, Grant, Step, TableRequest
from pagekernels.layout import Format, LayerShape

B = 8


class Worker:
    """A worker that serves one request a call."""

    def __init__(self, pool: Pool, lock: str = "lock") -> None:
        self.pool = pool
        self.lease = pool.attach("worker", lock, 1e6, 0.0).lease.lease_id
        self.steps = 0

    def step(self, **batch: Sequence[object]) -> Sequence[Grant]:
        self.steps += 1
        return self.pool.step(self.lease, Step(self.steps, **batch), 0.0).grants  # type: ignore[arg-type]

    def create(self, tokens: Sequence[int], num_blocks: int, salt: bytes = b"", *, no_match: bool = False) -> Grant:
        return self.step(creates=[TableRequest(tokens, num_blocks, salt, no_match=no_match)])[0]

    def serve(
        self, tokens: Sequence[int], salt: bytes = b"", *, no_match: bool = False, release: bool = False
    ) -> Grant:
        granted = self.create(tokens, -(-len(tokens) // B), salt, no_match=no_match)
        self.step(commits=[Commit(granted.table_id, tokens[granted.cached_tokens :])])
        if release:
            self.step(releases=[granted.table_id])
        return granted


def a_pool(num_blocks: int = 8, model: bytes = b"w") -> Pool:
    pool = Pool(7, B, 1 << 30, num_blocks)
    pool.declare(Geometry((LayerShape(1, 8, 8),), Format.F32, False, 1, model * 32, "model"))
    return pool
