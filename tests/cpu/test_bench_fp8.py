"""make bench-fp8 computes what it says: the model's log-probabilities, FP8 blocks where they should be, its bounds."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inferd.model.load import ServedModel, prepare
from pagekernels.cpu import configure
from pagekernels.layout import Format
from tests.cpu.model_configs import VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts, reference

# The benchmarks are programs beside one another; at the end, so that none of them hides a module of that name.
sys.path.append(str(Path(__file__).parents[2] / "clients" / "bench"))

import fp8_accuracy
from fp8_accuracy import TEXT, Bench, Change, change, parse, run
from fp8_context import Context, Policy, Scored, greedy, score
from fp8_needle import NEEDLE, NUMBER, QUESTION, answer, prompts
from fp8_outliers import Drawn, planting

(IDS,) = random_prompts((200,), VOCAB_SIZE)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    configure(1)
    return random_model("llama")


@pytest.fixture(scope="module")
def served(model: PreTrainedModel) -> ServedModel:
    """Float32 arithmetic over bfloat16 blocks."""
    return replace(prepare("tiny", copy.deepcopy(model)), format=Format.BF16)


def scored(served: ServedModel, policy: Policy, chunk: int = 48, **more: Any) -> tuple[Context, Scored]:
    context = Context(served, policy, len(IDS), **more)
    return context, score(context, IDS, chunk)


def test_a_policy_leaves_the_first_and_the_newest_blocks() -> None:
    assert Policy(1).chosen(6) == [1, 2, 3, 4, 5]
    assert Policy(1, keep_first=0).chosen(3) == [0, 1, 2]
    assert Policy(2, keep_recent=2).chosen(10) == [1, 3, 5, 7]
    assert Policy(2, keep_first=2).chosen(10) == [3, 5, 7, 9]
    assert Policy(1, keep_recent=8).chosen(6) == Policy(0).chosen(9) == []


@torch.inference_mode()
def test_log_probabilities_are_those_that_transformers_has(model: PreTrainedModel, served: ServedModel) -> None:
    logits = copy.deepcopy(model)(torch.tensor([IDS]), use_cache=False).logits[0].double()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()
    for chunk in (48, 199, 7):
        found = scored(replace(served, format=Format.F32), Policy(0), chunk)[1]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        assert np.array_equal(found.top, logits[:-1].argmax(-1).numpy())


def test_nothing_compressed_changes_nothing_at_all(served: ServedModel) -> None:
    context, base = scored(served, Policy(0))
    assert context.blocks.num_fp8 == 0
    for policy in (Policy(0), Policy(1, keep_recent=99), Policy(1, guard=0.0)):
        context, found = scored(served, policy)
        assert context.blocks.num_fp8 == 0
        assert change(base, found) == Change(0.0, 0.0, 0.0, 100.0)
    assert context.blocks.kept == list(range(1, 12)), "tried, and kept by a guard that lets nothing pass"


def test_all_blocks_compressed_change_something_but_little(served: ServedModel) -> None:
    _, base = scored(served, Policy(0))
    counts, changes = [], []
    for policy in (Policy(2), Policy(1), Policy(1, keep_first=0)):
        context, found = scored(served, policy)
        counts.append(context.blocks.num_fp8)
        changes.append(change(base, found))
    assert counts == [6, 11, 12], "of 12 sealed blocks and one that is not"
    assert all(0 < each.absolute < 5 and each.agreement > 80 for each in changes)
    assert changes[0].absolute < changes[2].absolute


def test_a_step_sees_fp8_blocks_only_of_steps_before_it(served: ServedModel) -> None:
    _, base = scored(served, Policy(0))
    _, found = scored(served, Policy(1), chunk=48)
    assert np.array_equal(base.logprobs[:48], found.logprobs[:48])
    assert (base.logprobs[48:96] != found.logprobs[48:96]).all()
    _, at_once = scored(served, Policy(1), chunk=len(IDS))
    assert change(scored(served, Policy(0), chunk=len(IDS))[1], at_once).absolute == 0


def test_greedy_continues_as_transformers_does(model: PreTrainedModel, served: ServedModel) -> None:
    (expected,) = reference(copy.deepcopy(model), [IDS[:40]], 12)
    context = Context(replace(served, format=Format.F32), Policy(0), 52)
    assert greedy(context, IDS[:40], 12, chunk=16) == expected
    assert context.num_tokens == 51


def test_changes_are_percent_of_the_mean_log_probability() -> None:
    base = Scored(np.array([-1.0, -3.0, -2.0, -2.0]), np.array([5, 6, 7, 8]))
    found = change(base, Scored(base.logprobs + np.array([0.1, -0.3, 0.0, 0.0]), np.array([5, 6, 7, 9])))
    assert found.signed == pytest.approx(-2.5)
    assert found.absolute == pytest.approx(5.0)
    assert found.agreement == 75.0
    assert found.noise == pytest.approx(np.std([5.0, -15.0, 0.0, 0.0]) / 2)


def test_the_guard_sees_outliers_that_the_plain_norm_does_not() -> None:
    configure(1)
    gaussian, sick = Drawn(0).damage(0.12), Drawn(120).damage(0.12)
    assert gaussian.plain == pytest.approx(0.026, abs=0.001)
    assert sick.plain < gaussian.plain
    assert gaussian.guard.max() < 0.04
    assert sick.guard.min() > 0.3
    assert (gaussian.kept, sick.kept) == (0, len(sick.guard))
    assert gaussian.guarded == gaussian.unguarded
    assert sick.unguarded > 7 * gaussian.unguarded
    assert sick.guarded == sick.native < gaussian.unguarded


def test_planted_outliers_leave_exact_attention_as_it_is(served: ServedModel) -> None:
    exact = replace(served, format=Format.F32)
    sick = {"make_ops": planting([0, 1], 60.0)}
    same = change(scored(exact, Policy(0))[1], scored(exact, Policy(0), **sick)[1])
    assert 0 < same.absolute < 0.01
    base = scored(served, Policy(0))[1]
    hurt = change(base, scored(served, Policy(1), **sick)[1]).absolute
    assert hurt > 3 * change(base, scored(served, Policy(1))[1]).absolute
    context, guarded = scored(served, Policy(1, guard=0.12), **sick)
    assert context.blocks.kept == list(range(1, 12))
    assert np.array_equal(guarded.logprobs, scored(served, Policy(0), **sick)[1].logprobs)


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(max(token - 3, 9)) for token in token_ids)


def bench(served: ServedModel, *flags: str) -> Bench:
    flags = ("--tokens", "220", "--chunk", "64", "--keep-recent", "0", *flags)
    tokenizer: Any = Letters()
    return Bench(replace(served, vocab_size=VOCAB_SIZE), tokenizer, parse(flags))


def test_bounds_decide_the_exit_code(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8_accuracy, "BOUNDS", {"half": (50.0, 50.0, 1.0), "all": (50.0, 50.0, 1.0)})
    assert run(bench(served), "text") == 0
    lines = capsys.readouterr().out
    assert lines.count("; met)") == 6
    assert "missed: none" in lines
    assert "of 13 blocks over a bound of 0.03: " in lines
    monkeypatch.setitem(fp8_accuracy.BOUNDS, "all", (50.0, 1e-9, 100.1))
    assert run(bench(served), "text") == 1
    assert "missed: all: absolute change, all: top-1" in capsys.readouterr().out


def test_a_text_that_is_too_short_is_refused(served: ServedModel) -> None:
    with pytest.raises(SystemExit, match="--tokens 99999: the text has"):
        bench(served, "--tokens", "99999").text()


def test_an_answer_that_does_not_hold_the_number_is_a_miss(served: ServedModel) -> None:
    random = bench(served, "--needle-tokens", "150")
    random.needle()
    assert random.bounds.missed == ["needle at 10% of 150", "needle at 50% of 150", "needle at 90% of 150"]


def test_a_needle_lies_as_deep_as_is_said(served: ServedModel) -> None:
    letters: Any = Letters()
    text = "\n\n".join(f"Paragraph {number:3}." for number in range(100))
    for prompt in prompts(letters, text, 800):
        words = letters.decode(prompt.token_ids, skip_special_tokens=True)
        hay = words.replace(NEEDLE, "").replace(QUESTION, "")
        assert NUMBER in words
        assert words.index(QUESTION) > words.index(NEEDLE)
        assert 750 <= len(hay) <= 810
        assert words.index(NEEDLE) / len(hay) == pytest.approx(prompt.depth, abs=0.05)
    said = answer(letters, lambda policy, length: Context(served, policy, length), Policy(1), prompt, 100)
    assert len(said) <= 8


def test_the_text_is_ascii_and_long_enough_for_the_default() -> None:
    words = TEXT.read_text(encoding="ascii").split()
    assert len(words) > parse([]).tokens, "a word is a token at least"


@pytest.mark.parametrize(("fp8", "missed"), [(NUMBER, 0), ("48313", 3)])
def test_the_answers_over_fp8_blocks_have_to_be_that_over_16_bit_blocks(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, fp8: str, missed: int
) -> None:
    def answers(_tokenizer: Any, _make: Any, policy: Policy, *_rest: Any) -> str:
        return fp8 if policy.every == 1 else NUMBER

    monkeypatch.setattr(fp8_accuracy, "answer", answers)
    found = bench(served, "--needle-tokens", "900")
    assert run(found, "needle") == (1 if missed else 0)
    assert len(found.bounds.missed) == missed


def test_planted_outliers_harm_without_the_guard_only(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8_accuracy, "PLANTED_TOKENS", 200)
    monkeypatch.setattr(fp8_accuracy, "SIZES", (0, 120))
    assert run(bench(served, "--outliers", "60"), "outliers") == 0
    lines = capsys.readouterr().out
    assert "outliers of 60.0 in the keys of 1 layers, 200 tokens" in lines
    assert "absolute: guard / 16-bit 1.00 (bound: at most 1.0; met)" in lines
