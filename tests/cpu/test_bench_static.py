"""The baseline of make bench-static: workloads, accounts, scheduling, and that its cache computes the same model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from inferd.core.messages import Sampling
from inferd.model.load import prepare
from inferd.sampler import Row, sample

# The benchmarks are programs beside one another; at the end, so that none of them hides a module of that name.
sys.path.append(str(Path(__file__).parents[2] / "clients" / "bench"))

from contiguous import ContiguousCache, Runner
from slots import Slots
from workloads import TEMPERATURE, Account, Look, Request, Workload, account, distinct


def request(prompt: int, new_tokens: int, seed: int = 0) -> Request:
    return Request(list(range(3, 3 + prompt)), new_tokens, seed)


def test_a_workload_is_a_function_of_its_seed() -> None:
    workload = Workload("any", 40, (4, 200), (2, 50))
    made = workload.requests(1, 5000)
    assert made == workload.requests(1, 5000)
    assert made != workload.requests(2, 5000)
    assert [each.seed for each in made] == list(range(40))
    assert workload.longest == 250


def test_lengths_are_log_uniform_within_their_limits() -> None:
    made = Workload("any", 4000, (10, 1000), (7, 7)).requests(3, 2000)
    lengths = sorted(len(each.prompt) for each in made)
    assert (lengths[0], lengths[-1]) == (10, 999)
    assert 95 <= lengths[2000] <= 105, "half of them are below the geometric mean, 100"
    assert {each.new_tokens for each in made} == {7}
    assert {each.new_tokens for each in Workload("any", 60, (1, 1), (4, 6)).requests(0, 2000)} == {4, 5, 6}
    assert all(1000 <= token < 2000 for each in made for token in each.prompt)


def test_prompts_have_no_block_in_common() -> None:
    made = [each for seed in (0, 1) for each in Workload("any", 200, (16, 32), (1, 1)).requests(seed, 49152)]
    assert len({tuple(each.prompt[:8]) for each in made}) == 400


def test_a_vocabulary_may_be_small() -> None:
    made = Workload("any", 20, (8, 8), (1, 1)).requests(0, 300)
    assert {token for each in made for token in each.prompt} == {299}


def test_an_account_weighs_by_time_and_counts_the_queue() -> None:
    looks = [
        Look(10.0, held=2, stored=10, reserved=100, finished=0),  # a second at 0.1; of 5 requests 3 wait
        Look(11.0, held=3, stored=60, reserved=200, finished=1),  # three seconds at 0.3; one waits
        Look(14.0, held=1, stored=80, reserved=100, finished=4),  # six seconds at 0.8; none waits
        Look(20.0, held=0, stored=0, reserved=0, finished=5),
    ]
    seen = account(looks, 5)
    assert seen.at_once == pytest.approx((1 * 2 + 3 * 3) / 4)
    assert seen.most == 3
    assert seen.utilisation == pytest.approx((1 * 0.1 + 3 * 0.3 + 6 * 0.8) / 10)


def test_time_with_nothing_held_counts_for_nothing() -> None:
    looks = [Look(0.0, 0, 0, 0, 0), Look(5.0, 1, 50, 100, 0), Look(6.0, 0, 0, 0, 1), Look(9.0, 0, 0, 0, 1)]
    assert account(looks, 1) == Account(at_once=1.0, most=1, utilisation=0.5)
    with pytest.raises(ValueError, match="no look saw"):
        account(looks[:1], 1)


def test_a_shared_block_counts_once_with_the_most_tokens_in_it() -> None:
    # Blocks 7 and 8 are full in both tables, 9 has two tokens in the one and three in the other; 5 is reserved ahead.
    assert distinct([([7, 8, 9], 10), ([7, 8, 9, 5], 11)], 4) == (11, 16)
    assert distinct([([7, 8], 5), ([1, 2], 8)], 4) == (13, 16)
    assert distinct([], 4) == (0, 0)


def plan(slots: Slots) -> list[tuple[int, int, int]]:
    """A step whose every token is 1: (seed, slot, count) of its chunks."""
    chunks = slots.plan()
    said = [(held.request.seed, held.slot, count) for held, count in chunks]
    slots.collect(chunks, [1] * len(chunks))
    return said


def test_slots_admit_in_order_and_steps_decode_first() -> None:
    slots = Slots([request(5, 2, 0), request(4, 3, 1), request(2, 1, 2)], num_slots=2, length=8, budget=6)
    assert plan(slots) == [(0, 0, 5), (1, 1, 1)]
    assert slots.look(1.0) == Look(1.0, held=2, stored=6, reserved=16, finished=0)
    assert plan(slots) == [(0, 0, 1), (1, 1, 3)]
    # Request 0 is over, and its slot is request 2's at once; request 1 decodes, which comes first.
    assert slots.look(2.0) == Look(2.0, held=1, stored=4, reserved=8, finished=1)
    assert plan(slots) == [(1, 1, 1), (2, 0, 2)]
    assert plan(slots) == [(1, 1, 1)]
    assert plan(slots) == []
    assert slots.look(3.0) == Look(3.0, held=0, stored=0, reserved=0, finished=3)
    assert [held.generated for held in slots.finished] == [[1, 1], [1], [1, 1, 1]]


def test_what_can_never_be_scheduled_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="a request of 9 tokens does not fit into a slot of 8"):
        Slots([request(5, 4)], num_slots=2, length=8, budget=6)
    with pytest.raises(ValueError, match="3 tokens a step are fewer than 4 slots"):
        Slots([request(5, 3)], num_slots=4, length=8, budget=3)


def llama() -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()


@torch.inference_mode()
def recomputed(model: PreTrainedModel, asked: Request) -> list[int]:
    """The tokens that follow when transformers computes the whole sequence again for each."""
    tokens = list(asked.prompt)
    for _ in range(asked.new_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:].float()
        row = Row(Sampling(temperature=TEMPERATURE, seed=asked.seed), len(tokens))
        tokens += sample(logits, [row])
    return tokens[len(asked.prompt) :]


def served_tokens(model: PreTrainedModel, asked: Sequence[Request]) -> list[list[int]]:
    # Prompts longer than a step, and more requests than slots, so that slots are used again.
    runner = Runner(prepare("tiny", model), num_slots=2, length=48, budget=9)
    assert runner.cache.nbytes == 2 * 2 * 2 * 2 * 48 * 8 * 4, "layers, K and V, slots, heads, tokens, dim, bytes"
    tokens: list[list[int]] = runner.run(asked)["tokens"]
    return tokens


def test_the_contiguous_cache_computes_the_same_model() -> None:
    model = llama()
    asked = [request(20, 9, 0), request(7, 12, 1), request(31, 6, 2), request(1, 5, 3)]
    expected = [recomputed(copy.deepcopy(model), each) for each in asked]
    assert served_tokens(model, asked) == expected


def test_a_model_with_a_window_is_refused_by_the_baseline() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "sliding_window": 8}
    model = MistralForCausalLM(MistralConfig(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **sizes))
    with pytest.raises(SystemExit, match="layer 0 of windowed has a window"):
        ContiguousCache(prepare("windowed", model), num_slots=1, length=16)
