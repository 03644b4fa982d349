"""Drafts and what they share with others: blocks, steps, and the ends of requests."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending
from tests.cpu.engine_rig import Rig
from tests.cpu.guesses import GREEDY, SAMPLINGS, Alter, Guesser, learned, mostly_right, right, used, wrong
from tests.cpu.memory_pool import continuation
from tests.cpu.test_engine_logits import prompt


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


@pytest.mark.parametrize("alter", [right, wrong, mostly_right])
@pytest.mark.parametrize("length", [7, 8])
def test_only_accepted_tokens_seal_blocks_and_all_of_them_do(alter: Alter, length: int) -> None:
    guesser, tokens = Guesser(alter), prompt(length)
    (expected,) = learned(guesser, 41, [(tokens, GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, tokens, 41, speculate_tokens=8)
    rig.settle()
    # The KV of all but the last token was written; a request that goes on finds the full blocks of it.
    rig.submit(2, tokens + expected, 1)
    rig.settle()
    assert used(rig, 2).cached_tokens == (length + 40) // 8 * 8
    assert rig.generated(2) == continuation(tokens + expected, 1, GREEDY)


def test_rejected_tokens_leave_nothing_behind_in_shared_blocks() -> None:
    guesser = Guesser(mostly_right)
    shared = prompt(43)
    cases = [([*shared, request], sampling) for request, sampling in enumerate(SAMPLINGS)]
    expected = learned(guesser, 30, cases)
    rig = Rig(make_proposer=guesser)
    rig.submit(9, shared, 1, speculate_tokens=0)
    guesser.learn(shared, [0])
    rig.settle()
    for request, (tokens, sampling) in enumerate(cases):
        rig.submit(request, tokens, 30, sampling=sampling, speculate_tokens=8)
    rig.settle()
    assert [rig.generated(request) for request in range(4)] == expected
    assert all(used(rig, request).cached_tokens == 40 for request in range(4))
    rig.check_nothing_held()


def test_a_pool_that_is_short_gives_drafts_no_block_that_others_need() -> None:
    guesser = Guesser(mostly_right)
    cases = [(prompt(20, request), GREEDY) for request in range(4)]
    expected = learned(guesser, 60, cases)
    rig = Rig(num_blocks=40, make_proposer=guesser)  # ten blocks for each, to the last
    for request, (tokens, _) in enumerate(cases):
        rig.submit(request, tokens, 60, speculate_tokens=16)
    rig.settle()
    assert [rig.generated(request) for request in range(4)] == expected
    rig.check_nothing_held()


def test_a_sequence_whose_guesses_are_right_does_not_wait_for_blocks() -> None:
    guesser = Guesser(right)
    (expected,) = learned(guesser, 300, [(prompt(5), GREEDY)])
    rig = Rig(num_blocks=128, make_proposer=guesser)
    rig.submit(1, prompt(5), 300, speculate_tokens=16)
    rig.settle()
    assert rig.generated(1) == expected
    assert rig.starved_steps == 0
    assert len(rig.device.launched) < 40, "300 tokens, 17 at a time after the first steps"


# -- beside others


def test_drafts_take_only_what_decodes_and_prefill_leave_of_a_step() -> None:
    guesser = Guesser(right)
    cases = [(prompt(9), GREEDY), (prompt(200, 3), GREEDY)]
    expected = learned(guesser, 60, cases)
    rig = Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=12), make_proposer=guesser)
    rig.submit(0, cases[0][0], 60, speculate_tokens=8)
    rig.turn(4)
    seen = len(rig.device.launched)
    rig.submit(1, cases[1][0], 60, speculate_tokens=8)
    rig.settle()
    assert [rig.generated(request) for request in range(2)] == expected
    prefill = [step for step in rig.device.launched[seen:] if max(step.positions) < 199 and len(step.q_lens) == 2]
    assert len(prefill) > 4
    assert all(step.q_lens[0] == 1 for step in prefill if len(step.token_ids) == 16), "no draft displaces prefill"
    assert all(len(step.logit_rows) <= 12 for step in rig.device.launched)


def test_a_full_batch_leaves_no_room_for_drafts() -> None:
    guesser = Guesser(right)
    cases = [(prompt(9, request), GREEDY) for request in range(4)]
    expected = learned(guesser, 20, cases)
    rig = Rig(limits=Limits(max_batch_tokens=512, max_num_seqs=4, speculate_tokens=8), make_proposer=guesser)
    for request, (tokens, _) in enumerate(cases):
        rig.submit(request, tokens, 20)
    rig.settle()
    assert [rig.generated(request) for request in range(4)] == expected
    assert sum(used(rig, request).draft_tokens for request in range(4)) == 0


def test_a_sequence_that_guesses_waits_for_its_last_token_and_others_do_not(depth: int) -> None:
    guesser = Guesser(wrong)
    learned(guesser, 24, [([1, 2, 3], GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, [1, 2, 3], 24, speculate_tokens=1)
    rig.submit(2, [4, 5], 24)
    rig.settle()
    assert rig.generated(1) == continuation([1, 2, 3], 24, GREEDY)
    assert rig.generated(2) == continuation([4, 5], 24, GREEDY)
    # A draft of one, found wrong; then it rests for 2 tokens, in each step again; a draft, a rest of 4, of 8 and so on.
    assert used(rig, 1).draft_tokens <= 4
    if depth == 2:
        assert any(token < 0 for step in rig.device.launched for token in step.token_ids[:1] if len(step.q_lens) == 2)


# -- failures


@pytest.mark.parametrize("turns", [3, 4, 5])
def test_a_request_cancelled_while_a_draft_is_in_flight_gives_everything_back(turns: int) -> None:
    guesser = Guesser(mostly_right)
    learned(guesser, 60, [(prompt(20), GREEDY)])
    (expected,) = learned(guesser, 60, [(prompt(20, 1), GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, prompt(20), 60, speculate_tokens=8)
    rig.submit(2, prompt(20, 1), 60, speculate_tokens=8)
    rig.turn(turns)
    rig.mailbox.post(Cancel(1))
    rig.settle()
    assert rig.finished(1).ending is Ending.CANCELLED
    assert rig.generated(2) == expected
    rig.check_nothing_held()


@pytest.mark.parametrize("turns", [3, 4, 5])
def test_a_step_that_fails_with_a_draft_in_it_fails_its_sequences_only(turns: int) -> None:
    guesser = Guesser(right)
    learned(guesser, 60, [(prompt(20), GREEDY), (prompt(20, 1), GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, prompt(20), 60, speculate_tokens=8)
    rig.turn(turns)
    rig.model.fail_next = RuntimeError("no")
    rig.settle()
    assert rig.failed(1).reason == "ENGINE_FAILED"
    rig.submit(2, prompt(20, 1), 60, speculate_tokens=8)
    rig.settle()
    assert rig.generated(2) == continuation(prompt(20, 1), 60, GREEDY)
    rig.check_nothing_held()


def test_logits_that_are_not_finite_fail_a_sequence_that_guesses() -> None:
    guesser = Guesser(right)
    learned(guesser, 20, [(prompt(9), GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, prompt(9), 20, speculate_tokens=8)
    rig.turn(4)
    rig.model.poison_request_with = 0
    rig.settle()
    assert rig.failed(1).reason == "ENGINE_FAILED"
    known = continuation(prompt(9), 20, GREEDY)
    assert rig.generated(1) == known[: len(rig.generated(1))]
    rig.check_nothing_held()
