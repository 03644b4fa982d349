"""What requests get from the engine: tokens, endings, and their blocks back."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending, Sampling, Tokens
from inferd.core.reserve import STEPS_AHEAD
from tests.cpu.engine_rig import EOS, Rig
from tests.cpu.memory_pool import continuation

GREEDY = Sampling(temperature=0)
RANDOM = Sampling(temperature=1.3, top_p=0.95, seed=2**64 - 1)


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Everything here holds with one step at a time, and with the next one launched while one runs."""
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 200 for index in range(length)]


def mixed_requests() -> list[tuple[list[int], int, Sampling]]:
    requests = [(prompt(length, start), most, GREEDY) for start, (length, most) in enumerate([(1, 9), (8, 8), (37, 5)])]
    for index in range(3):
        requests.append((prompt(20), 6, Sampling(temperature=0.9, top_k=40, seed=5, sample_index=index)))
    return [*requests, (prompt(17, 3), 12, RANDOM), (prompt(16, 3), 1, RANDOM)]


@pytest.mark.parametrize("budget", [8, 13, 512])
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(budget: int) -> None:
    rig = Rig(limits=Limits(max_batch_tokens=budget, max_num_seqs=8))
    for request, (tokens, most, sampling) in enumerate(mixed_requests()):
        rig.submit(request, tokens, most, sampling=sampling)
    rig.settle()
    for request, (tokens, most, sampling) in enumerate(mixed_requests()):
        assert rig.generated(request) == continuation(tokens, most, sampling)
        assert rig.finished(request).ending is Ending.MAX_TOKENS
    rig.check_nothing_held()


def test_samples_of_one_seed_differ_and_repeat() -> None:
    rig = Rig()
    for request, index in enumerate([0, 1, 0]):
        rig.submit(request, prompt(5), 20, sampling=Sampling(seed=0, sample_index=index))
    rig.settle()
    assert rig.generated(0) == rig.generated(2) != rig.generated(1)


def test_requests_that_come_later_join_the_running_batch() -> None:
    rig = Rig()
    rig.submit(1, prompt(10), 20)
    rig.turn(6)
    rig.submit(2, prompt(9, 1), 3)
    rig.settle()
    assert rig.generated(2) == continuation(prompt(9, 1), 3, GREEDY)
    assert max(len(step.q_lens) for step in rig.model.steps) == 2
    assert [len(each.items) for each in rig.sent if isinstance(each, Tokens)].count(2) == 3


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    rig = Rig()
    rig.submit(1, prompt(40), 4)
    rig.settle()
    rig.submit(2, prompt(40), 4)
    rig.settle()
    assert rig.finished(1).used.cached_tokens == 0
    assert rig.finished(2).used.cached_tokens == 39, "all but the last, whose logits are wanted"
    assert rig.generated(2) == rig.generated(1)
    assert max(len(step.token_ids) for step in rig.model.steps[4:]) == 1


def test_a_salt_keeps_prefixes_apart() -> None:
    rig = Rig()
    for request, salt in enumerate([b"a", b"b", b"a"]):
        rig.submit(request, prompt(40), 4, salt=salt)
        rig.settle()
    assert [rig.finished(request).used.cached_tokens for request in range(3)] == [0, 0, 39]


# -- endings


def test_the_token_that_ends_a_continuation_is_named_and_not_delivered() -> None:
    expected = continuation(prompt(6), 10, GREEDY)
    stop = expected[4]
    rig = Rig()
    rig.submit(1, prompt(6), 10, stop_token_ids=[stop])
    rig.settle()
    end = rig.finished(1)
    assert (end.ending, end.stop_token_id) == (Ending.STOP_TOKEN, stop)
    assert rig.generated(1) == expected[: expected.index(stop)]
    assert end.used.generated_tokens == len(rig.generated(1))
    rig.check_nothing_held()


