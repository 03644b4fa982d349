"""A worker or a memd that stops while the pool is full: what has begun ends, those that yield meanwhile too."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Sampling, Shutdown
from inferd.core.ports import Draining
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, make_pool

GREEDY = Sampling(temperature=0)
GRACE_S = 60.0


def leave(rig: Rig) -> None:
    """Turn until it has stopped, or has given the pool back; where nothing is to be done, a second passes."""
    began, session = rig.now, rig.session
    while session not in rig.closed:
        assert rig.now < began + GRACE_S / 2, "it waited for the end of its grace"
        rest_s = rig.engine.turn()
        if rest_s and not rig.mailbox.signal.is_set():
            rig.now += 1.0
        rig.mailbox.signal.clear()


@pytest.mark.parametrize("how", ["shutdown", "drain"])
def test_whoever_yields_while_the_worker_leaves_ends_too(how: str) -> None:
    rig = Rig(pool=make_pool(10), limits=Limits(max_batch_tokens=64, max_num_seqs=2))
    for request in (1, 2, 3):
        rig.submit(request, [request, 2, 3], 60)
    rig.turn(10)
    assert [sequence.request for sequence in rig.engine._scheduler.running] == [1, 2]
    rig.mailbox.post(Shutdown(GRACE_S)) if how == "shutdown" else rig.session.say(Draining(GRACE_S))
    leave(rig)
    for request in (1, 2):
        assert rig.generated(request) == continuation([request, 2, 3], 60, GREEDY)
    assert sum(rig.finished(request).used.preemptions for request in (1, 2)) > 0
    assert rig.failed(3).reason == {"shutdown": "DRAINING", "drain": "POOL_LOST"}[how]
    rig.check_nothing_held()


@pytest.mark.parametrize("how", ["shutdown", "drain"])
def test_whoever_has_yielded_before_ends_too(how: str) -> None:
    rig = Rig(pool=make_pool(10), limits=Limits(max_batch_tokens=64, max_num_seqs=2))
    for request in (1, 2):
        rig.submit(request, [request, 2, 3], 60)
    while not any(sequence.suspended_id for sequence in rig.engine._scheduler.waiting):
        rig.turn()
    rig.mailbox.post(Shutdown(GRACE_S)) if how == "shutdown" else rig.session.say(Draining(GRACE_S))
    rig.turn(2)
    rig.submit(3, [5], 5)
    leave(rig)
    for request in (1, 2):
        assert rig.generated(request) == continuation([request, 2, 3], 60, GREEDY)
    assert rig.failed(3).reason == {"shutdown": "DRAINING", "drain": "POOL_LOST"}[how]
    rig.check_nothing_held()
