"""Samples where the pool holds hardly more than one of them: they yield to each other, and all end."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Sampling
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, make_pool


def prompt(length: int) -> list[int]:
    return [7 * at % 200 for at in range(length)]


def serve(rig: Rig, count: int) -> None:
    """Turn until all have ended; where nothing is to be done, a second passes."""
    for _ in range(1500):
        rest_s = rig.engine.turn()
        if all(rig.end(1 + index) is not None for index in range(count)):
            return
        if rest_s and not rig.mailbox.signal.is_set():
            rig.now += 1.0
            rig.pool.tick(rig.now)
        rig.mailbox.signal.clear()
    raise AssertionError(f"not over: {rig.pool.usage()}")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
@pytest.mark.parametrize("load", [(2, 72, 5), (3, 75, 5), (5, 75, 5), (8, 60, 5), (8, 75, 14)])
def test_samples_in_a_pool_that_holds_hardly_one_of_them_all_end(
    load: tuple[int, int, int], spare: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, length, most = load
    monkeypatch.setattr(Rig, "depth", depth)
    rig = Rig(pool=make_pool(-(-(length + most - 1) // 8) + spare), limits=Limits(max_batch_tokens=32, max_num_seqs=16))
    rig.turn()
    rig.submit(1, prompt(length), most, n=count, sampling=Sampling(seed=3))
    serve(rig, count)
    for index in range(count):
        wanted = continuation(prompt(length), most, Sampling(seed=3, sample_index=index))
        assert rig.generated(1 + index) == wanted
    rig.pool.check()
