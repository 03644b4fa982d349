"""The model's answer to workers: their leases and their steps."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from memd.core import replay
from memd.core.values import ExtendRequest, LeaseState, RefusalReason, ReserveRequest, Step, TableRequest
from pagepool.errors import Reason
from tests.cpu.pool_model_values import SIZE, TIMEOUT, ModelLease, ModelTable, Refused
from tests.cpu.pool_model_waiting import LAST, Who

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model


class Workers:
    """What a worker's lease may do."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def worker(self, lease_id: int, now: float) -> ModelLease:
        lease = self.model.leases.get(lease_id)
        if lease is None or not lease.worker:
            raise Refused(Reason.LEASE_LOST)
        self.lose_late(lease_id, now)
        if lease.state is not LeaseState.LIVE:
            raise Refused(Reason.LEASE_LOST)
        return lease

    def lose(self, lease_id: int) -> None:
        self.model.leases[lease_id].state = LeaseState.LOST
        self.model.waiting.forget(lease_id)
        for table_id in [one for one, table in self.model.tables.items() if table.lease == lease_id]:
            self.model.prefixes.drop(table_id)
        self.model.counts["lost"] += 1

    def lose_late(self, lease_id: int, now: float) -> None:
        lease = self.model.leases[lease_id]
        if lease.state is not LeaseState.LOST and now >= lease.due:
            self.lose(lease_id)

    def attach(self, lock: str, now: float, reclaim: tuple[int, int] | None) -> Any:
        if reclaim is not None and reclaim[0] == 7 and reclaim[1] in self.model.leases:
            lease = self.model.leases[reclaim[1]]
            if lease.worker and lease.lock == lock:
                self.lose_late(reclaim[1], now)
                if lease.state is not LeaseState.LOST:
                    lease.state, lease.deadline, lease.replaying = LeaseState.LIVE, now + TIMEOUT, True
                    self.model.waiting.attached(reclaim[1])
                    return reclaim[1], True
        if any(one.lock == lock and (one.is_lost or now >= one.due) for one in self.model.leases.values()):
            raise Refused(Reason.LEASE_LOST)
        return self.model.new_lease(ModelLease(True, TIMEOUT, now + TIMEOUT, lock, stepped=now)), False

    def step(self, lease_id: int, step: Step, now: float) -> Any:
        lease = self.worker(lease_id, now)
        lease.deadline = now + lease.ttl
        if lease.replaying and step.step_id <= lease.last_step:
            if step.step_id not in self.recent(lease):
                raise Refused(Reason.PROTOCOL_VIOLATION)
            self.model.waiting.answered_again(lease_id, lease.answers[step.step_id])
            return self.model.remaps.as_of_now(lease, lease.answers[step.step_id])
        if step.step_id != lease.last_step + 1 or not self.lawful(lease_id, step):
            raise Refused(Reason.PROTOCOL_VIOLATION)
        lease.last_step, lease.replaying = step.step_id, False
        self.apply(lease_id, step)
        self.model.remaps.merge(self.sealed, now)
        self.model.remaps.acknowledge(lease_id, step.acknowledged, now)
        self.model.waiting.expire(now)
        answers = self.answer(lease_id, step, now)
        lease.answers[step.step_id], lease.stepped = answers, now
        return answers

    def recent(self, lease: ModelLease) -> list[int]:
        """The steps whose answers are kept."""
        found, blocks = list[int](), 0
        for step_id, answers in reversed(lease.answers.items()):
            blocks += sum(replay.REPLY_BLOCKS + (len(one[4]) if one[0] == "grant" else 0) for one in answers)
            if found and (blocks > replay.MAX_REPLAYED_BLOCKS or len(found) == replay.MAX_REPLAYED_STEPS):
                break
            found.append(step_id)
        return found

    def answer(self, lease_id: int, step: Step, now: float) -> Any:
        urgent = [reserve for reserve in step.reserves if reserve.for_table_id]
        if urgent:
            self.model.waiting.anew(lease_id, grows=True)
        answers = [self.answer_reserve(lease_id, reserve, now) for reserve in urgent]
        if urgent:
            self.model.waiting.call(lease_id, now, grows=True)
        if step.creates:
            self.model.waiting.anew(lease_id, grows=False)
        answers += [self.answer_create(lease_id, create, now) for create in step.creates]
        if step.creates:
            self.model.waiting.call(lease_id, now, grows=False)
        answers += [self.answer_extend(lease_id, extend) for extend in step.extends]
        rest = [reserve for reserve in step.reserves if not reserve.for_table_id]
        answers += [self.answer_reserve(lease_id, reserve, now) for reserve in rest]
        return sorted(answers, key=itemgetter(1))

    def apply(self, lease_id: int, step: Step) -> bool:
        self.sealed: list[int] = []
        for commit in step.commits:
            table = self.model.tables[commit.table_id]
            num_full = len(table.tokens) // SIZE
            self.sealed += self.model.commit(table, commit.token_ids)
            self.model.prefixes.copied(commit.table_id)
            self.model.prefixes.sealed(commit.table_id, num_full)
        done = self.model.operations.operates(lease_id, step)
        own = {one: table for one, table in self.model.tables.items() if table.lease == lease_id}
        growing = [extend.table_id for extend in step.extends]
        growing += [reserve.for_table_id for reserve in step.reserves if reserve.for_table_id]
        resumed = [create.resume_table_id for create in step.creates if create.resume_table_id]
        return (
            done
            and all(one in own and not own[one].suspended for one in growing)
            and all(one in own and own[one].suspended for one in resumed)
            and len(set(resumed)) == len(resumed)
        )

    def lawful(self, lease_id: int, step: Step) -> bool:
        """Tried on a copy: what an operation needs, another one before it may have made."""
        tried = step.operations or step.releases or step.frees or step.extends or step.reserves or step.creates
        if step.acknowledged > self.model.leases[lease_id].last_remap or not self.commits_are_lawful(lease_id, step):
            return False
        return not tried or self.model.trial().workers.apply(lease_id, step)

    def commits_are_lawful(self, lease_id: int, step: Step) -> bool:
        tables = self.model.tables.items()
        own = {one: table for one, table in tables if table.lease == lease_id and not table.suspended}
        written: Counter[int] = Counter()
        for commit in step.commits:
            written[commit.table_id] += len(commit.token_ids)
        return (
            all(one in own for one in written)
            and all(len(own[one].tokens) + count <= len(own[one].blocks) * SIZE for one, count in written.items())
            and all(self.is_alone(own[one], count) for one, count in written.items())
            and not any(create.resume_table_id and create.token_ids for create in step.creates)
            and not any(extend.num_blocks < 1 for extend in step.extends)
            and not any(max(reserve.num_blocks, reserve.num_tables) < 1 for reserve in step.reserves)
        )

    def is_alone(self, table: ModelTable, count: int) -> bool:
        """Whether nobody else has a block that the next tokens of a table are written to."""
        end = len(table.tokens) + count
        written = table.blocks[len(table.tokens) // SIZE : -(-end // SIZE)] if count else []
        return all(len(self.model.blocks[one].holders) == 1 for one in written)

    def answer_create(self, lease_id: int, request: TableRequest, now: float) -> Any:
        waiting, again = self.model.waiting, request.resume_table_id
        rank = waiting.rank(again) if again else (-request.priority, request.arrival or now, self.model.next_id)
        who, request = Who(lease_id, again, rank, grows=False), self.model.with_own(request)
        headroom = request.headroom if waiting.is_in_use() else 0
        matched, spare = self.model.found(request, who)
        available = len(matched) + max(spare, 0)
        if self.model.prefixes.awaits(lease_id, request, len(matched)):
            return "refusal", request.ref, RefusalReason.PREFIX_PENDING, available, 0
        fresh = max(request.num_blocks - len(matched), 0)
        table_id = self.model.try_table(lease_id, request, now, who)
        if table_id is None:
            for_headroom = fresh - spare <= headroom
            no = self.refuse(request.ref, who, request.num_blocks, available, for_headroom=for_headroom)
            pinned = sum(self.model.is_pinned(one) for one in self.model.cached if one not in matched)
            held = sum(self.is_apart(one) for one in self.model.blocks if one not in matched)
            enough = len(matched) + fresh <= self.model.total - pinned - held
            if request.num_blocks > self.model.total:
                return no
            if enough:
                waiting.claim_table(who, fresh - spare, matched, now)
            return *no[:-1], 0 if enough else held
        self.model.prefixes.promise(table_id, request, len(matched), fresh)
        table = self.model.tables[table_id]
        source = self.model.prefixes.entry(table_id)
        return "grant", request.ref, table_id, table.cached, *self.model.run(table.blocks), 0, source

    def answer_extend(self, lease_id: int, request: ExtendRequest) -> Any:
        table, waiting = self.model.tables[request.table_id], self.model.waiting
        who = Who(lease_id, request.table_id, waiting.rank(request.table_id), grows=True)
        if request.num_blocks > waiting.spare(who) or len(table.blocks) + request.num_blocks > self.model.total:
            return self.refuse(request.ref, who, len(table.blocks) + request.num_blocks, waiting.spare(who))
        ids = self.model.grant(request.num_blocks, (lease_id, request.table_id))
        table.blocks += ids
        return "grant", request.ref, request.table_id, 0, *self.model.run(ids), 0, None

    def answer_reserve(self, lease_id: int, request: ReserveRequest, now: float) -> Any:
        lease, waiting, table = self.model.leases[lease_id], self.model.waiting, request.for_table_id
        who = Who(lease_id, table, waiting.rank(table) if table else LAST, grows=True)
        in_all = len(lease.reserve) + request.num_blocks
        if request.num_blocks > waiting.spare(who) or in_all > self.model.total:
            if table and in_all <= self.model.total:
                waiting.claim_growth(who, request.num_blocks, now)
            return self.refuse(request.ref, who, in_all, waiting.spare(who))
        blocks = self.model.grant(request.num_blocks, (lease_id, 0))
        lease.reserve += blocks
        self.model.order[lease_id] += blocks
        ids = list(range(self.model.next_id, self.model.next_id + request.num_tables))
        self.model.next_id += request.num_tables
        lease.ids += ids
        return "grant", request.ref, ids[0] if ids else 0, 0, *self.model.run(blocks), len(ids), None

    def refuse(self, ref: int, who: Who, in_all: int, found: int, *, for_headroom: bool = False) -> Any:
        self.model.counts["refused"] += 1
        if in_all <= self.model.total:
            self.model.waiting.refuse(who, for_headroom=for_headroom)
            return "refusal", ref, RefusalReason.POOL_EXHAUSTED, found, 0
        return "refusal", ref, RefusalReason.REQUEST_TOO_LARGE, found, 0

    def is_apart(self, one: int) -> bool:
        """Whether no live worker can let go of a block: a client has it, or a lost worker."""
        holders = {lease for lease, _ in self.model.blocks[one].holders}
        return any(not self.model.leases[lease].worker or self.model.leases[lease].is_lost for lease in holders)

    def process_gone(self, lease_id: int) -> None:
        lease = self.model.leases.get(lease_id)
        if lease is not None and lease.worker and lease.state is not LeaseState.LIVE:
            self.model.counts["lost"] += lease.state is LeaseState.DETACHED
            self.model.end(lease_id)

    def tick(self, now: float) -> list[tuple[int, LeaseState]]:
        self.model.pins.tick(now)
        self.model.waiting.expire(now)
        late = [
            one for one, lease in self.model.leases.items() if now >= lease.due and lease.state is not LeaseState.LOST
        ]
        for one in late:
            (self.lose if self.model.leases[one].worker else self.model.clients.expire)(one)
        return [(one, LeaseState.LOST if one in self.model.leases else LeaseState.LIVE) for one in late]