def seed_that_ends_after(least: int) -> tuple[int, list[int]]:
    for seed in range(1000):
        tokens = continuation(prompt(4), 12, Sampling(temperature=9, seed=seed))
        if EOS in tokens[least:] and EOS not in tokens[:least]:
            return seed, tokens
    raise AssertionError("no seed draws the end of sequence")


def test_the_models_own_end_ends_a_continuation_unless_it_is_ignored() -> None:
    seed, expected = seed_that_ends_after(2)
    sampling = Sampling(temperature=9, seed=seed)
    rig = Rig()
    rig.submit(1, prompt(4), 12, sampling=sampling, ignore_eos=False)
    rig.submit(2, prompt(4), 12, sampling=sampling, ignore_eos=True)
    rig.settle()
    assert rig.finished(1).ending is Ending.END_OF_SEQUENCE
    assert rig.generated(1) == expected[: expected.index(EOS)]
    assert rig.finished(2).ending is Ending.MAX_TOKENS
    assert rig.generated(2) == expected


def test_one_token_is_generated_from_a_prompt_of_exactly_the_pool() -> None:
    rig = Rig(num_blocks=2)
    rig.submit(1, prompt(16), 1)
    rig.settle()
    assert rig.generated(1) == continuation(prompt(16), 1, GREEDY)
    rig.check_nothing_held()


def test_times_follow_each_other_and_cover_the_request() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=1))
    rig.submit(1, prompt(20), 5)
    rig.submit(2, prompt(20, 1), 5)
    rig.settle()
    first, second = rig.finished(1).used, rig.finished(2).used
    assert min(first.prefill_s, first.decode_s, second.prefill_s, second.decode_s) > 0
    assert second.queue_s > first.prefill_s + first.decode_s
    assert second.queue_s + second.prefill_s + second.decode_s < rig.now


# -- cancelling


def test_a_request_cancelled_in_the_queue_never_touches_the_pool() -> None:
    rig = Rig(limits=Limits(max_num_seqs=1))
    rig.submit(1, prompt(8), 3)
    rig.submit(2, prompt(8, 1), 3)
    rig.mailbox.post(Cancel(2))
    rig.settle()
    assert rig.finished(2).ending is Ending.CANCELLED
    assert [create.ref for step in rig.session.steps for create in step.creates] == [1]


def test_a_request_cancelled_while_memd_is_asked_gives_the_table_back() -> None:
    rig = Rig()
    rig.turn()
    rig.session.held = True
    rig.submit(1, prompt(30), 3)
    rig.turn()
    assert rig.pool.num_tables == 1
    rig.mailbox.post(Cancel(1))
    rig.turn()
    assert rig.finished(1).ending is Ending.CANCELLED
    rig.session.deliver()
    rig.turn()
    rig.check_nothing_held()
    assert not rig.model.steps


def test_a_prefill_cancelled_half_way_leaves_only_what_was_computed_to_be_matched(depth: int) -> None:
    rig = Rig(limits=Limits(max_batch_tokens=12, max_num_seqs=2))
    rig.submit(1, prompt(60), 3)
    rig.turn(4)
    assert [len(step.token_ids) for step in rig.device.launched] == [12, 12]
    computed = sum(len(step.token_ids) for step in rig.model.steps)
    assert computed == {1: 24, 2: 12}[depth]
    rig.mailbox.post(Cancel(1))
    rig.settle()
    rig.check_nothing_held()
    assert rig.finished(1).used.generated_tokens == 0
    rig.submit(2, prompt(60), 3)
    rig.settle()
    assert rig.finished(2).used.cached_tokens == computed // 8 * 8
    assert rig.generated(2) == continuation(prompt(60), 3, GREEDY)


