"""The model's answer where blocks are short: who is ahead of whom, who has to yield, who hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memd.core.values import LeaseState
from memd.core.victims import MAX_LOOKED, MAX_YIELDS, YIELD_S
from memd.core.waiting import CLAIM_S

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model

Rank = tuple[float, float, int]
LAST: Rank = (float("inf"), float("inf"), 0)


@dataclass(frozen=True)
class Who:
    lease: int
    table: int  # 0 for one to come
    rank: Rank
    grows: bool


@dataclass(frozen=True)
class ModelClaim:
    who: Who
    count: int
    until: float
    found: tuple[int, ...] = ()


class Waiting:
    """Everything is kept as it happened; whether it still counts is found out when it is asked for."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.claims: list[ModelClaim] = []
        self.refused: list[tuple[Who, int, bool]] = []  # what there was, and whether headroom alone was missing
        self.untold: list[int] = []
        self.told: set[int] = set()  # leases, of their present streams
        self.max_looked, self.max_yields = MAX_LOOKED, MAX_YIELDS

    def rank(self, table_id: int) -> Rank:
        table = self.model.tables[table_id]
        return -table.priority, table.arrival, table_id

    def is_live(self, lease_id: int) -> bool:
        return lease_id in self.model.leases and self.model.leases[lease_id].state is LeaseState.LIVE

    def is_valid(self, who: Who) -> bool:
        if not self.is_live(who.lease) or not who.table:
            return self.is_live(who.lease)
        return who.table in self.model.tables and self.model.tables[who.table].suspended != who.grows

    def claimed(self, who: Who | None) -> int:
        return sum(claim.count for claim in self.claims if self.is_valid(claim.who) and self.is_ahead(claim.who, who))

    @staticmethod
    def is_ahead(one: Who, other: Who | None) -> bool:
        if other is None:
            return True
        grows_first = other.grows and not one.grows and other.rank[0] == one.rank[0]
        return one.rank < other.rank and not grows_first

    def spare(self, who: Who | None) -> int:
        return max(self.model.available - self.claimed(who), 0)

    def anew(self, lease_id: int, *, grows: bool) -> None:
        self.claims = [one for one in self.claims if (one.who.lease, one.who.grows) != (lease_id, grows)]

    def claim(self, who: Who, count: int, until: float, found: Sequence[int] = ()) -> None:
        former = [one for one in self.claims if (one.who.lease, one.who.grows) == (who.lease, who.grows)]
        if not former or who.rank <= former[0].who.rank:
            self.anew(who.lease, grows=who.grows)
            self.claims.append(ModelClaim(who, min(count, self.model.total), until, tuple(found)))

    def claim_growth(self, who: Who, count: int, now: float) -> None:
        if self.model.tables[who.table].yielding is not None:
            return
        lease = self.model.leases[who.lease]
        self.claim(who, count, now + max(CLAIM_S, min(2 * (now - lease.stepped), lease.ttl)))

    def claim_table(self, who: Who, missing: int, found: list[int], now: float) -> None:
        self.claim(who, missing + self.model.available - self.claimed(who), now + CLAIM_S, found)

    def call(self, lease_id: int, now: float, *, grows: bool) -> None:
        """The most urgent of a kind that a step has refused has others yield for it."""
        for claim in [one for one in self.claims if (one.who.lease, one.who.grows) == (lease_id, grows)]:
            missing = claim.count - self.model.available + self.claimed(claim.who)
            (self.call_for_growth if grows else self.call_for_table)(claim, missing, now)

    def call_for_growth(self, claim: ModelClaim, missing: int, now: float) -> None:
        worn = self.is_worn(claim.who.table)
        candidates = [one for one in self.candidates(worn=worn) if self.rank(one) > claim.who.rank]
        looked, enough, spent = self.look(candidates, missing, now, claim.found)
        chosen = self.giving(looked, now, claim.found)
        if not chosen and spent:
            chosen = [one for one in looked if one in candidates][:1]
        elif not chosen and not enough:
            chosen = [one for one in candidates if self.share(one, claim.who.table)][:1] or [claim.who.table]
        self.name(chosen, now)

    def call_for_table(self, claim: ModelClaim, missing: int, now: float) -> None:
        candidates = [one for one in self.candidates(worn=False) if self.rank(one)[0] > claim.who.rank[0]]
        looked, enough, _ = self.look(candidates, missing, now, claim.found)
        if enough:
            self.name(self.giving(looked, now, claim.found), now)

    def share(self, one: int, other: int) -> bool:
        return not set(self.model.tables[one].blocks).isdisjoint(self.model.tables[other].blocks)

    def is_worn(self, table_id: int) -> bool:
        return self.model.tables[table_id].yields >= self.max_yields

    def candidates(self, *, worn: bool) -> list[int]:
        tables = self.model.tables
        can = [
            one
            for one, table in tables.items()
            if self.is_live(table.lease) and self.model.leases[table.lease].worker
            if table.blocks and table.yielding is None and (worn or not self.is_worn(one))
        ]
        return sorted(can, key=self.rank, reverse=True)

    def yielding(self, now: float) -> set[int]:
        tables = self.model.tables.items()
        since = {one: table.yielding for one, table in tables if self.is_live(table.lease)}
        return {one for one, when in since.items() if when is not None and now - when < YIELD_S}

    def freed(self, tables: set[int], found: Sequence[int]) -> set[int]:
        """Blocks that would be room for others if these tables went, and are not as it is."""
        blocks = self.model.blocks.items()
        held = [one for one, block in blocks if block.holders and not (self.model.is_pinned(one) or one in found)]
        return {one for one in held if {table for _, table in self.model.blocks[one].holders} <= tables}

    def look(
        self, candidates: list[int], missing: int, now: float, found: Sequence[int]
    ) -> tuple[list[int], bool, bool]:
        """Who is looked at, until they are enough or their blocks too many; which of both it was."""
        looked: list[int] = []
        enough = spent = False
        for one in [*(one for one in self.model.tables if one in self.yielding(now)), *candidates, 0]:
            enough = len(self.freed(set(looked), found)) >= missing
            spent = sum(len(self.model.tables[each].blocks) for each in looked) >= self.max_looked and not enough
            if enough or spent or not one:
                break
            looked.append(one)
        return looked, enough, spent

    def giving(self, looked: list[int], now: float, found: Sequence[int]) -> list[int]:
        """Of those looked at, who free something and do not yield already."""
        gone = self.freed(set(looked), found)
        new = [one for one in looked if one not in self.yielding(now)]
        return [one for one in new if gone & set(self.model.tables[one].blocks)]

    def name(self, tables: list[int], now: float) -> None:
        for one in tables:
            self.model.tables[one].yielding = now
        self.untold += tables

    def attached(self, lease_id: int) -> None:
        own = [one for one, table in self.model.tables.items() if table.lease == lease_id]
        self.untold += [one for one in own if self.model.tables[one].yielding is not None]
        self.model.prefixes.woken |= self.told & {lease_id}
        self.told.discard(lease_id)

    def answered_again(self, lease_id: int, answers: list[Any]) -> None:
        """What it has to yield of that, it may have heard before it knew of it."""
        tables, granted = self.model.tables, [answer[2] for answer in answers if answer[0] == "grant"]
        own = [one for one in granted if one in tables and tables[one].lease == lease_id]
        self.untold += [one for one in own if tables[one].yielding is not None]
        if any(answer[0] == "refusal" for answer in answers):
            self.model.prefixes.woken.add(lease_id)

    def victim_news(self) -> list[tuple[int, int]]:
        tables = self.model.tables
        told = {one for one in self.untold if one in tables and tables[one].yielding is not None}
        self.untold = []
        return [(tables[one].lease, one) for one in told if self.is_live(tables[one].lease)]

    def is_in_use(self) -> bool:
        workers = {one for one, lease in self.model.leases.items() if lease.worker and not lease.is_lost}
        return any(table.blocks for table in self.model.tables.values() if table.lease in workers)

    def refuse(self, who: Who, *, for_headroom: bool = False) -> None:
        self.refused.append((who, self.spare(who), for_headroom))

    def news(self) -> dict[int, int]:
        """By lease that has reason to ask again: what there is for it."""
        told: dict[int, int] = {}
        for who, spare, for_headroom in self.refused:
            if self.is_live(who.lease) and (self.spare(who) > spare or (for_headroom and not self.is_in_use())):
                told[who.lease] = max(told.get(who.lease, 0), self.spare(who))
        self.refused = [one for one in self.refused if one[0].lease not in told]
        live, prefixes = set(filter(self.is_live, self.model.leases)), self.model.prefixes
        for lease_id in prefixes.woken & live:
            told.setdefault(lease_id, self.model.available)
        prefixes.woken &= set(self.model.leases) - live
        self.told |= set(told)
        return told

    def expire(self, now: float) -> None:
        self.claims = [one for one in self.claims if now < one.until and self.is_valid(one.who)]

    def forget(self, lease_id: int) -> None:
        self.refused = [one for one in self.refused if one[0].lease != lease_id]
        self.told.discard(lease_id)
        self.claims = [one for one in self.claims if one.who.lease != lease_id]
