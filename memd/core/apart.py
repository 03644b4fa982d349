"""Blocks that no worker can let go of: clients' leases hold them, or lost ones whose processes are there to write."""

from __future__ import annotations

from memd.core.lease import Lease
from memd.core.state import Plan, PoolState
from memd.core.values import LeaseState


class HeldApart:
    """Tells requests that such blocks leave no room for from those that the workers' own tables make wait.

    What is counted stays so until `forget`: to be called whenever a client or the state of a lease may have changed.
    """

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._frames: set[int] | None = None

    def forget(self) -> None:
        """Count anew when it is asked for next."""
        self._frames = None

    def cornering(self, plan: Plan) -> int:
        """How many blocks are held so, beside those that match, if with the pinned ones they leave it too few; else 0.

        Those that match take no room but their own, whoever holds them too.
        """
        store = self._state.cut_store()
        room = store.num_blocks - store.num_pinned_beside(plan.matched) - plan.num_blocks
        leases = [lease for lease in self._state.leases.values() if _is_apart(lease)]
        if self._frames is None and sum(map(_most, leases)) <= room:  # mostly; counting takes time with what they hold
            return 0
        if self._frames is None:
            self._frames = set(map(store.units.frame_at, set().union(*map(_places, leases))))
        held = len(self._frames) - len(self._frames.intersection(map(store.units.frame_at, plan.matched)))
        return held if held > room else 0


def _is_apart(lease: Lease) -> bool:
    return not lease.is_worker or lease.state is LeaseState.LOST


def _most(lease: Lease) -> int:
    """No fewer blocks than it holds: those that several of its tables have are counted with each."""
    direct = len(lease.references) + len(lease.copy_sources) + len(lease.remaps)
    direct += sum(len(recode.sources) + len(recode.targets) for recode in lease.recodes)
    return direct + sum(len(table.frames) for table in lease.tables.values())


def _places(lease: Lease) -> set[int]:
    tables = (table.frames for table in lease.tables.values())
    unread = [one.frame for one in lease.remaps]
    recoded = [place for recode in lease.recodes for place in (*recode.sources, *recode.targets)]
    return set(lease.references).union(lease.copy_sources.values(), unread, recoded, *tables)
