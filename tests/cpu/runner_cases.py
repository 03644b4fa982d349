"""What a CudaRunner must do under the engine, wherever it runs: tests/gpu asks it of a GPU, tests/cpu of the host.

A tiny random model in float32: what is generated is compared token by token with the model run by transformers over the
whole sequence, each time anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from inferd.core.beam import BeamSearch, Hypotheses
from inferd.core.beam_values import Beam
from inferd.core.history import Extras
from inferd.core.limits import Limits
from inferd.core.messages import Adjustments, Sampling, Submit, TokenLogprobs
from inferd.core.ngram import NgramIndex
from inferd.core.ports import BlockCopy, StepInput
from inferd.core.speculation import MakeProposer
from inferd.logprobs import Scores
from inferd.model.cuda_runner import CudaRunner, RunnerLimits
from inferd.model.load import ServedModel
from inferd.sampler import Row, sample
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from pagekernels.layout import LAYOUT_VERSION, pack_entry, slot_mapping
from tests.cpu.engine_rig import Rig
from tests.cpu.guesses import Guesser, mostly_right
from tests.cpu.model_configs import VOCAB_SIZE
from tests.cpu.model_rig import random_prompts
from tests.cpu.settings_mix import BIAS, GREEDY, MIX, PENALTIES
from tests.cpu.test_engine_preemption import Request, load, serve

BLOCK, MAX_CONTEXT = 16, 256


@dataclass
class Place:
    """Where the cases run: how to open a runner over a pool of so many blocks, and the model on its own."""

    served: ServedModel
    model: PreTrainedModel
    open: Callable[[ServedModel, int, int, RunnerLimits], AbstractContextManager[CudaRunner]]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, vocab], on the host."""
        return self.model(torch.tensor([list(tokens)], device=self.model.device)).logits[0].float().cpu()

    def continuation(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, how: Adjustments | None = None
    ) -> list[int]:
        """What a correct engine generates, computed alone; counts what penalties depend on anew."""
        tokens = list(prompt)
        for _ in range(count):
            extras = Extras.of(Submit(0, list(prompt), count, adjustments=how))
            for token in tokens[len(prompt) :] if extras and extras.history else ():
                extras.history.add(token)
            tokens += sample(self.logits(tokens)[-1:], [Row(sampling, len(tokens), extras)])
        return tokens[len(prompt) :]


@dataclass
class Flying:
    """A model with steps in flight, and an account of them."""

    model: Any
    launched: list[StepInput] = field(default_factory=list)
    in_flight: deque[FlyingStep] = field(default_factory=deque)

    @property
    def depth(self) -> int:
        depth: int = self.model.depth
        return depth

    def launch(self, step: StepInput, rows: Sequence[Row]) -> FlyingStep:
        assert len(self.in_flight) < self.depth
        self.launched.append(step)
        self.in_flight.append(FlyingStep(self, step, self.model.launch(step, rows)))
        return self.in_flight[-1]

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> Any:
        return self.model.recode(sources, targets)


@dataclass
class FlyingStep:
    owner: Flying
    step: StepInput
    pending: Any

    @property
    def forward_s(self) -> float:
        seconds: float = self.pending.forward_s
        return seconds

    def tokens(self) -> list[int]:
        assert self.owner.in_flight.popleft() is self, "collected out of order"
        tokens: list[int] = self.pending.tokens()
        return tokens

    def scores(self) -> Scores | None:
        scores: Scores | None = self.pending.scores()
        return scores


@contextmanager
def engine(
    place: Place, num_blocks: int, limits: Limits, *, graphs: bool, make_proposer: MakeProposer = NgramIndex
) -> Iterator[Rig]:
    """An engine over memd's core and the runner, in one process."""
    layout = place.served.layout(BLOCK)
    pool = Pool(7, BLOCK, slab_bytes=num_blocks * layout.block_bytes)
    pool.declare(Geometry(layout.layers, layout.format, False, LAYOUT_VERSION, bytes(32), "llama"))
    room = RunnerLimits(limits.max_batch_tokens, limits.max_num_seqs, MAX_CONTEXT, num_blocks, graphs)
    with place.open(place.served, BLOCK, num_blocks, room) as runner:
        rig = Rig(limits=limits, pool=pool, bind=lambda _: Flying(runner), make_proposer=make_proposer)
        yield rig
        rig.check_nothing_held()


