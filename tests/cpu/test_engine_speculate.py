"""Speculative decoding: whatever is guessed, each request gets exactly what it gets alone and without guesses."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Adjustments, Ending, Sampling
from inferd.core.ports import StepInput
from tests.cpu.engine_rig import EOS, Rig
from tests.cpu.guesses import GREEDY, SAMPLED, SAMPLINGS, Alter, Guesser, learned, mostly_right, right, used, wrong
from tests.cpu.memory_pool import continuation
from tests.cpu.model_configs import VOCAB_SIZE
from tests.cpu.model_rig import random_prompts
from tests.cpu.test_engine_logits import expect_scored, prompt, real_rig


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Rig, "depth", request.param)
    return int(request.param)


def drafts(step: StepInput) -> int:
    """Draft tokens of a step without prefill."""
    return len(step.token_ids) - len(step.q_lens)


# -- the same tokens


@pytest.mark.parametrize("alter", [right, wrong, mostly_right])
@pytest.mark.parametrize("budget", [8, 512])
def test_tokens_are_the_same_whatever_is_guessed(alter: Alter, budget: int) -> None:
    guesser = Guesser(alter)
    cases = [(prompt(13 + 9 * index, index), sampling) for index, sampling in enumerate(SAMPLINGS)]
    expected = learned(guesser, 40, cases)
    rig = Rig(limits=Limits(budget, max_num_seqs=8, speculate_tokens=7), make_proposer=guesser)
    for request, (tokens, sampling) in enumerate(cases):
        rig.submit(request, tokens, 40, sampling=sampling)
    rig.settle()
    for request, generated in enumerate(expected):
        assert rig.generated(request) == generated
        assert rig.finished(request).ending is Ending.MAX_TOKENS
        share = used(rig, request)
        assert share.draft_tokens > 0
        least, most = {right: (1, 1), wrong: (0, 0), mostly_right: (0.1, 0.9)}[alter]
        assert least <= share.accepted_tokens / share.draft_tokens <= most
    assert max(len(step.logit_rows) for step in rig.device.launched) <= 8
    assert max(len(step.token_ids) for step in rig.device.launched) <= budget
    rig.check_nothing_held()


def test_right_guesses_save_steps_and_wrong_ones_cost_none() -> None:
    steps: dict[str, int] = {}
    for name, alter, tokens in (("off", right, 0), ("right", right, 8), ("wrong", wrong, 8)):
        guesser = Guesser(alter)
        learned(guesser, 60, [(prompt(9), GREEDY)])
        rig = Rig(make_proposer=guesser)
        rig.submit(1, prompt(9), 60, speculate_tokens=tokens)
        rig.settle()
        steps[name] = len(rig.device.launched)
    assert steps["off"] == steps["wrong"] == 60
    # A token, then 3, 5, five times 9, and the 6 that are left; drafts are shorter until memd has granted their blocks.
    assert 9 <= steps["right"] <= 11


def test_text_that_repeats_itself_is_guessed_by_prompt_lookup() -> None:
    how = Adjustments(bias_token_ids=[5], biases=[99.0])  # always the same token
    rig = Rig()
    rig.submit(1, prompt(9), 80, adjustments=how, speculate_tokens=16)
    rig.submit(2, prompt(9), 80, adjustments=how)
    rig.settle()
    assert rig.generated(1) == rig.generated(2) == [5] * 80
    assert used(rig, 1).accepted_tokens > 60
    assert (used(rig, 2).draft_tokens, used(rig, 2).accepted_tokens) == (0, 0)


@pytest.mark.parametrize(("default", "asked", "guesses"), [(0, None, 0), (0, 3, 3), (5, None, 5), (5, 0, 0), (5, 2, 2)])
def test_a_request_guesses_what_it_asks_for_or_what_the_worker_does(
    default: int, asked: int | None, guesses: int
) -> None:
    guesser = Guesser(right)
    learned(guesser, 60, [(prompt(9), GREEDY)])
    rig = Rig(limits=Limits(speculate_tokens=default), make_proposer=guesser)
    rig.submit(1, prompt(9), 60, speculate_tokens=asked)
    rig.settle()
    assert max(map(drafts, rig.device.launched[1:])) == guesses


# -- ends


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_within_a_run_is_kept_to_the_token(most: int) -> None:
    guesser = Guesser(right)
    (expected,) = learned(guesser, 40, [(prompt(11), SAMPLED)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, prompt(11), most, sampling=SAMPLED, speculate_tokens=8)
    rig.settle()
    assert rig.generated(1) == expected[:most]
    assert (rig.finished(1).ending, used(rig, 1).generated_tokens) == (Ending.MAX_TOKENS, most)
    assert max(max(step.positions) for step in rig.device.launched) <= 11 + most - 2, "the last token is never computed"
    rig.check_nothing_held()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 7, 8, 13])
def test_a_stop_token_within_a_run_ends_it_there(at: int) -> None:
    guesser, tokens = Guesser(right), prompt(10)
    (expected,) = learned(guesser, 40, [(tokens, GREEDY)])
    rig = Rig(make_proposer=guesser)
    rig.submit(1, tokens, 40, speculate_tokens=8, stop_token_ids=[expected[at]])
    rig.settle()
    assert rig.generated(1) == expected[: expected.index(expected[at])]
    assert (rig.finished(1).ending, rig.finished(1).stop_token_id) == (Ending.STOP_TOKEN, expected[at])
    rig.check_nothing_held()


def test_an_end_of_sequence_within_a_run_ends_it_there() -> None:
    guesser, likes_to_end = Guesser(right), Adjustments([EOS], [6.0])
    rig = Rig(make_proposer=guesser)
    ends = set()
    for request in range(12):
        tokens = prompt(10, request)
        expected = guesser.learn(tokens, continuation(tokens, 40, GREEDY, likes_to_end))
        rig.submit(request, tokens, 40, speculate_tokens=8, adjustments=likes_to_end, ignore_eos=False)
        rig.settle()
        assert rig.generated(request) == expected[: expected.index(EOS)]
        assert (rig.finished(request).ending, rig.finished(request).stop_token_id) == (Ending.END_OF_SEQUENCE, EOS)
        ends.add(expected.index(EOS))
    assert len(ends) > 4, "at different places in a draft"
    rig.check_nothing_held()


# -- penalties, logprobs and failures


def test_logprobs_are_those_of_the_tokens_that_were_accepted() -> None:
    guesser = Guesser(mostly_right)
    cases = [(prompt(9, request), sampling) for request, sampling in enumerate(SAMPLINGS)]
    expected = learned(guesser, 25, cases)
    rig = Rig(make_proposer=guesser)
    for request, (tokens, sampling) in enumerate(cases):
        rig.submit(request, tokens, 25, sampling=sampling, speculate_tokens=6, logprobs=request, prompt_logprobs=1)
    rig.submit(9, prompt(7), 25)
    guesser.learn(prompt(7), [])
    rig.settle()
    for request, (tokens, _) in enumerate(cases):
        assert rig.generated(request) == expected[request]
        assert used(rig, request).accepted_tokens > 0
        expect_scored(rig.scored(request), tokens + expected[request], len(tokens), request)
        expect_scored(rig.prompt_scored(request), tokens, 1, 1)


def test_penalties_depend_on_each_token_so_such_a_request_guesses_nothing() -> None:
    how = Adjustments(repetition_penalty=1.3, frequency_penalty=0.5)
    guesser = Guesser(right)
    guesser.learn(prompt(9), continuation(prompt(9), 20, GREEDY, how))
    rig = Rig(make_proposer=guesser)
    rig.submit(1, prompt(9), 20, adjustments=how, speculate_tokens=8)
    rig.settle()
    assert rig.generated(1) == continuation(prompt(9), 20, GREEDY, how)
    assert used(rig, 1).draft_tokens == 0


# -- the real thing


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_real_model_says_the_same_with_right_with_wrong_and_without_guesses(sampling: Sampling) -> None:
    prompts = random_prompts([3, 16, 41], VOCAB_SIZE)
    plain = real_rig()
    for request, tokens in enumerate(prompts):
        plain.submit(request, tokens, 30, sampling=sampling)
    plain.settle()
    for alter in (right, wrong, mostly_right):
        guesser = Guesser(alter)
        rig = real_rig(guesser)
        for request, tokens in enumerate(prompts):
            guesser.learn(tokens, plain.generated(request))
            rig.submit(request, tokens, 30, sampling=sampling, speculate_tokens=4)
        rig.settle()
        for request in range(len(prompts)):
            assert rig.generated(request) == plain.generated(request)
            assert used(rig, request).draft_tokens > 0
            assert (used(rig, request).accepted_tokens > 0) == (alter is not wrong)
        rig.check_nothing_held()
