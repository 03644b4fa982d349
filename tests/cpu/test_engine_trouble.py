"""What goes wrong around an engine, and what becomes of its requests."""

from __future__ import annotations

import threading

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending, EngineState, Finished, Sampling, Shutdown
from inferd.core.ports import Draining
from pagepool.errors import PagepoolError, Reason
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, make_pool

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Everything here holds with one step at a time, and with the next one launched while one runs."""
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def gone() -> PagepoolError:
    return PagepoolError(Reason.POOL_LOST, "nobody listens at the socket", retry_after_s=0.1)


# -- refusals


@pytest.mark.parametrize("attached", [True, False])
def test_a_request_that_the_whole_pool_cannot_hold_is_refused_with_the_way_out(attached: bool) -> None:
    rig = Rig(num_blocks=4)
    rig.turn(int(attached))  # before, only memd can say so
    rig.submit(1, [1] * 30, 4)
    rig.submit(2, [1] * 29, 4)
    rig.settle()
    failed = rig.failed(1)
    assert failed.reason == "REQUEST_TOO_LARGE"
    assert "need 5 blocks of 8 tokens" in failed.message
    assert "has 4" in failed.message
    assert failed.retry_after_s is None
    assert rig.finished(2).ending is Ending.MAX_TOKENS


def test_a_full_queue_says_when_to_come_back() -> None:
    rig = Rig(limits=Limits(max_num_seqs=1, max_queue=1))
    for request in range(3):
        rig.submit(request, [1, 2], 2)
    rig.settle()
    assert (rig.failed(2).reason, rig.failed(2).retry_after_s) == ("QUEUE_FULL", 1.0)
    assert rig.finished(0)
    assert rig.finished(1)


def test_a_full_queue_says_when_a_place_is_expected_to_come_free() -> None:
    rig = Rig(limits=Limits(max_num_seqs=1, max_queue=0))
    for request in range(3):
        rig.submit(request, [1, 2], 9)
        rig.settle()
        rig.now += 10
    for request in (3, 4, 5):
        rig.submit(request, [1, 2], 9)
        rig.turn()
    assert rig.failed(4).retry_after_s == pytest.approx(10, abs=0.5)
    assert rig.failed(5).retry_after_s == pytest.approx(20, abs=0.5)


def test_an_empty_prompt_is_refused_though_the_front_should_have() -> None:
    rig = Rig()
    rig.submit(1, [], 2)
    rig.settle()
    assert rig.failed(1).reason == "PROMPT_EMPTY"


# -- memd goes


def test_when_the_pool_is_lost_every_request_fails_at_once_and_the_engine_comes_back() -> None:
    rig = Rig(limits=Limits(max_num_seqs=2))
    for request in range(4):
        rig.submit(request, [request, 1, 2], 10)
    rig.turn(4)
    old = rig.session
    rig.pool = make_pool(32, epoch=8)
    rig.refusals = [gone(), gone()]
    old.lose()
    rig.turn()
    assert rig.closed == [old]
    rig.submit(4, [4], 2)
    rig.turn()
    for request in range(5):
        assert (rig.failed(request).reason, rig.failed(request).retry_after_s) == ("POOL_LOST", 1.0)
    for _ in range(3):
        rig.now += 1
        rig.settle()
    rig.submit(5, [5, 1, 2], 10)
    rig.settle()
    assert rig.generated(5) == continuation([5, 1, 2], 10, GREEDY)
    assert rig.phases == ["warming_up", "serving", "attaching", "serving"]
    assert [state.pool_epoch for state in rig.sent if isinstance(state, EngineState)][-1] == 8
    assert rig.warmed_up == 1
    rig.check_nothing_held()


def test_attaching_is_tried_again_ever_more_slowly_and_says_why() -> None:
    rig = Rig()
    rig.refusals = [gone() for _ in range(8)]
    rests = []
    while rig.refusals:
        rests.append(rig.engine.turn() or 0.0)
        assert rig.engine.turn() == pytest.approx(rests[-1], abs=0.01), "it asked again before its time"
        rig.now += rests[-1]
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert rig.sent[0].detail == "nobody listens at the socket"
    rig.turn()
    assert rig.phases[-1] == "serving"


def test_a_request_can_be_cancelled_while_there_is_no_pool() -> None:
    rig = Rig()
    rig.refusals = [gone()]
    rig.submit(1, [1], 2)
    rig.turn()
    rig.mailbox.post(Cancel(1))
    rig.turn()
    assert rig.finished(1).ending is Ending.CANCELLED


def test_a_warm_up_that_loses_memd_is_done_again_after_the_next_attach() -> None:
    rig = Rig()
    rig.warm_up_errors = [gone()]
    rig.settle()
    first = rig.session
    assert rig.closed == [first]
    rig.now += 1
    rig.submit(1, [1], 2)
    rig.settle()
    assert rig.phases == ["warming_up", "attaching", "warming_up", "serving"]
    assert rig.warmed_up == 2
    assert rig.finished(1)


def test_a_refusal_for_good_ends_the_engine() -> None:
    rig = Rig()
    rig.refusals = [PagepoolError(Reason.GEOMETRY_MISMATCH, "another model's pool")]
    with pytest.raises(PagepoolError, match="another model"):
        rig.engine.run()


def test_a_memd_that_drains_gets_its_pool_back_when_the_running_requests_are_done() -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 6)
    rig.turn(3)
    rig.session.say(Draining(60.0))
    rig.submit(2, [4, 5], 2)
    rig.refusals = [gone()]
    rig.settle()
    assert rig.generated(1) == continuation([1, 2, 3], 6, GREEDY)
    assert rig.failed(2).reason == "POOL_LOST"
    assert rig.closed == [rig.session]
    rig.check_nothing_held()
    rig.now += 1
    rig.settle()
    rig.submit(3, [4, 5], 2)
    rig.settle()
    assert rig.finished(3)


def test_a_memd_that_drains_waits_no_longer_than_it_said() -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 400)
    rig.turn(3)
    rig.session.say(Draining(1.0))
    rig.turn()
    assert rig.end(1) is None
    rig.now += 1
    rig.turn()
    assert rig.failed(1).reason == "POOL_LOST"


# -- the model fails


def test_a_failed_step_ends_its_own_requests_and_the_engine_serves_on() -> None:
    rig = Rig(limits=Limits(max_num_seqs=2))
    for request in range(3):
        rig.submit(request, [request, 9], 5)
    rig.turn(3)
    rig.model.fail_next = RuntimeError("a kernel's secret")
    rig.settle()
    for request in (0, 1):
        assert rig.failed(request).reason == "ENGINE_FAILED"
        assert "secret" not in rig.failed(request).message
    assert rig.generated(2) == continuation([2, 9], 5, GREEDY)
    rig.check_nothing_held()


def test_logits_that_are_not_finite_fail_their_request_and_not_its_batch_mates() -> None:
    rig = Rig()
    rig.turn()
    rig.model.poison_request_with = 13
    rig.submit(1, [13, 2], 4)
    rig.submit(2, [14, 2], 4)
    rig.settle()
    assert rig.failed(1).reason == "ENGINE_FAILED"
    assert "not finite" in rig.failed(1).message
    assert rig.generated(2) == continuation([14, 2], 4, GREEDY)
    rig.check_nothing_held()


# -- the end


def test_shutdown_lets_what_runs_finish_and_sends_the_rest_elsewhere() -> None:
    rig = Rig(limits=Limits(max_num_seqs=1))
    rig.submit(1, [1, 2, 3], 5)
    rig.submit(2, [4], 5)
    rig.turn(3)
    rig.mailbox.post(Shutdown(60.0))
    rig.submit(3, [5], 5)
    rig.settle()
    assert rig.generated(1) == continuation([1, 2, 3], 5, GREEDY)
    assert [rig.failed(request).reason for request in (2, 3)] == ["DRAINING", "DRAINING"]
    assert rig.phases[-1] == "stopped"
    assert rig.engine.turn() is None
    rig.check_nothing_held()


@pytest.mark.parametrize("last_word", [Shutdown(0.0), None])
def test_without_grace_or_without_a_front_it_stops_within_a_turn(last_word: Shutdown | None) -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 50)
    rig.turn(3)
    rig.mailbox.post(last_word)
    rig.settle()
    assert rig.failed(1).reason == "DRAINING"
    assert rig.closed == [rig.session]
    rig.check_nothing_held()


def test_shutdown_while_there_is_no_pool_stops_at_once() -> None:
    rig = Rig()
    rig.refusals = [gone()]
    rig.turn()
    rig.mailbox.post(Shutdown(60.0))
    assert rig.engine.turn() is None
    assert rig.phases == ["attaching", "stopped"]


# -- resting


def test_a_resting_engine_wakes_for_a_message_and_for_the_pool_and_for_nothing_else() -> None:
    rig = Rig()
    done = threading.Event()
    turns = 0
    turn = rig.engine.turn

    def counted() -> float | None:
        nonlocal turns
        turns += 1
        return turn()

    def noticed(message: object) -> None:
        if isinstance(message, Finished):
            done.set()

    rig.engine.turn = counted  # type: ignore[method-assign]
    rig.on_send = noticed
    thread = threading.Thread(target=rig.engine.run)
    thread.start()
    rig.submit(1, [1, 2], 3)
    assert done.wait(10)
    rig.mailbox.post(Shutdown(0.0))
    thread.join(10)
    assert not thread.is_alive()
    assert rig.generated(1) == continuation([1, 2], 3, GREEDY)
    assert turns < 20


def test_counters_tell_what_was_done_and_that_no_unary_call_was_made() -> None:
    rig = Rig()
    for request in (1, 2):
        rig.submit(request, list(range(20)), 4)
        rig.settle()
    rig.mailbox.post(Shutdown(0.0))
    rig.settle()
    counters = rig.sent[-1].counters
    assert (counters.prefill_tokens, counters.cached_tokens, counters.generated_tokens) == (24, 16, 8)
    assert counters.steps == 8
    assert (counters.memd_steps, counters.memd_unary_calls) == (len(rig.session.steps), 0)
    assert 0 < counters.forward_s < counters.step_s


def test_the_state_is_sent_at_most_once_a_second_and_a_last_time_after_the_work() -> None:
    rig = Rig()
    rig.submit(1, [1, 2], 300)
    rig.settle()
    busy = [message for message in rig.sent if isinstance(message, EngineState) and message.phase == "serving"]
    assert len(busy) <= 2 + rig.now
    rig.now += 1
    rig.turn()
    assert rig.sent[-1].running == 0
    assert rig.sent[-1].counters.generated_tokens == 300
