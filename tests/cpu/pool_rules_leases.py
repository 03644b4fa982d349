"""Rules: time and leases."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from memd.core.values import (
    LeaseState,
)
from pagepool.errors import Reason
from tests.cpu.pool_machine import PoolMachine
from tests.cpu.pool_model_values import TIMEOUT, Refused

seconds = st.sampled_from([0.0, 0.5, 0.5, 1.0, 1.0, 6.0])


class LeaseRules(PoolMachine):
    @rule(by=seconds)
    def time_passes(self, by: float) -> None:
        self.now += by
        self.capacity_news()

    @rule(by=seconds)
    def tick(self, by: float) -> None:
        self.now += by
        late = [(lease.lease_id, lease.state) for lease in self.pool.tick(self.now)]
        assert late == self.model.workers.tick(self.now)

    @rule(ttl=st.sampled_from([0.5, 5.0, 30.0]))
    def create_client_lease(self, ttl: float) -> None:
        self.new_client(ttl)

    def renew_client_lease(self, data: st.DataObject) -> None:
        lease = self.client(data)

        def expected() -> float:
            found = self.model.clients.client(lease, self.now)
            found.deadline = self.now + found.ttl
            return found.deadline

        self.agree(lambda: self.pool.renew_lease(lease, self.now).deadline, expected)

    def release_client_lease(self, data: st.DataObject) -> None:
        lease = self.client(data)

        def expected() -> None:
            if lease in self.model.leases:
                if self.model.leases[lease].worker:
                    raise Refused(Reason.LEASE_IS_WORKERS)
                self.model.end(lease)

        self.agree(lambda: self.pool.release_lease(lease, self.now), expected)

    @rule(data=st.data(), name=st.sampled_from(["heartbeat", "renew_client_lease"]))
    def lease_is_renewed(self, name: str, data: st.DataObject) -> None:
        getattr(self, name)(data)

    @rule(data=st.data(), name=st.sampled_from(["release_client_lease", "detach", "fail_lease", "stream_broken"]))
    def lease_ends(self, name: str, data: st.DataObject) -> None:
        getattr(self, name)(data)

    @rule(lock=st.sampled_from(["one", "two", "three"]), epoch=st.sampled_from([7, 7, 7, 8]), data=st.data())
    def attach(self, lock: str, epoch: int, data: st.DataObject) -> None:
        lease = data.draw(st.none() | st.sampled_from([*self.model.leases, self.model.next_id]))
        if lease is not None and lease in self.model.leases and data.draw(st.integers(0, 4)):
            lock = self.model.leases[lease].lock or lock
        self.attach_worker(lock, None if lease is None else (epoch, lease))

    def heartbeat(self, data: st.DataObject) -> None:
        lease = self.worker(data)

        def expected() -> None:
            self.model.workers.worker(lease, self.now).deadline = self.now + TIMEOUT

        self.agree(lambda: self.pool.heartbeat(lease, self.now), expected)

    def stream_broken(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.pool.stream_broken(lease)
        known = self.model.leases.get(lease)
        if known is not None and known.worker and known.state is LeaseState.LIVE:
            known.state = LeaseState.DETACHED

    def detach(self, data: st.DataObject) -> None:
        lease = self.worker(data)

        def expected() -> None:
            self.model.workers.worker(lease, self.now)
            self.model.end(lease)

        self.agree(lambda: self.pool.detach(lease, self.now), expected)

    def fail_lease(self, data: st.DataObject) -> None:
        lease = self.worker(data)
        self.pool.fail_lease(lease, self.now)
        known = self.model.leases.get(lease)
        if known is not None and known.worker and known.state is not LeaseState.LOST:
            self.model.workers.lose(lease)

    @rule(data=st.data())
    def process_gone(self, data: st.DataObject) -> None:
        waiting = {one: lease.lock for one, lease in self.model.leases.items() if lease.worker}
        waiting = {one: lock for one, lock in waiting.items() if self.model.leases[one].state is not LeaseState.LIVE}
        assert dict(self.pool.waiting_for_process()) == waiting
        lease = data.draw(st.sampled_from(list(waiting))) if waiting else self.worker(data)
        self.pool.process_gone(lease, self.now)
        self.model.workers.process_gone(lease)
        self.capacity_news()
