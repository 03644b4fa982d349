"""A pool with FP8 blocks, and workers that say what a worker would; `check` after everything."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from memd.core.extent import HostMemory, Tiers
from memd.core.fp8 import Fp8
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from memd.core.recodes import Outcome, Recode, Recoded, RecodeNews
from memd.core.values import Commit, Grant, Step, StepOutcome, TableRequest
from pagekernels.layout import Format, LayerShape, unpack_entry

B = 8
GEOMETRY = Geometry((LayerShape(1, 8, 8),), Format.BF16, False, 1, b"w" * 32, "model")
GOOD, BAD = 0.02, 0.5


class Worker:
    """A worker of a pool, which takes Remaps and Recodes if it `listens`."""

    def __init__(self, pool: Pool, name: str, *, listens: bool = True) -> None:
        self.pool, self.name, self.listens, self.steps = pool, name, listens, 0
        self.told: list[RecodeNews] = []
        self.lease = pool.attach(name, name, 1e6, 0.0).lease.lease_id
        self._listen(0.0)

    def _listen(self, now: float) -> None:
        if self.listens:
            self.pool.remaps.listen(self.lease, now)
        self.pool.compression.listen(self.lease, now, takes_recodes=self.listens)

    def reclaim(self, now: float) -> None:
        """Its stream broke, and there is a new one."""
        self.pool.stream_broken(self.lease)
        again = self.pool.attach(self.name, self.name, 1e6, now, (self.pool.epoch, self.lease))
        assert again.reclaimed
        self.told = []
        self._listen(now)
        self.pool.check()

    def step(self, now: float = 1.0, **words: object) -> StepOutcome:
        """A step with these words."""
        self.steps += 1
        outcome = self.pool.step(self.lease, Step(self.steps, **words), now)  # type: ignore[arg-type]
        self.pool.check()
        return outcome

    def serve(self, tokens: Sequence[int], now: float = 1.0) -> Grant:
        """A table with these tokens, computed."""
        (grant,) = self.step(now, creates=[TableRequest(tokens, -(-(len(tokens) + 1) // B))]).grants
        self.step(now, commits=[Commit(grant.table_id, tokens[grant.cached_tokens :])])
        return grant

    def acknowledge(self, now: float = 2.5) -> None:
        """Nothing reads what the Remaps until now replaced."""
        news = self.pool.remaps.take_news(self.lease)
        if news:
            self.step(now, acknowledged=news[-1].sequence)

    def hear(self) -> list[RecodeNews]:
        """The Recodes that are not answered."""
        self.told += self.pool.compression.take_news(self.lease)
        return self.told

    def answer(self, now: float = 2.0, *, errors: float | Sequence[float] = GOOD, failed: bool = False) -> Recode:
        """The first one is done: every block has this error, or each has its own."""
        news = self.hear().pop(0)
        to_units = unpack_entry(news.targets[0])[0] is Format.FP8_E4M3
        each = [errors] * len(news.sources) if isinstance(errors, float) else list(errors)
        both = [error for error in each for _ in "kv"] if to_units and not failed else []
        self.step(now, recodings=[Recoded(news.sequence, both, failed)])
        finished = {(one.lease_id, one.sequence): one for one in self.pool.compression.take_finished()}
        recode = finished[self.lease, news.sequence]
        assert recode.is_over
        return recode


def make(
    num_blocks: int = 12,
    fp8: Fp8 | None = Fp8(kept_share=0),  # noqa: B008 (frozen)
    num_host: int = 0,
    *,
    written: bool = False,
) -> tuple[Pool, int]:
    """A pool with FP8 blocks and a host tier of so many, perhaps `written` by workers, and a client's lease."""
    size = num_host * GEOMETRY.layout(B).block_bytes
    host = HostMemory(size, 0, 1 << 30) if written else HostMemory(size)
    pool = Pool(7, B, 1 << 30, num_blocks, tiers=Tiers(fp8, host if num_host else None))
    pool.declare(GEOMETRY)
    return pool, pool.create_lease("me", 1000.0, 0.0).lease_id


def compress(
    pool: Pool,
    lease: int,
    block_ids: Sequence[int],
    workers: Sequence[Worker],
    *,
    errors: float | Sequence[float] = GOOD,
    now: float = 2.0,
) -> list[Outcome]:
    """Asked for, told to a worker, and done by it at once."""
    there, recodes = pool.compression.compress(lease, block_ids, now)
    pool.check()
    for recode in recodes:
        (worker,) = (one for one in workers if one.lease == recode.lease_id)
        assert worker.answer(now, errors=errors) is recode
    return [*there, *(outcome for recode in recodes for outcome in recode.outcomes)]


def move_all(pool: Pool, now: float, *, failed: bool = False) -> int:
    """memd copies all that is to be moved between the tiers; how many blocks."""
    count = len(pool.tiering.take_hurried())
    while taken := pool.tiering.take_copies():
        for move, copies in taken:
            count += len(copies)
            pool.tiering.done(move, now, failed=failed)
            pool.check()
    return count


def tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids that are the same for the same seed."""
    return [Random(f"{seed}.{at}").randrange(1000) for at in range(count)]