def expect_scored(place: Place, found: Sequence[TokenLogprobs], tokens: Sequence[int], first: int, top: int) -> None:
    """The logprobs of tokens[first:], to what kernels may differ by."""
    wanted = place.logits(tokens).double().log_softmax(-1)
    assert [each.token_id for each in found] == list(tokens[first:])
    for at, each in enumerate(found, first):
        assert abs(each.logprob - float(wanted[at - 1, each.token_id])) < 1e-4
        assert len(each.top_token_ids) == len(set(each.top_token_ids)) == top
        np.testing.assert_allclose(each.top_logprobs, wanted[at - 1].topk(top).values.numpy(), atol=1e-4)
        np.testing.assert_allclose(each.top_logprobs, wanted[at - 1, each.top_token_ids].numpy(), atol=1e-4)


LENGTHS = (3, 17, 30, 1, 150, 41, 70, 90)


def expect_any_mix(place: Place, budget: int, *, graphs: bool, most: int = 12) -> None:
    """Settings of every kind in one batch: tokens and logprobs of each request are those that it gets alone."""
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    with engine(place, 128, Limits(max_batch_tokens=budget, max_num_seqs=8), graphs=graphs) as rig:
        for request, ((sampling, asked), tokens) in enumerate(zip(MIX, prompts, strict=True)):
            rig.submit(request, tokens, most, sampling=sampling, **asked)
        rig.settle()
        assert any(step.targets for step in rig.device.launched)
        assert any(token < 0 for step in rig.device.launched for token in step.token_ids), "none was a step ahead"
        for request, ((sampling, asked), tokens) in enumerate(zip(MIX, prompts, strict=True)):
            expected = place.continuation(tokens, most, sampling, asked.get("adjustments"))
            assert rig.generated(request) == expected, (request, asked)
            if "logprobs" in asked:
                expect_scored(place, rig.scored(request), tokens + expected, len(tokens), asked["logprobs"])
            if "prompt_logprobs" in asked:
                expect_scored(place, rig.prompt_scored(request), tokens, 1, asked["prompt_logprobs"])


def expect_drafts(place: Place, *, graphs: bool, most: int = 40) -> None:
    """Guesses right and wrong, beside others, with logprobs: tokens are those of decoding one at a time."""
    guesser = Guesser(mostly_right)
    asked: list[dict[str, Any]] = [{}, {"logprobs": 2}, {}, {"adjustments": BIAS}]
    samplings = [GREEDY, GREEDY, Sampling(seed=8, temperature=1.2), GREEDY]
    prompts = random_prompts((20, 33, 9, 64), VOCAB_SIZE)
    wanted = [
        guesser.learn(tokens, place.continuation(tokens, most, sampling, wish.get("adjustments")))
        for tokens, sampling, wish in zip(prompts, samplings, asked, strict=True)
    ]
    limits = Limits(max_batch_tokens=64, max_num_seqs=24)
    with engine(place, 64, limits, graphs=graphs, make_proposer=guesser) as rig:
        for request, (tokens, sampling, wish) in enumerate(zip(prompts, samplings, asked, strict=True)):
            rig.submit(request, tokens, most, sampling=sampling, speculate_tokens=6 if request != 2 else 0, **wish)
        rig.settle()
        assert [rig.generated(request) for request in range(4)] == wanted
        expect_scored(place, rig.scored(1), prompts[1] + wanted[1], len(prompts[1]), 2)
        used = [rig.finished(request).used for request in range(4)]
        assert 0 < used[0].accepted_tokens < used[0].draft_tokens
        assert any(len(step.logit_rows) > len(step.q_lens) for step in rig.device.launched)


