"""Runs a served model over a plain slab with block tables kept by hand: no memd, no engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from inferd.core.ports import StepInput
from inferd.model.load import ServedModel
from inferd.model.runner import ModelRunner
from pagekernels.cpu import configure
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import pack_entry, slot_mapping

# Tiny matrices on several threads only wait for one another; numba's import has set torch's number too.
torch.set_num_threads(1)

BUDGET = 17
"""Tokens of one step: odd, and less than a prompt, so that prefill comes in chunks beside decoding neighbours."""


@dataclass
class Stream:
    """One sequence: its prompt, what it has said, and its block table."""

    tokens: list[int]
    table: list[int]
    prompt: int
    computed: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class Rig:
    """Greedy decoding of several prompts at once over a pool that is full of NaN, its blocks shuffled."""

    served: ServedModel
    block_size: int
    seed: int = 0
    batches: list[int] = field(default_factory=list)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """The tokens that follow each prompt."""
        configure(1)
        layout = self.served.layout(self.block_size)
        counts = [-(-(len(prompt) + new_tokens) // self.block_size) for prompt in prompts]
        slab = np.full(layout.block_bytes * sum(counts), 0xFF, np.uint8)
        runner = ModelRunner(self.served, CpuOps(slab, layout))
        blocks = [pack_entry(layout.format, 0, b * layout.units_per_block) for b in range(sum(counts))]
        random.Random(self.seed).shuffle(blocks)
        streams = [
            Stream(list(prompt), [blocks.pop() for _ in range(count)], len(prompt))
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        while unfinished := [s for s in streams if len(s.tokens) < s.prompt + new_tokens]:
            self._step(runner, unfinished)
        return [s.tokens[s.prompt :] for s in streams]

    def _step(self, runner: ModelRunner, streams: Sequence[Stream]) -> None:
        """One forward of at most BUDGET tokens; those that decode come first."""
        left, parts = BUDGET, []
        for stream in sorted(streams, key=lambda s: s.pending):
            count = min(stream.pending, left)
            left -= count
            if count:
                parts.append((stream, stream.computed, stream.computed + count))
        ends = np.cumsum([last - first for _, first, last in parts]) - 1
        speakers = [i for i, (stream, _, last) in enumerate(parts) if last == len(stream.tokens)]
        logits = runner.forward(
            StepInput(
                token_ids=[t for s, first, last in parts for t in s.tokens[first:last]],
                positions=[p for _, first, last in parts for p in range(first, last)],
                slots=[x for s, first, last in parts for x in slot_mapping(s.table, first, last, self.block_size)],
                q_lens=[last - first for _, first, last in parts],
                kv_lens=[last for _, _, last in parts],
                tables=[s.table for s, _, _ in parts],
                logit_rows=[int(ends[i]) for i in speakers],
            )
        )
        assert logits.dtype is torch.float32
        assert logits.shape == (len(speakers), self.served.vocab_size)
        self.batches.append(len(parts))
        for stream, _, last in parts:
            stream.computed = last
        for i, token in zip(speakers, logits.argmax(-1).tolist(), strict=True):
            parts[i][0].tokens.append(token)


@torch.inference_mode()
def reference(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' own generate says, each prompt alone."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(output[0][len(prompt) :].tolist())
    return answers


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of these lengths, without the control tokens at the start of the vocabulary."""
    chooser = random.Random(7)
    return [[chooser.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