@pytest.mark.parametrize("turns", range(2, 9))
def test_a_request_cancelled_at_any_turn_is_gone_from_the_pool_when_no_step_writes_to_it(
    turns: int, depth: int
) -> None:
    rig = Rig(limits=Limits(max_batch_tokens=9, max_num_seqs=2))
    rig.submit(1, prompt(21), 30)
    rig.submit(2, prompt(5, 1), 30)
    rig.turn(turns)
    rig.mailbox.post(Cancel(1))
    rig.turn()
    assert rig.finished(1).ending is Ending.CANCELLED
    rig.turn(2 * (depth - 1))  # one to collect the step in flight, one to tell memd
    assert rig.pool.num_tables == 1
    rig.settle()
    assert rig.generated(2) == continuation(prompt(5, 1), 30, GREEDY)
    rig.check_nothing_held()


def test_cancelling_what_has_ended_or_never_was_says_nothing() -> None:
    rig = Rig()
    rig.submit(1, prompt(4), 2)
    rig.settle()
    said = len(rig.sent)
    rig.mailbox.post(Cancel(1))
    rig.mailbox.post(Cancel(99))
    rig.turn()
    assert len(rig.sent) == said


# -- a pool smaller than the load


def test_more_requests_than_the_pool_holds_all_finish_in_order() -> None:
    rig = Rig(num_blocks=10)
    for request in range(25):
        rig.submit(request, prompt(20 + request % 9, request), 12)
    rig.settle()
    first_seen = list(dict.fromkeys(owner for each in rig.sent if isinstance(each, Tokens) for owner, _ in each.items))
    assert first_seen == list(range(25))
    for request in range(25):
        assert rig.generated(request) == continuation(prompt(20 + request % 9, request), 12, GREEDY)
    assert rig.pool.counters.refused_requests > 0
    rig.check_nothing_held()


def test_a_large_request_is_not_overtaken_by_small_ones_for_ever() -> None:
    rig = Rig(num_blocks=8)
    rig.submit(1, prompt(30), 20)
    rig.turn(3)
    rig.submit(2, prompt(50, 1), 15)  # the whole pool
    for request in range(3, 9):
        rig.submit(request, prompt(3, request), 3)
    rig.settle()
    first_seen = list(dict.fromkeys(owner for each in rig.sent if isinstance(each, Tokens) for owner, _ in each.items))
    assert first_seen[:2] == [1, 2]
    assert sorted(message.request for message in rig.sent if hasattr(message, "ending")) == list(range(1, 9))


def test_what_another_worker_frees_lets_the_head_in() -> None:
    rig = Rig(num_blocks=4)
    lease = rig.pool.create_lease("neighbour", 1e6, 0.0).lease_id
    blocks = rig.pool.allocate_blocks(lease, 3, 0.0).block_ids
    rig.submit(1, prompt(14), 3)
    rig.settle()
    asked = len(rig.session.steps)
    rig.turn(5)
    assert len(rig.session.steps) == asked, "a refused head asks again without news"
    rig.pool.free_blocks(lease, blocks, 0.0)
    rig.settle()
    assert rig.finished(1).ending is Ending.MAX_TOKENS


# -- what memd hears


def test_a_turn_sends_at_most_one_step_message_and_a_decode_never_waits_for_memd(depth: int) -> None:
    rig = Rig()
    rig.submit(1, prompt(9), 20)
    rig.turn(2)
    rig.session.held = True  # memd answers nothing for some steps
    rig.submit(2, prompt(9, 5), 20)
    for _ in range(STEPS_AHEAD):
        steps, messages = len(rig.device.launched), len(rig.session.steps)
        rig.turn()
        assert len(rig.device.launched) == steps + 1
        assert len(rig.session.steps) <= messages + 1
    assert len(rig.generated(1)) == STEPS_AHEAD - (depth - 1)


def test_committed_is_what_was_computed_and_the_last_token_is_not() -> None:
    rig = Rig()
    rig.submit(1, prompt(10), 7)
    rig.settle()
    committed = [token for step in rig.session.steps for commit in step.commits for token in commit.token_ids]
    assert committed == prompt(10) + rig.generated(1)[:-1]
    assert rig.pool.usage().cached == 2
