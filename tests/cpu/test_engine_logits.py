"""Requests that ask for something of the logits, beside others, with one step in flight and with two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inferd.core.limits import SCORED_ROWS, Limits
from inferd.core.messages import Adjustments, Cancel, Ending, PromptLogprobs, Sampling, TokenLogprobs, Tokens
from inferd.core.ngram import NgramIndex
from inferd.core.speculation import MakeProposer
from inferd.model.load import prepare
from inferd.model.runner import ModelRunner
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from pagekernels.cpu import configure
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_VERSION
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, logits_after
from tests.cpu.model_configs import VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts
from tests.cpu.settings_mix import BIAS, GREEDY, MIX, PENALTIES
from tests.cpu.test_logprobs import expect_logprobs


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 200 for index in range(length)]


def expect_scored(found: Sequence[TokenLogprobs], tokens: list[int], first: int, top: int) -> None:
    """The logprobs of tokens[first:] under the fake model."""
    assert len(found) == len(tokens) - first
    for at, each in enumerate(found, first):
        expect_logprobs(each, torch.from_numpy(logits_after(tokens[:at])), tokens[at], top)


@pytest.mark.parametrize("budget", [8, 13, 512])
def test_any_mix_of_settings_in_one_batch_gives_each_request_what_it_gets_alone(budget: int) -> None:
    rig = Rig(limits=Limits(max_batch_tokens=budget, max_num_seqs=8))
    for request, (sampling, asked) in enumerate(MIX):
        rig.submit(request, prompt(20 + request), 15, sampling=sampling, **asked)
    rig.settle()
    for request, (sampling, asked) in enumerate(MIX):
        tokens = prompt(20 + request)
        expected = continuation(tokens, 15, sampling, asked.get("adjustments"))
        assert rig.generated(request) == expected, asked
        assert rig.finished(request).ending is Ending.MAX_TOKENS
        if "logprobs" in asked:
            expect_scored(rig.scored(request), tokens + expected, len(tokens), asked["logprobs"])
        if "prompt_logprobs" in asked:
            expect_scored(rig.prompt_scored(request), tokens, 1, asked["prompt_logprobs"])
        assert ("logprobs" in asked, "prompt_logprobs" in asked) == (
            bool(rig.scored(request)),
            bool(rig.prompt_scored(request)),
        )
    rig.check_nothing_held()


def test_penalties_change_what_is_generated() -> None:
    strong = Adjustments(frequency_penalty=2.0, presence_penalty=2.0)
    likes = Adjustments([5], [30.0])
    assert continuation([1, 2], 12, GREEDY, likes) == [5] * 12
    both = Adjustments([5], [6.0], 1.0, 2.0, 2.0)
    assert 1 < continuation([1, 2], 40, GREEDY, both).count(5) < 20
    assert continuation([1, 2], 40, Sampling(seed=1), strong) != continuation([1, 2], 40, Sampling(seed=1))


def test_requests_that_ask_for_nothing_get_the_messages_and_rows_of_always() -> None:
    rig = Rig()
    seen: list[Any] = []
    rig.turn()
    launch = rig.device.launch
    rig.device.launch = lambda step, rows: (seen.extend(rows), seen.extend(step.targets), launch(step, rows))[-1]  # type: ignore[func-returns-value, assignment]
    rig.submit(1, prompt(30), 9)
    rig.submit(2, prompt(30, 3), 9)
    rig.settle()
    kinds = {type(message).__name__ for message in rig.sent}
    assert kinds == {"EngineState", "Tokens", "Finished"}
    assert all(row.extras is None for row in seen)
    assert len(seen) == 18


def test_a_penalised_sequence_is_launched_when_its_last_token_is_known_and_others_do_not_wait(depth: int) -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 12, adjustments=PENALTIES)
    rig.submit(2, [4, 5], 24)
    rig.submit(3, [6, 7], 24, adjustments=BIAS, logprobs=1)
    rig.settle()
    sizes = [len(step.q_lens) for step in rig.device.launched]
    assert sizes == ([3] * 12 + [2] * 12 if depth == 1 else [3, 2] * 12)
    known = {token for step in rig.device.launched[1:] for token in step.token_ids if token >= 0}
    assert depth == 1 or known <= set(rig.generated(1)), "bias and logprobs depend on no token before"
    assert rig.generated(1) == continuation([1, 2, 3], 12, GREEDY, PENALTIES)


def test_a_penalised_request_alone_is_computed_step_by_step() -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], 12, adjustments=PENALTIES)
    rig.settle()
    assert rig.generated(1) == continuation([1, 2, 3], 12, GREEDY, PENALTIES)
    assert len(rig.device.launched) == 12
    rig.check_nothing_held()


# -- logprobs of the prompt


def test_a_prompt_that_is_scored_is_computed_whatever_of_it_the_pool_has() -> None:
    rig = Rig()
    rig.submit(1, prompt(40), 5)
    rig.settle()
    rig.submit(2, prompt(40), 5)
    rig.settle()
    assert rig.finished(2).used.cached_tokens == 39
    rig.submit(3, prompt(40), 5, prompt_logprobs=2)
    rig.settle()
    assert rig.finished(3).used.cached_tokens == 0
    expect_scored(rig.prompt_scored(3), prompt(40), 1, 2)
    assert rig.generated(3) == rig.generated(1)
    rig.submit(4, prompt(40), 5, logprobs=2)
    rig.settle()
    assert rig.finished(4).used.cached_tokens == 39, "logprobs of what is generated need no prompt"


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_short_prompts_are_scored_without_their_first_token(length: int) -> None:
    rig = Rig()
    rig.submit(1, prompt(length), 3, prompt_logprobs=1)
    rig.settle()
    expect_scored(rig.prompt_scored(1), prompt(length), 1, 1)
    assert rig.generated(1) == continuation(prompt(length), 3, GREEDY)


def test_a_step_scores_no_more_rows_than_there_is_room_for() -> None:
    rig = Rig(num_blocks=200, limits=Limits(max_batch_tokens=512, max_num_seqs=8))
    for request in range(3):
        rig.submit(request, prompt(150 + request), 2, prompt_logprobs=0)
    rig.submit(3, prompt(90, 5), 2)
    rig.settle()
    counts = [len(step.targets) for step in rig.device.launched]
    assert max(counts) <= SCORED_ROWS
    assert sum(counts) == 149 + 150 + 151
    assert len(rig.device.launched[0].token_ids) == SCORED_ROWS + 90, "others fill the step"
    for request in range(3):
        expect_scored(rig.prompt_scored(request), prompt(150 + request), 1, 0)


def test_a_prompt_that_is_cancelled_while_it_is_scored_says_no_more() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=2))
    rig.submit(1, prompt(60), 5, prompt_logprobs=1, logprobs=1)
    rig.turn(6)
    rig.mailbox.post(Cancel(1))
    rig.turn()
    said = len(rig.sent)
    rig.settle()
    assert rig.finished(1).ending is Ending.CANCELLED
    assert not [each for each in rig.sent[said:] if isinstance(each, PromptLogprobs | Tokens)]
    expect_scored(rig.prompt_scored(1), prompt(60)[: len(rig.prompt_scored(1)) + 1], 1, 1)
    rig.check_nothing_held()


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"logprobs": 1}, {"adjustments": PENALTIES}])
def test_logits_that_are_not_finite_end_the_request_that_asked_and_no_other(asked: dict[str, Any]) -> None:
    rig = Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=4))
    rig.turn()
    rig.model.poison_request_with = 7
    rig.submit(1, prompt(20, 7), 5, **asked)
    rig.submit(2, prompt(20), 5, prompt_logprobs=1, logprobs=1, adjustments=PENALTIES)
    rig.settle()
    assert "not finite" in rig.failed(1).message
    assert not rig.prompt_scored(1)
    assert rig.generated(2) == continuation(prompt(20), 5, GREEDY, PENALTIES)
    expect_scored(rig.prompt_scored(2), prompt(20), 1, 1)
    rig.check_nothing_held()


def test_a_failed_step_ends_a_scored_request_once() -> None:
    rig = Rig(limits=Limits(max_batch_tokens=8, max_num_seqs=2))
    rig.submit(1, prompt(40), 5, prompt_logprobs=1)
    rig.turn(4)
    rig.model.fail_next = RuntimeError("a kernel's secret")
    rig.settle()
    assert rig.failed(1).reason == "ENGINE_FAILED"
    rig.check_nothing_held()


# -- the real thing


def real_rig(make_proposer: MakeProposer = NgramIndex) -> Rig:
    served = prepare("llama", random_model("llama"))
    configure(1)
    layout = served.layout(8)
    pool = Pool(7, 8, slab_bytes=64 * layout.block_bytes)
    pool.declare(Geometry(layout.layers, layout.format, False, LAYOUT_VERSION, bytes(32), "llama"))

    def bind(_: Pool) -> ModelRunner:
        return ModelRunner(served, CpuOps(np.full(64 * layout.block_bytes, 0xFF, np.uint8), layout))

    return Rig(limits=Limits(max_batch_tokens=17, max_num_seqs=8), pool=pool, bind=bind, make_proposer=make_proposer)


def test_logprobs_of_a_real_model_are_those_of_transformers() -> None:
    model, prompts = random_model("llama"), random_prompts([2, 17, 40], VOCAB_SIZE)
    rig = real_rig()
    for request, tokens in enumerate(prompts):
        rig.submit(request, tokens, 9, prompt_logprobs=3, logprobs=3, adjustments=PENALTIES if request else None)
    rig.settle()
    for request, tokens in enumerate(prompts):
        whole = tokens + rig.generated(request)
        with torch.inference_mode():
            expected = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        found = [*rig.prompt_scored(request), *rig.scored(request)]
        assert [each.token_id for each in found] == whole[1:]
        for at, each in enumerate(found, 1):
            assert each.logprob == pytest.approx(float(expected[at - 1, each.token_id]), abs=1e-4)
            np.testing.assert_allclose(each.top_logprobs, expected[at - 1].topk(3).values.numpy(), atol=1e-4)
            np.testing.assert_allclose(each.top_logprobs, expected[at - 1, each.top_token_ids].numpy(), atol=1e-4)
    rig.check_nothing_held()


def test_a_real_model_with_penalties_generates_what_transformers_does() -> None:
    model, prompts = random_model("llama"), random_prompts([1, 16, 30], VOCAB_SIZE)
    rig = real_rig()
    how = Adjustments([5, 9, 77], [0.5, 0.25, -100.0], repetition_penalty=1.5)
    for request, tokens in enumerate(prompts):
        rig.submit(request, tokens, 12, adjustments=how)
    rig.settle()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    bias = {(token,): value for token, value in zip(how.bias_token_ids, how.biases, strict=True)}
    for request, tokens in enumerate(prompts):
        ids = torch.tensor([tokens])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), repetition_penalty=1.5, sequence_bias=bias, **options
        )
        assert rig.generated(request) == output[0][len(tokens) :].tolist()
    rig.check_nothing_held()