def expect_resumption(place: Place, *, graphs: bool, count: int = 10) -> None:
    """A pool that holds a third of what runs: tables grow, requests yield and resume, and say what they would have."""
    requests = load(count, 60, 160, seed=3)
    requests = [Request(r.number, [3 + token % 190 for token in r.prompt], r.most) for r in requests]
    limits = Limits(max_batch_tokens=64, max_num_seqs=count)
    num_blocks = max(sum(request.blocks for request in requests) // 3, *(request.blocks for request in requests))
    with engine(place, num_blocks, limits, graphs=graphs) as rig:
        serve(rig.pool, [rig], requests)
        for request in requests:
            assert rig.generated(request.number) == place.continuation(request.prompt, request.most)
        preemptions = [rig.finished(request.number).used.preemptions for request in requests]
        print(f"{sum(preemptions)} preemptions of {count} requests over {num_blocks} blocks")
        assert sum(preemptions) > 0


def expect_forks(place: Place, *, graphs: bool) -> None:
    """Two tables share a full block and get their own copies of the next, in the very step that writes to them."""
    fmt = place.served.format
    entries = [pack_entry(fmt, 0, block * fmt.itemsize) for block in (5, 2, 7, 0)]
    (prompt,) = random_prompts((22,), VOCAB_SIZE)
    shared, first, second = entries[:2], [entries[0], entries[2]], [entries[0], entries[3]]
    with place.open(place.served, BLOCK, 8, RunnerLimits(64, 8, MAX_CONTEXT, 8, graphs)) as runner:
        slots = slot_mapping(shared, 0, 22, BLOCK)
        prefill = StepInput(prompt, list(range(22)), slots, [22], [22], [shared], [21])
        before = runner.launch(prefill, [Row(GREEDY, 22)])
        forked = StepInput(
            token_ids=[-1, 50, 60],
            positions=[22, 22, 22],
            slots=[slot_mapping(table, 22, 23, BLOCK)[0] for table in (shared, first, second)],
            q_lens=[1, 1, 1],
            kv_lens=[23, 23, 23],
            tables=[shared, first, second],
            logit_rows=[0, 1, 2],
            copies=[BlockCopy(entries[1], entries[2]), BlockCopy(entries[1], entries[3])],
        )
        after = runner.launch(forked, [Row(GREEDY, 23)] * 3)
        (token,) = before.tokens()
        assert token == int(place.logits(prompt)[-1].argmax())
        wanted = [int(place.logits([*prompt, next_])[-1].argmax()) for next_ in (token, 50, 60)]
        assert after.tokens() == wanted
        assert after.scores() is None


def expect_several(place: Place, *, graphs: bool, most: int = 12) -> None:
    """Samples and beams of one prompt, beside another request: tables fork, share blocks and copy them on write."""
    first, second, third = random_prompts((22, 35, 9), VOCAB_SIZE)
    how = Beam(4, 0.6, num_return_sequences=3)
    with engine(place, 96, Limits(max_batch_tokens=40, max_num_seqs=13), graphs=graphs) as rig:
        rig.submit(10, first, most, n=5, sampling=Sampling(seed=6, sample_index=2), logprobs=1)
        rig.submit(20, second, most, n=3, sampling=Sampling(seed=7), adjustments=PENALTIES)
        rig.submit(30, third, most, beam=how)
        rig.submit(40, third, most)
        rig.settle()
        assert any(step.copies for step in rig.device.launched)
        for index in range(5):
            alone = place.continuation(first, most, Sampling(seed=6, sample_index=2 + index))
            assert rig.generated(10 + index) == alone
            expect_scored(place, rig.scored(10 + index), first + alone, len(first), 1)
        for index in range(3):
            alone = place.continuation(second, most, Sampling(seed=7, sample_index=index), PENALTIES)
            assert rig.generated(20 + index) == alone
        assert rig.generated(40) == place.continuation(third, most)
        (found,) = [message for message in rig.sent if isinstance(message, Hypotheses) and message.request == 30]
        wanted = searched(place, third, most, how)
        assert [each.tokens for each in found.items] == [tokens for tokens, _ in wanted]
        np.testing.assert_allclose([each.score for each in found.items], [score for _, score in wanted], atol=1e-3)


def searched(place: Place, prompt: list[int], most: int, how: Beam) -> list[tuple[list[int], float]]:
    """What a search finds on the model's logits, without any pool: tokens and score, best first."""
    search = BeamSearch(how, most, {})
    beams = [prompt]
    while beams:
        top = [place.logits(beam)[-1].double().log_softmax(-1).topk(search.num_candidates) for beam in beams]
        rows = [(each.indices.tolist(), each.values.tolist()) for each in top]
        beams = [[*beams[each.parent], each.token] for each in search.advance(rows)]
    return [(each.tokens, each.score) for each in search.best()]
