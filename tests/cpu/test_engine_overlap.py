"""An engine that launches a step before the tokens of the one before are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending, Sampling, Shutdown, Tokens
from inferd.core.ports import Draining
from inferd.model.load import prepare
from inferd.model.runner import ModelRunner
from inferd.surroundings import DeviceLostError
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from pagekernels.cpu import configure
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_VERSION
from tests.cpu.engine_rig import EOS, Rig
from tests.cpu.memory_pool import VOCAB, continuation, make_pool
from tests.cpu.model_configs import VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts, reference

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "depth", 2)


def stopping_after(prompt: list[int], count: int) -> int:
    """A token that a greedy continuation generates first after `count` others."""
    expected = continuation(prompt, count + 1, GREEDY)
    assert expected[count] not in expected[:count]
    return expected[count]


# -- what is launched


def test_a_step_is_collected_only_when_the_next_one_was_launched() -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 10)
    rig.turn(3)
    assert (len(rig.device.launched), len(rig.model.steps)) == (1, 0)
    for step in range(2, 10):
        rig.turn()
        assert (len(rig.device.launched), len(rig.model.steps)) == (step, step - 1)
        assert len(rig.generated(1)) == step - 1
    assert [step.token_ids for step in rig.device.launched] == [[1, 2, 3]] + [[-1]] * 8


def test_a_prompts_last_chunk_samples_and_the_chunks_before_know_all_their_tokens() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=2))
    rig.submit(1, [1], 30)
    rig.turn(4)
    rig.submit(2, list(range(50, 70)), 3)
    rig.settle()
    chunks = [[-1, *range(50, 57)], [-1, *range(57, 64)], [-1, *range(64, 70)]]
    launched = [step.token_ids for step in rig.device.launched]
    assert launched == [[1], [-1], [-1], *chunks, [-1, -2], [-1, -2], *[[-1]] * 22]
    for request, prompt, most in ((1, [1], 30), (2, list(range(50, 70)), 3)):
        assert rig.generated(request) == continuation(prompt, most, GREEDY)


def test_no_step_is_planned_for_the_token_after_the_last() -> None:
    rig = Rig(num_blocks=2)
    rig.submit(1, list(range(10)), 7)  # two blocks, full to the last slot
    rig.settle()
    assert sum(len(step.token_ids) for step in rig.device.launched) == 10 + 7 - 1
    assert max(slot for step in rig.device.launched for slot in step.slots) < 16 * 4
    assert rig.finished(1).ending is Ending.MAX_TOKENS
    rig.check_nothing_held()


# -- the same tokens


@dataclass
class Request:
    prompt: list[int]
    most: int
    sampling: Sampling
    options: dict[str, object]
    cancel_at: int | None = None
    expected: list[int] = field(default_factory=list)
    ending: Ending = Ending.MAX_TOKENS


def random_request(choice: random.Random) -> Request:
    prompt = [choice.randrange(200) for _ in range(choice.choice([1, 7, 8, 9, 25, 40]))]
    most = choice.choice([1, 2, 5, 9, 20])
    sampling = choice.choice([GREEDY, Sampling(temperature=3.0, seed=choice.randrange(9), top_p=0.99)])
    stops = choice.sample(range(VOCAB - 1), choice.choice([0, 0, 20]))
    ignore_eos = choice.random() < 0.5
    options = {"stop_token_ids": stops, "ignore_eos": ignore_eos, "priority": choice.randrange(3)}
    request = Request(prompt, most, sampling, options, choice.randrange(3, 40) if choice.random() < 0.2 else None)
    for token in continuation(prompt, most, sampling):
        if token in stops:
            request.ending = Ending.STOP_TOKEN
            break
        if token == EOS and not ignore_eos:
            request.ending = Ending.END_OF_SEQUENCE
            break
        request.expected.append(token)
    return request


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_gets_the_same_tokens_at_every_depth(seed: int, depth: int) -> None:
    choice = random.Random(seed)
    requests = [random_request(choice) for _ in range(25)]
    budget, at_once = choice.choice([(6, 4), (13, 8), (512, 12)])
    rig = Rig(num_blocks=40, limits=Limits(max_batch_tokens=budget, max_num_seqs=at_once))
    rig.depth = depth
    for turn in range(60):
        for number in range(len(requests)):
            if turn == number:
                request = requests[number]
                rig.submit(number, request.prompt, request.most, sampling=request.sampling, **request.options)
            elif requests[number].cancel_at is not None and turn == number + (requests[number].cancel_at or 0):
                rig.mailbox.post(Cancel(number))
        rig.turn()
    rig.settle()
    for number, request in enumerate(requests):
        ending, tokens = rig.finished(number).ending, rig.generated(number)
        if ending is Ending.CANCELLED:
            assert request.cancel_at is not None
            assert tokens == request.expected[: len(tokens)]
        else:
            assert (ending, tokens) == (request.ending, request.expected)
        assert rig.finished(number).used.generated_tokens == len(tokens)
    rig.check_nothing_held()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_real_model_generates_what_transformers_does(depth: int) -> None:
    served, prompts = prepare("llama", random_model("llama")), random_prompts([1, 3, 16, 30, 41], VOCAB_SIZE)
    expected = reference(random_model("llama"), prompts, 12)
    configure(1)
    layout = served.layout(8)
    pool = Pool(7, 8, slab_bytes=64 * layout.block_bytes)
    pool.declare(Geometry(layout.layers, layout.format, False, LAYOUT_VERSION, bytes(32), "llama"))

    def bind(_: Pool) -> ModelRunner:
        return ModelRunner(served, CpuOps(np.full(64 * layout.block_bytes, 0xFF, np.uint8), layout))

    rig = Rig(limits=Limits(max_batch_tokens=17, max_num_seqs=8), pool=pool, bind=bind)
    rig.depth = depth
    for request, prompt in enumerate(prompts):
        rig.submit(request, prompt, 12)
    rig.settle()
    assert [rig.generated(request) for request in range(len(prompts))] == expected
    rig.check_nothing_held()


# -- a sequence that has ended while its next step is in flight


def test_what_follows_the_token_that_ended_a_sequence_is_neither_delivered_nor_committed() -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 20, stop_token_ids=[stopping_after([1, 2, 3], 4)])
    while rig.end(1) is None:
        rig.turn()
    assert len(rig.device.in_flight) == 1
    assert rig.finished(1).ending is Ending.STOP_TOKEN
    rig.turn()
    assert rig.pool.num_tables == 1, "given back under a step that writes to it"
    rig.settle()
    assert rig.generated(1) == continuation([1, 2, 3], 4, GREEDY)
    committed = [token for step in rig.session.steps for commit in step.commits for token in commit.token_ids]
    assert committed == [1, 2, 3, *rig.generated(1)]
    assert sum(len(step.token_ids) for step in rig.model.steps) == len(committed) + 1
    rig.check_nothing_held()


def test_its_blocks_go_to_the_next_request_when_the_step_is_over() -> None:
    rig = Rig(num_blocks=3)
    rig.submit(1, [1, 2, 3], 20, stop_token_ids=[stopping_after([1, 2, 3], 4)])
    rig.submit(2, [4, 5], 20)
    rig.settle()
    assert rig.generated(2) == continuation([4, 5], 20, GREEDY)
    rig.check_nothing_held()


def test_logits_that_are_not_finite_end_their_request_and_nothing_else_in_the_steps_in_flight() -> None:
    rig = Rig()
    rig.turn()
    rig.submit(1, [13, 2], 9)
    rig.submit(2, [14, 2], 9)
    rig.turn(4)
    rig.model.poison_request_with = 13
    rig.settle()
    assert "not finite" in rig.failed(1).message
    assert rig.generated(1) == continuation([13, 2], len(rig.generated(1)), GREEDY)
    assert rig.generated(2) == continuation([14, 2], 9, GREEDY)
    rig.check_nothing_held()


# -- steps that fail


def test_a_failed_step_ends_its_requests_and_the_step_behind_it_serves_the_others() -> None:
    rig = Rig()
    rig.submit(1, [1, 2], 20)
    rig.submit(2, [3, 4], 20)
    rig.turn(6)
    rig.submit(3, [5, 6], 5)
    rig.turn()  # memd is asked
    rig.model.fail_next = RuntimeError("a kernel's secret")
    rig.turn()  # 3 is launched, and the step before fails
    for request in (1, 2):
        assert rig.failed(request).reason == "ENGINE_FAILED"
    assert len(rig.device.in_flight[0].step.q_lens) == 3
    rig.settle()
    assert rig.generated(3) == continuation([5, 6], 5, GREEDY)
    rig.check_nothing_held()


def test_two_failed_steps_in_flight_end_each_request_once() -> None:
    rig = Rig()
    rig.submit(1, [1, 2], 20)
    rig.turn(5)
    rig.model.fail_next = RuntimeError("first")
    rig.turn()
    rig.model.fail_next = RuntimeError("second")
    rig.settle()
    assert rig.failed(1).reason == "ENGINE_FAILED"
    rig.submit(2, [3, 4], 5)
    rig.settle()
    assert rig.generated(2) == continuation([3, 4], 5, GREEDY)
    rig.check_nothing_held()


def test_a_step_that_cannot_be_launched_fails_behind_the_tokens_of_the_one_before() -> None:
    rig = Rig()
    rig.submit(1, [1, 2], 20)
    rig.turn(5)
    told = len(rig.generated(1))
    rig.device.fail_launch = RuntimeError("no room on the device")
    rig.turn()
    assert not rig.device.in_flight, "something was launched behind it"
    assert rig.failed(1).reason == "ENGINE_FAILED"
    assert rig.generated(1) == continuation([1, 2], told + 1, GREEDY)
    rig.submit(2, [3, 4], 5)
    rig.settle()
    assert rig.generated(2) == continuation([3, 4], 5, GREEDY)
    rig.check_nothing_held()


@pytest.mark.parametrize("at_launch", [False, True])
def test_a_device_of_no_more_use_ends_the_engine_instead_of_every_request_to_come(at_launch: bool) -> None:
    rig = in_flight()
    if at_launch:
        rig.device.fail_launch = DeviceLostError("illegal address")
    else:
        rig.model.fail_next = DeviceLostError("illegal address")
    with pytest.raises(DeviceLostError):
        rig.settle()


# -- the end of a pool with steps in flight: the rig asserts that none runs when its memory goes


def in_flight(**options: object) -> Rig:
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.submit(1, [1, 2], 100)
    rig.turn(6)
    assert len(rig.device.in_flight) == 1
    return rig


@pytest.mark.parametrize("fails", [False, True])
def test_a_lost_pool_is_given_up_when_the_steps_in_flight_are_over_and_their_tokens_are_dropped(fails: bool) -> None:
    rig = in_flight()
    told, old = rig.generated(1), rig.session
    rig.model.fail_next = RuntimeError("memory is gone") if fails else None
    rig.pool = make_pool(32, epoch=8)
    old.lose()
    rig.turn()
    assert rig.closed == [old]
    assert rig.failed(1).reason == "POOL_LOST"
    assert rig.generated(1) == told
    rig.settle()
    rig.submit(2, [3, 4], 5)
    rig.settle()
    assert rig.generated(2) == continuation([3, 4], 5, GREEDY)
    rig.check_nothing_held()


def test_a_memd_that_drains_gets_its_pool_back_when_the_steps_in_flight_are_over() -> None:
    rig = in_flight()
    session = rig.session
    session.say(Draining(0.0))
    rig.turn()
    assert rig.failed(1).reason == "POOL_LOST"
    assert rig.closed == [session]


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_shutdown_waits_for_the_steps_in_flight(grace_s: float) -> None:
    rig = in_flight()
    rig.submit(2, [1, 2, 3], 20, stop_token_ids=[stopping_after([1, 2, 3], 4)])
    rig.turn(4)
    rig.mailbox.post(Shutdown(grace_s))
    rig.settle()
    assert rig.closed == [rig.session]
    if grace_s:
        assert rig.generated(1) == continuation([1, 2], 100, GREEDY)
        assert rig.finished(2).ending is Ending.STOP_TOKEN
    else:
        assert rig.failed(1).reason == rig.failed(2).reason == "DRAINING"
    rig.check_nothing_held()


# -- counters


def test_steps_that_overlap_are_timed_one_after_the_other() -> None:
    rig = Rig()
    rig.submit(1, [1, 2], 50)
    rig.settle()
    began = rig.now
    rig.submit(2, [3, 4], 50)
    rig.settle()
    rig.mailbox.post(Shutdown(0.0))
    rig.settle()
    counters = rig.sent[-1].counters
    assert counters.steps == 100
    assert counters.generated_tokens == 100 == sum(len(m.items) for m in rig.sent if isinstance(m, Tokens))
    assert counters.prefill_tokens == 4
    assert 0 < counters.step_s <= rig.now
    assert counters.step_s > began
