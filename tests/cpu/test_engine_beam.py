"""Beam searches in the engine: the rules' own result through forks, copies, preemptions and other requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferd.core.beam import BeamSearch, Hypotheses, Hypothesis
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending, Sampling, Shutdown
from inferd.core.ports import Victim
from pagepool.errors import Reason
from tests.cpu.engine_rig import EOS, Rig
from tests.cpu.memory_pool import continuation, logits_after
from tests.cpu.test_engine_samples import block_ids, counters, prompt

SIZE = 8


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def expected(tokens: list[int], most: int, how: Beam, ends: dict[int, Ending]) -> list[Hypothesis]:
    """The search on the fake model's logits, without any pool."""
    search = BeamSearch(how, most, ends)
    beams = [tokens]
    while beams:
        logprobs = torch.stack([torch.from_numpy(logits_after(beam)) for beam in beams]).double().log_softmax(-1)
        top = logprobs.topk(search.num_candidates)
        rows = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        beams = [[*beams[each.parent], each.token] for each in search.advance(rows)]
    return search.best()


def found(rig: Rig, request: int) -> list[Hypothesis]:
    (each,) = [message for message in rig.sent if isinstance(message, Hypotheses) and message.request == request]
    return each.items


def expect_found(rig: Rig, request: int, tokens: list[int], most: int, how: Beam, **ends: Any) -> None:
    wanted = expected(tokens, most, how, ends.get("ends", {}))
    have = found(rig, request)
    assert [each.tokens for each in have] == [each.tokens for each in wanted]
    assert [each.ending for each in have] == [each.ending for each in wanted]
    assert [each.score for each in have] == pytest.approx([each.score for each in wanted], abs=1e-5)
    assert rig.finished(request).ending is have[0].ending
    assert not rig.generated(request)


