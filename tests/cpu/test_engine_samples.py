"""Several samples of one prompt: computed once, forked, and each what a request of its own would be."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Adjustments, Cancel, Counters, Ending, EngineState, Sampling, Shutdown
from inferd.core.ports import Victim
from pagepool.errors import Reason
from tests.cpu.engine_rig import EOS, Rig
from tests.cpu.memory_pool import continuation

PENALTIES = Adjustments(repetition_penalty=1.4, presence_penalty=0.9, frequency_penalty=0.5)


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 200 for index in range(length)]


def sample(seed: int, index: int) -> Sampling:
    return Sampling(seed=seed, sample_index=index)


def counters(rig: Rig) -> Counters:
    rig.mailbox.post(Shutdown(0.0))
    rig.settle()
    return next(each.counters for each in reversed(rig.sent) if isinstance(each, EngineState))


def block_ids(rig: Rig) -> dict[int, list[int]]:
    """The physical blocks of every table, as memd has them."""
    return {table.table_id: list(table.blocks.block_ids) for table in rig.pool.tables_after(0, 99, 0.0)}


@pytest.mark.parametrize("length", [3, 15, 16, 37])
@pytest.mark.parametrize(("n", "wishes"), [(8, {}), (3, {"adjustments": PENALTIES}), (4, {"logprobs": 2})])
def test_samples_are_what_requests_of_their_own_would_give(length: int, n: int, wishes: dict[str, Any]) -> None:
    rig = Rig(num_blocks=128, limits=Limits(max_batch_tokens=24, max_num_seqs=16))
    rig.submit(1, prompt(30, 5), 12)
    rig.submit(10, prompt(length), 21, n=n, sampling=sample(6, 4), **wishes)
    rig.submit(30, prompt(9, 3), 20, sampling=sample(2, 0))
    rig.settle()
    for index in range(n):
        alone = continuation(prompt(length), 21, sample(6, 4 + index), wishes.get("adjustments"))
        assert rig.generated(10 + index) == alone
        assert rig.finished(10 + index).ending is Ending.MAX_TOKENS
        assert len(rig.scored(10 + index)) == (21 if "logprobs" in wishes else 0)
    assert rig.generated(1) == continuation(prompt(30, 5), 12, Sampling(temperature=0))
    assert rig.generated(30) == continuation(prompt(9, 3), 20, sample(2, 0))
    rig.check_nothing_held()
    done = counters(rig)
    assert done.prefill_tokens == 30 + length + 9, "the prompt is computed once"
    assert done.starved_steps == 0
    assert done.generated_tokens == 12 + 21 * n + 20


def test_samples_share_all_blocks_of_the_prompt_and_copy_the_last_when_they_write() -> None:
    rig = Rig(num_blocks=128)
    rig.submit(1, prompt(37), 20, n=8, sampling=Sampling(seed=3))
    while len(rig.generated(8)) < 4:
        rig.turn()
    tables = block_ids(rig)
    assert len(tables) == 8
    first, *others = tables.values()
    assert all(each[:4] == first[:4] for each in others), "37 tokens are four blocks of 8, and a part of one"
    assert len({each[4] for each in tables.values()}) == 8
    shared = [rig.pool.block(block_id, 0.0).ref_count for block_id in first[:4]]
    assert shared == [8] * 4
    rig.settle()
    rig.check_nothing_held()


def test_each_sample_ends_by_itself_and_the_first_cancelled_before_a_token_ends_all() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=8))
    alone = {index: continuation(prompt(20), 30, sample(1, index)) for index in range(4)}
    rig.submit(1, prompt(20), 30, n=4, sampling=sample(1, 0), stop_token_ids=[alone[2][5]])
    rig.submit(11, prompt(21), 30, n=3)
    rig.turn(2)
    rig.mailbox.post(Cancel(11))
    while len(rig.generated(2)) < 9:
        rig.turn()
    rig.mailbox.post(Cancel(2))
    rig.settle()
    for index in (0, 3):
        stop = alone[2][5]
        expected = alone[index][: alone[index].index(stop)] if stop in alone[index] else alone[index]
        assert rig.generated(1 + index) == expected
    assert rig.generated(3) == alone[2][: alone[2].index(alone[2][5])]
    assert rig.finished(3).ending is Ending.STOP_TOKEN
    assert rig.finished(2).ending is Ending.CANCELLED
    assert rig.generated(2) == alone[1][: len(rig.generated(2))]
    for request in (11, 12, 13):
        assert (rig.finished(request).ending, rig.generated(request)) == (Ending.CANCELLED, [])
    rig.check_nothing_held()


def test_samples_cancelled_at_any_time_give_every_block_back() -> None:
    chance = random.Random(5)
    for turns in range(14):
        rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=8))
        rig.submit(1, prompt(20), 30, n=5, sampling=sample(1, 0))
        rig.turn(turns)
        leaving = [1, 2, 3, 4, 5]
        chance.shuffle(leaving)
        for request in sorted(leaving) if not rig.generated(1) else leaving:
            rig.mailbox.post(Cancel(request))
        rig.settle()
        for request in leaving:
            assert rig.finished(request).ending is Ending.CANCELLED
        rig.check_nothing_held()


@pytest.mark.parametrize("turns", range(1, 9))
def test_a_step_that_fails_or_a_pool_that_is_lost_ends_every_sample(turns: int) -> None:
    for lost in (False, True):
        rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=8))
        rig.submit(1, prompt(20), 30, n=3)
        rig.turn(turns)
        if lost:
            rig.session.lose()
        else:
            rig.model.fail_next = ValueError("broken")
        rig.settle()
        for request in (1, 2, 3):
            reason = Reason.POOL_LOST if lost else Reason.ENGINE_FAILED
            assert rig.failed(request).reason == reason
        if not lost:
            rig.submit(7, prompt(20), 3, n=3)
            rig.settle()
            assert rig.generated(9) == rig.generated(7) == continuation(prompt(20), 3, Sampling(temperature=0))
            rig.check_nothing_held()


def test_logits_that_are_not_finite_and_a_worker_that_stops_end_every_sample() -> None:
    rig = Rig()
    rig.turn(3)
    rig.model.poison_request_with = 77
    rig.submit(1, [77, *prompt(20)], 30, n=3)
    rig.submit(5, prompt(20), 300, n=2)
    rig.turn(30)
    rig.submit(8, prompt(30), 30, n=2)
    rig.mailbox.post(Shutdown(0.0))
    rig.settle()
    assert [rig.failed(request).reason for request in (1, 2, 3)] == [Reason.ENGINE_FAILED] * 3
    assert [rig.failed(request).reason for request in (5, 6, 8, 9)] == [Reason.DRAINING] * 4


def test_without_table_ids_in_reserve_samples_match_what_is_sealed_of_the_prompt() -> None:
    rig = Rig(num_blocks=128)
    rig.turn(2)
    rig.submit(1, prompt(37), 12, n=4, sampling=sample(9, 0))
    rig.turn()
    rig.session.held = True
    while not rig.generated(4):
        rig.turn()
    rig.session.held = False
    rig.session.deliver()
    rig.settle()
    for index in range(4):
        assert rig.generated(1 + index) == continuation(prompt(37), 12, sample(9, index))
    rig.check_nothing_held()
    assert counters(rig).prefill_tokens < 37 + 3 * 8 + 3


def test_a_sample_that_has_to_yield_resumes_by_itself_with_the_same_tokens() -> None:
    for turns in range(4, 22, 3):
        rig = Rig(num_blocks=128, limits=Limits(max_batch_tokens=16, max_num_seqs=8))
        rig.submit(1, prompt(37), 14, n=4, sampling=sample(9, 0))
        rig.turn(turns)
        for table_id in list(block_ids(rig))[1:3]:
            rig.session.say(Victim(table_id))
        rig.settle()
        for index in range(4):
            assert rig.generated(1 + index) == continuation(prompt(37), 14, sample(9, index))
        rig.check_nothing_held()


def test_a_request_waits_until_all_its_samples_have_room_and_more_than_a_step_takes_are_refused() -> None:
    rig = Rig(num_blocks=128, limits=Limits(max_batch_tokens=64, max_num_seqs=4))
    rig.submit(1, prompt(20), 20)
    rig.submit(2, prompt(9), 40)
    rig.submit(10, prompt(12), 5, n=3, sampling=sample(1, 0))
    rig.submit(20, prompt(13), 5)
    rig.submit(30, prompt(13), 5, n=5)
    rig.settle()
    assert max(len(step.q_lens) for step in rig.model.steps) <= 4
    assert max(len(step.logit_rows) for step in rig.model.steps) <= 4
    for index in range(3):
        assert rig.generated(10 + index) == continuation(prompt(12), 5, sample(1, index))
    refused = rig.failed(30)
    assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "n")
    assert "--max-num-seqs (4)" in refused.message
    rig.check_nothing_held()


def test_prompt_logprobs_come_once_and_an_end_token_ends_one_sample() -> None:
    rig = Rig()
    most = 60
    ends = {index: continuation(prompt(20), most, sample(3, index)) for index in range(6)}
    assert any(EOS in tokens for tokens in ends.values()), "the case is not covered"
    rig.submit(1, prompt(20), most, n=6, sampling=sample(3, 0), prompt_logprobs=2, ignore_eos=False)
    rig.settle()
    assert len(rig.prompt_scored(1)) == 19
    for index, tokens in ends.items():
        assert not rig.prompt_scored(2 + index)
        assert rig.generated(1 + index) == (tokens[: tokens.index(EOS)] if EOS in tokens else tokens)
    rig.check_nothing_held()
