"""The warm-up: what it runs, and that it leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

from inferd.core.limits import Limits
from inferd.core.ports import Lost
from inferd.warmup import warm_up
from pagekernels.layout import Format, pack_entry, unpack_entry
from pagepool.errors import PagepoolError, Reason
from tests.cpu.memory_pool import MemoryPool, TokenModel, make_pool

LIMITS, CONTEXT = Limits(max_batch_tokens=50, max_num_seqs=4), 1000


def session(num_blocks: int) -> tuple[MemoryPool, TokenModel]:
    pool = make_pool(num_blocks)
    return MemoryPool(pool, threading.Event()), TokenModel(pool)


@pytest.mark.parametrize(("num_blocks", "length"), [(64, 50), (3, 24)])
def test_it_runs_a_full_prefill_and_the_smallest_and_the_largest_decode(num_blocks: int, length: int) -> None:
    pool, model = session(num_blocks)
    warm_up(pool, model, LIMITS, CONTEXT)
    assert [len(step.token_ids) for step in model.steps] == [length, 1, 1, 1, 4, 4, 4]
    pool.pool.check()
    usage = pool.pool.usage()
    assert (usage.held, usage.cached) == (0, 0), "something of the warm-up can be matched"


def test_a_pool_with_little_room_makes_it_shorter_and_a_full_one_leaves_it_out() -> None:
    pool, model = session(4)
    lease = pool.pool.create_lease("neighbour", 1e6, 0.0).lease_id
    pool.pool.allocate_blocks(lease, 3, 0.0)
    warm_up(pool, model, LIMITS, CONTEXT)
    assert [len(step.token_ids) for step in model.steps] == [8, 1, 1, 1, 4, 4, 4]
    pool.pool.allocate_blocks(lease, 1, 0.0)
    warm_up(pool, model, LIMITS, CONTEXT)
    assert len(model.steps) == 7


@pytest.mark.parametrize(("num_blocks", "count"), [(64, 2), (1, 0)])
def test_where_blocks_may_be_fp8_one_is_compressed_and_decompressed_in_blocks_of_its_own(
    num_blocks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, model = session(num_blocks)
    recoded: list[tuple[list[int], list[int]]] = []
    recode = model.recode

    def note(sources: list[int], targets: list[int]) -> object:
        recoded.append((sources, targets))
        return recode(sources, targets)

    monkeypatch.setattr(model, "recode", note)
    warm_up(pool, model, LIMITS, CONTEXT)
    assert recoded == []
    warm_up(pool, model, LIMITS, CONTEXT, fp8=True)
    assert len(recoded) == count
    table = list(model.steps[-1].tables[0])
    if recoded:
        ((native,), (single,)), (singles, natives) = recoded
        assert (singles, natives) == ([single], [native])
        formats = [unpack_entry(entry)[0] for entry in (native, single)]
        assert formats == [Format.F32, Format.FP8_E4M3]
        assert {native, pack_entry(Format.F32, *unpack_entry(single)[1:])} <= set(table)
        assert pool.info.num_blocks == num_blocks
    pool.pool.check()
    assert (pool.pool.usage().held, pool.pool.usage().cached) == (0, 0)


def test_no_position_lies_beyond_the_models_context() -> None:
    pool, model = session(64)
    warm_up(pool, model, LIMITS, max_context=20)
    assert {max(step.positions) for step in model.steps} == {19}


def test_a_memd_that_goes_meanwhile_is_reported_as_such() -> None:
    pool, model = session(8)
    pool.held = True
    pool.say(Lost("gone"))
    with pytest.raises(PagepoolError) as error:
        warm_up(pool, model, LIMITS, CONTEXT)
    assert error.value.reason is Reason.POOL_LOST