def turn_until_over(rig: Rig, request: int, most_blocks: int, num_prompt: int) -> None:
    """Turn, and hold the tables' distinct blocks against what a search may have at any time: see the issue."""
    for _ in range(2000):
        rig.turn()
        tables = list(block_ids(rig).values())
        longest = max((len(each) for each in tables), default=0)
        own_tail = max(longest - num_prompt // SIZE, 0)
        assert len({block for table in tables for block in table}) <= num_prompt // SIZE + most_blocks * (own_tail + 1)
        if rig.end(request) is not None:
            return
    raise AssertionError("still busy")


@pytest.mark.parametrize("width", range(1, 9))
def test_a_search_finds_what_its_rules_find_within_its_blocks(width: int) -> None:
    stopping = list(EarlyStopping)[width % 3]
    how = Beam(width, (0.6, 1.0, 1.4)[width % 3], stopping, (width + 1) // 2)
    for length, most in ((3, 9), (16, 20), (37, 13)):
        rig = Rig(num_blocks=256)
        rig.submit(1, prompt(length), most, beam=how, ignore_eos=False, stop_token_ids=[4, 5])
        turn_until_over(rig, 1, width, length)
        rig.settle()
        ends = {EOS: Ending.END_OF_SEQUENCE, 4: Ending.STOP_TOKEN, 5: Ending.STOP_TOKEN}
        expect_found(rig, 1, prompt(length), most, how, ends=ends)
        rig.check_nothing_held()
        done = counters(rig)
        assert (done.starved_steps, done.prefill_tokens) == (0, length)
        assert rig.finished(1).used.generated_tokens == done.generated_tokens


def test_searches_and_others_run_in_one_batch_and_share_what_they_can() -> None:
    rig = Rig(num_blocks=256, limits=Limits(max_batch_tokens=24, max_num_seqs=16))
    hows = {1: Beam(4, num_return_sequences=4), 2: Beam(6, 1.4), 3: Beam(3, 0.6, EarlyStopping.FULL, 2)}
    for request, how in hows.items():
        rig.submit(request, prompt(20 + request, request), 18, beam=how)
    rig.submit(10, prompt(33), 20, n=3, sampling=Sampling(seed=4))
    rig.submit(20, prompt(12), 25)
    rig.settle()
    for request, how in hows.items():
        expect_found(rig, request, prompt(20 + request, request), 18, how)
    for index in range(3):
        assert rig.generated(10 + index) == continuation(prompt(33), 20, Sampling(seed=4, sample_index=index))
    assert rig.generated(20) == continuation(prompt(12), 25, Sampling(temperature=0))
    assert max(len(step.q_lens) for step in rig.model.steps) <= 16
    rig.check_nothing_held()


def test_a_search_yields_as_a_whole_whenever_one_of_its_tables_is_named_and_finds_the_same() -> None:
    how = Beam(4, 1.0, EarlyStopping.NEVER, 4)
    for turns in range(2, 24, 4):
        rig = Rig(num_blocks=128, limits=Limits(max_batch_tokens=16, max_num_seqs=8))
        rig.submit(1, prompt(21), 16, beam=how)
        rig.turn(turns)
        tables = list(block_ids(rig))
        if tables and rig.end(1) is None:
            rig.session.say(Victim(tables[turns % len(tables)]))
        rig.turn(9)
        if tables := list(block_ids(rig)) if rig.end(1) is None else []:
            rig.session.say(Victim(tables[-1]))
        rig.settle()
        expect_found(rig, 1, prompt(21), 16, how)
        rig.check_nothing_held()
        assert rig.finished(1).used.preemptions in (0, 1, 2)


def test_without_table_ids_or_blocks_in_reserve_a_search_waits_for_them() -> None:
    how = Beam(5, num_return_sequences=2)
    for turns in range(2, 20, 3):
        rig = Rig(num_blocks=96)
        rig.submit(1, prompt(21), 14, beam=how)
        rig.turn(turns)
        rig.session.held = True
        rig.turn(25)
        rig.session.held = False
        rig.session.deliver()
        rig.settle()
        expect_found(rig, 1, prompt(21), 14, how)
        rig.check_nothing_held()


def test_a_search_that_is_cancelled_or_fails_at_any_time_gives_every_block_back() -> None:
    for turns in range(0, 16, 3):
        for how in ("cancel", "fail", "stop", "lose"):
            rig = Rig(num_blocks=96, limits=Limits(max_batch_tokens=16, max_num_seqs=8))
            rig.submit(1, prompt(21), 30, beam=Beam(4))
            rig.turn(turns)
            if how == "cancel":
                rig.mailbox.post(Cancel(1))
            elif how == "stop":
                rig.mailbox.post(Shutdown(0.0))
            elif how == "fail" and turns:
                rig.model.fail_next = ValueError("broken")
            elif how == "lose" and turns:
                rig.session.lose()
            rig.settle()
            if how == "cancel":
                assert rig.finished(1).ending is Ending.CANCELLED
            elif how == "stop" or turns:
                reasons = {"fail": Reason.ENGINE_FAILED, "stop": Reason.DRAINING, "lose": Reason.POOL_LOST}
                assert rig.failed(1).reason == reasons[how]
            assert how in ("cancel", "stop") or not turns or not [e for e in rig.sent if isinstance(e, Hypotheses)]
            if how != "lose":
                rig.check_nothing_held()


def test_logits_that_are_not_finite_end_a_search() -> None:
    rig = Rig()
    rig.turn(3)
    rig.model.poison_request_with = 77
    rig.submit(1, [77, *prompt(20)], 30, beam=Beam(3))
    rig.settle()
    assert rig.failed(1).reason == Reason.ENGINE_FAILED
    rig.check_nothing_held()


def test_a_search_that_could_never_run_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=16, limits=Limits(max_batch_tokens=16, max_num_seqs=8))
    rig.turn(3)
    rig.submit(1, prompt(20), 30, beam=Beam(8))
    rig.submit(2, prompt(20), 30, beam=Beam(9))
    rig.submit(3, prompt(20), 21, beam=Beam(3))
    rig.settle()
    large, wide = rig.failed(1), rig.failed(2)
    assert (large.reason, large.metadata["num_blocks"]) == (Reason.REQUEST_TOO_LARGE, str(2 + 8 * 5))
    assert "with 8 beams," in large.message
    assert (wide.reason, wide.field) == (Reason.INVALID_FIELD, "beam.width")
    expect_found(rig, 3, prompt(20), 21, Beam(3))
    rig.check_nothing_held()
