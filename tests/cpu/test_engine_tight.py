"""Samples where the pool holds hardly more than one of them: they yield to each other, and all end."""

from __future__ import annotations

from itertools import product

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Sampling
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, make_pool

BLOCK = 8
LOADS = [(2, 72, 5), (3, 75, 5), (5, 75, 5), (8, 60, 5), (8, 75, 14)]
"""Samples of a request, tokens of its prompt, tokens of an answer."""

SAMPLE = [((2, 72, 5), 0, 2), ((3, 75, 5), 0, 1), ((5, 75, 5), 0, 2), ((8, 60, 5), 1, 1), ((8, 75, 14), 0, 1)]
ALL = [
    pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.full]) for case in product(LOADS, range(4), (1, 2))
]


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


@pytest.mark.parametrize(("load", "spare", "depth"), ALL)
def test_samples_in_a_pool_that_holds_hardly_one_of_them_all_end(
    load: tuple[int, int, int], spare: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens that each has alone; `spare` blocks are more than one of them needs."""
    count, length, most = load
    monkeypatch.setattr(Rig, "depth", depth)
    pool = make_pool(-(-(length + most - 1) // BLOCK) + spare, BLOCK)
    rig = Rig(pool=pool, limits=Limits(max_batch_tokens=32, max_num_seqs=16))
    rig.turn()
    rig.submit(1, prompt(length), most, n=count, sampling=Sampling(seed=3))
    serve(rig, count)
    for index in range(count):
        wanted = continuation(prompt(length), most, Sampling(seed=3, sample_index=index))
        assert rig.generated(1 + index) == wanted
    rig.settle()
    rig.check_nothing_held()
