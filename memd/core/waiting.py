"""Who waits for blocks: what is held back for them from whoever is less urgent, and the news that they wait for.

A worker that was refused is told when there is more for it than there was then. A claim makes sure that what others
free for the more urgent is still there when that one asks again, though others ask in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memd.core.state import PoolState
from memd.core.values import LeaseState

Rank = tuple[float, float, int]
"""(-priority, arrival, id) of a table, or of a request for one; the smaller is the more urgent."""

NOBODY: Rank = (float("inf"), float("inf"), 0)
"""The rank of whatever nobody waits for."""

CLAIM_S = 2.0
"""How long a claim lasts after it was asked for last."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Whom a request is for. `grows` tells a table that has blocks from one that is to be created or resumed.

    `table_id` is 0 for a table to come.
    """

    lease_id: int
    table_id: int
    rank: Rank
    grows: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """Of the available blocks, `num_blocks` are for `asker` until a time, and for nobody less urgent.

    `found` are the ids of blocks that it would have beside those, though they be in use.
    """

    asker: Asker
    num_blocks: int
    until: float
    found: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Hunger:
    """A refusal: how many blocks there were for `asker`. `for_headroom`: enough for itself, but not beside others."""

    asker: Asker
    spare: int
    for_headroom: bool

    def is_told_with(self, other: Hunger) -> bool:
        """Whether whatever makes news for this one makes news for the other."""
        urgent = other.asker.grows == self.asker.grows and other.asker.rank <= self.asker.rank
        return urgent and other.spare <= self.spare and other.for_headroom >= self.for_headroom


class Waiting:
    """Claims and refusals of worker leases. A lease has at most one claim for tables that grow, and one for others."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._claims: dict[tuple[int, bool], Claim] = {}
        self._hungers: dict[int, list[Hunger]] = {}
        self._told: set[int] = set()  # leases that news was written to on their present stream

    def claims(self) -> Iterator[Claim]:
        """Those that hold now."""
        return filter(self._holds, self._claims.values())

    def hungers(self) -> dict[int, list[Hunger]]:
        """The refusals that no news has been given of, by lease; not to be changed by the caller."""
        return self._hungers

    def claimed_before(self, asker: Asker | None) -> int:
        """Blocks claimed by those who come before `asker`; None comes after all.

        A table that grows goes before tables of its priority that are still to begin, however early they came: else the
        pool would fill with tables that cannot end.
        """
        if not self._claims:
            return 0
        return sum(claim.num_blocks for claim in self.claims() if asker is None or _is_before(claim.asker, asker))

    def spare_for(self, asker: Asker | None) -> int:
        """Blocks that can be granted to it now."""
        return max(self._state.cut_store().available - self.claimed_before(asker), 0)

    def claim(self, asker: Asker, num_blocks: int, until: float, found: Sequence[int] = ()) -> None:
        """Hold blocks back for a refused request, unless its lease has a more urgent claim of the kind in this step.

        It has found the blocks in the frames `found`.
        """
        known, store = self._claims.get((asker.lease_id, asker.grows)), self._state.cut_store()
        if known is None or asker.rank <= known.asker.rank:
            ids = [store.blocks.ids[frame] for frame in found]
            self._claims[asker.lease_id, asker.grows] = Claim(asker, min(num_blocks, store.num_blocks), until, ids)

    def claim_of(self, lease_id: int, *, grows: bool) -> Claim | None:
        """What a lease claims."""
        return self._claims.get((lease_id, grows))

    def missing(self, claim: Claim) -> int:
        """How many more blocks would have to be available for it."""
        return claim.num_blocks - (self._state.cut_store().available - self.claimed_before(claim.asker))

    def drop_claim(self, lease_id: int, *, grows: bool) -> None:
        """A lease asks anew: its former claim of the kind is over."""
        self._claims.pop((lease_id, grows), None)

    def expire(self, now: float) -> None:
        """End the claims that nobody asked for again in time, or whose table or lease has ended."""
        over = [key for key, claim in self._claims.items() if claim.until <= now or not self._holds(claim)]
        for key in over:
            del self._claims[key]

    def forget(self, lease_id: int) -> None:
        """A lease is lost or ends."""
        self._hungers.pop(lease_id, None)
        self._told.discard(lease_id)
        self.drop_claim(lease_id, grows=True)
        self.drop_claim(lease_id, grows=False)

    def starve(self, asker: Asker, *, for_headroom: bool = False) -> None:
        """Remember that a request was refused, with what there was for it."""
        hunger = Hunger(asker, self.spare_for(asker), for_headroom)
        known = self._hungers.setdefault(asker.lease_id, [])
        if not any(map(hunger.is_told_with, known)):
            known[:] = [one for one in known if not one.is_told_with(hunger)]
            known.append(hunger)

    def take_news(self) -> list[tuple[int, int]]:
        """Live leases that were refused and have reason to ask again, with the blocks that there are for them."""
        woken = self._state.promises.take_woken(self._is_live, self._state.leases.__contains__)
        if not (self._hungers or woken):
            return []
        told = dict[int, int]()
        for lease_id in filter(self._is_live, list(self._hungers)):
            news = [self.spare_for(one.asker) for one in self._hungers[lease_id] if self._is_news(one)]
            if news:
                told[lease_id] = max(news)
                del self._hungers[lease_id]
        for lease_id in woken:  # the prefix that it waits for is there, or will not be
            told.setdefault(lease_id, self._state.cut_store().available)
        self._told.update(told)
        return list(told.items())

    def tell_again(self, lease_id: int) -> None:
        """A lease is taken up on a new stream: what it was told on the old one it may not have read."""
        if lease_id in self._told:
            self._told.remove(lease_id)
            self._state.promises.wake(lease_id)

    def _is_news(self, hunger: Hunger) -> bool:
        more = self.spare_for(hunger.asker) > hunger.spare
        return more or (hunger.for_headroom and not self._state.is_in_use())

    def _is_live(self, lease_id: int) -> bool:
        lease = self._state.leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.LIVE

    def _holds(self, claim: Claim) -> bool:
        if not self._is_live(claim.asker.lease_id):
            return False
        if not claim.asker.table_id:
            return True
        table = self._state.leases[claim.asker.lease_id].tables.get(claim.asker.table_id)
        return table is not None and (table.kept is None) == claim.asker.grows


def _is_before(claimant: Asker, asker: Asker) -> bool:
    if asker.grows and not claimant.grows and claimant.rank[0] == asker.rank[0]:
        return False
    return claimant.rank < asker.rank
