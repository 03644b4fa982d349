"""Beam search on the real model, paged and in an engine, beside transformers' generate, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from inferd.core.beam import BeamSearch
from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.limits import Limits
from inferd.core.messages import Ending
from inferd.model import source
from inferd.model.load import ServedModel, load_model
from inferd.model.runner import ModelRunner
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import LAYOUT_VERSION
from tests.cpu.engine_rig import Rig
from tests.cpu.test_engine_beam import found, turn_until_over
from tests.cpu.test_model_real import QUESTIONS

BLOCK, BLOCKS, MOST = 8, 128, 12
TIE = 1e-4
CASES = [
    Beam(width, penalty, stopping, width)
    for width, penalty, stopping in product(range(1, 9), (0.6, 1.0, 1.4), (EarlyStopping.HEURISTIC, EarlyStopping.FULL))
]
# Each width once, with each penalty and each way of stopping beside small widths and large ones.
PAIRWISE = [CASES[6 * at + (at * 5) % 6] for at in range(8)]


@dataclass(frozen=True)
class Real:
    model: PreTrainedModel
    served: ServedModel
    prompts: list[list[int]]
    ends: list[int]


@cache
def real() -> Real:
    """The small real model; a full stop and a new line end a text besides its own end, so that beams end at all."""
    folder = source.resolve("smollm2", source.DEFAULT_CACHE, print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = [model.generation_config.eos_token_id, *tokenizer.encode("."), *tokenizer.encode("\n")]
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    return Real(model, load_model(folder, dtype="float32", tell=print), prompts, ends)


@cache
def slab() -> npt.NDArray[np.uint8]:
    """One for all searches, since each rig is garbage that only a full collection finds, and a slab has 47 MB."""
    return np.empty(BLOCKS * real().served.layout(BLOCK).block_bytes, np.uint8)


def real_rig() -> Rig:
    served = real().served
    layout = served.layout(BLOCK)
    slab().fill(0xFF)
    pool = Pool(7, BLOCK, slab_bytes=BLOCKS * layout.block_bytes)
    pool.declare(Geometry(layout.layers, layout.format, False, LAYOUT_VERSION, bytes(32), "real"))

    def bind(_: Pool) -> ModelRunner:
        return ModelRunner(served, CpuOps(slab(), layout))

    return Rig(limits=Limits(max_batch_tokens=64, max_num_seqs=8), pool=pool, bind=bind)


def theirs(prompt: list[int], how: Beam) -> list[tuple[list[int], float | None]]:
    """Sequences up to their end token, and scores."""
    with torch.inference_mode():
        output: Any = real().model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MOST,
            num_beams=how.width,
            length_penalty=how.length_penalty,
            early_stopping=how.early_stopping is EarlyStopping.FULL,
            num_return_sequences=how.num_return_sequences,
            eos_token_id=real().ends,
            pad_token_id=real().ends[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    scores = output.sequences_scores.tolist() if how.width > 1 else [None]
    texts = [each[len(prompt) :] for each in output.sequences.tolist()]
    cut = [next((at for at, token in enumerate(text) if token in real().ends), len(text) - 1) for text in texts]
    return [(text[: end + 1], score) for text, end, score in zip(texts, cut, scores, strict=True)]


def closest(prompt: list[int], how: Beam) -> float:
    """How close candidates competed, in float64: for the last place among a step's beams, or among the finished."""
    ends = real().ends
    search = BeamSearch(how, MOST, dict.fromkeys(ends, Ending.END_OF_SEQUENCE))
    model = real().model.double()
    beams, scores, gaps = [prompt], [0.0], [float("inf")]
    while beams:
        with torch.inference_mode():
            logprobs = model(torch.tensor(beams)).logits[:, -1].log_softmax(-1)
        top = logprobs.topk(search.num_candidates + 1)
        rows = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        every = sorted(
            ((scores[at] + score, token) for at, row in enumerate(rows) for token, score in zip(*row, strict=True)),
            reverse=True,
        )
        running = [score for score, token in every if token not in ends]
        gaps += [every[how.width - 1][0] - every[how.width][0], running[how.width - 1] - running[how.width]]
        chosen = search.advance(rows)
        totals = [scores[each.parent] + logprobs[each.parent, each.token].item() for each in chosen]
        beams, scores = [[*beams[each.parent], each.token] for each in chosen], totals
    real().model.float()
    return min(*gaps, *(first.score - second.score for first, second in pairwise(search.best())))


def compare(cases: list[tuple[list[int], Beam]]) -> tuple[int, int]:
    """Both on each case, with the search's blocks held against their bound; cases compared, and ties among them."""
    ties = 0
    for prompt, how in cases:
        rig = real_rig()
        rig.submit(1, prompt, MOST, beam=how, stop_token_ids=real().ends)
        turn_until_over(rig, 1, how.width, len(prompt))
        rig.settle()
        have = [
            ([*each.tokens, *([each.stop_token_id] * (each.stop_token_id is not None))], each.score)
            for each in found(rig, 1)
        ]
        rig.check_nothing_held()
        expected = theirs(prompt, how)
        same = [tokens for tokens, _ in have] == [tokens for tokens, _ in expected]
        if not same and closest(prompt, how) < TIE:
            ties += 1
            continue
        assert same, how
        for (_, score), (_, wanted) in zip(have, expected, strict=True):
            assert wanted is None or score == pytest.approx(wanted, abs=1e-3)
    print(f"{len(cases)} beam searches compared with transformers, {ties} of them ties within {TIE:g} in float64")
    return len(cases), ties


def test_beam_search_of_a_real_model_is_that_of_transformers() -> None:
    compared, ties = compare([(real().prompts[at * 3], how) for at, how in enumerate(PAIRWISE[::2])])
    assert ties <= compared // 4


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("width", range(1, 9))
def test_beam_search_of_a_real_model_is_that_of_transformers_for_twenty_prompts(width: int) -> None:
    compared, ties = compare([(prompt, how) for prompt in real().prompts for how in CASES if how.width == width])
    assert ties <= compared // 20
