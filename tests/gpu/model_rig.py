"""Runs a model's CUDA runner over a pool of its own, a step ahead of the tokens it knows, as the engine does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import counters

from inferd.core.messages import Sampling
from inferd.core.ports import StepInput
from inferd.model.cuda_graphs import CompiledForward
from inferd.model.cuda_runner import CudaRunner, DevicePool, Launched, RunnerLimits, compiled
from inferd.model.load import ServedModel
from inferd.sampler import Row
from pagekernels.cuda.device import CudaDevice
from pagekernels.layout import LAYOUT_SWIZZLED, PagedLayout, pack_entry, slot_mapping

GREEDY = Sampling(temperature=0)


@dataclass
class Stream:
    """One sequence: its tokens as far as they are known, and how many were launched."""

    tokens: list[int]
    table: list[int]
    prompt: int
    launched: int = 0
    row: int | None = None

    def part(self, left: int) -> tuple[int, int]:
        """The positions of its next chunk."""
        known = len(self.tokens) + (self.row is not None)
        return self.launched, min(known, self.launched + left)

    def ids(self, first: int, last: int) -> list[int]:
        """Token ids, those not known yet as the engine says them."""
        return [self.tokens[p] if p < len(self.tokens) else -1 - (self.row or 0) for p in range(first, last)]


def num_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


@dataclass
class CudaRig:
    """Greedy decoding of several prompts at once over a pool full of NaN, its blocks shuffled.

    `graphs` is what torch.compile had compiled when the runner was ready.
    """

    device: CudaDevice
    served: ServedModel
    block_size: int = 16
    budget: int = 17
    limits: RunnerLimits = field(default_factory=lambda: RunnerLimits(64, 16, 256, 1024, graphs=False))
    forward: CompiledForward | None = None
    compile_: bool = False
    graphs: int = 0

    @contextmanager
    def runner(self, num_blocks: int) -> Iterator[CudaRunner]:
        """A runner over a pool of so many blocks."""
        layout = PagedLayout(self.block_size, self.served.geometry.shapes, self.served.format, LAYOUT_SWIZZLED)
        slab = torch.full(
            (layout.block_bytes * num_blocks,), 0xFF, dtype=torch.uint8, device=f"cuda:{self.device.index}"
        )
        torch.cuda.synchronize()
        self.forward = self.forward or compiled(self.served, compile_=self.compile_)
        pool = DevicePool((slab.data_ptr(),), layout)
        runner = CudaRunner(self.served, self.forward, self.device, pool, self.limits)
        try:
            runner.capture(lambda _line: None)
            self.graphs = num_graphs()
            yield runner
        finally:
            runner.close()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int = 0) -> list[list[int]]:
        """The tokens that follow each prompt."""
        fmt = self.served.format
        counts = [-(-(len(prompt) + new_tokens) // self.block_size) for prompt in prompts]
        blocks = [pack_entry(fmt, 0, b * fmt.itemsize) for b in range(sum(counts))]
        random.Random(seed).shuffle(blocks)
        streams = [
            Stream(list(prompt), [blocks.pop() for _ in range(count)], len(prompt))
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        with self.runner(sum(counts)) as runner:
            self._run(runner, streams, new_tokens)
        return [s.tokens[s.prompt :][:new_tokens] for s in streams]

    def _run(self, runner: CudaRunner, streams: Sequence[Stream], new_tokens: int) -> None:
        former: tuple[Launched, list[Stream]] | None = None
        while True:
            open_ = [s for s in streams if len(s.tokens) + (s.row is not None) < s.prompt + new_tokens]
            launched = self._launch(runner, open_) if open_ else None
            if former is not None:
                pending, speakers = former
                for stream, token in zip(speakers, pending.tokens(), strict=True):
                    stream.tokens.append(token)
                    if launched is None or stream not in launched[1]:
                        stream.row = None
            former = launched
            if former is None:
                return

    def _launch(self, runner: CudaRunner, streams: Sequence[Stream]) -> tuple[Launched, list[Stream]]:
        """One step of at most `budget` tokens; those that decode come first."""
        left, parts = self.budget, []
        for stream in sorted(streams, key=lambda s: s.part(10**9)[1] - s.launched):
            first, last = stream.part(left)
            if last > first:
                parts.append((stream, first, last))
                left -= last - first
        ids = [t for s, first, last in parts for t in s.ids(first, last)]
        ends, at = [], 0
        speakers = []
        for stream, first, last in parts:
            at += last - first
            if last == len(stream.tokens) + (stream.row is not None):
                ends.append(at - 1)
                speakers.append(stream)
        step = StepInput(
            token_ids=ids,
            positions=[p for _, first, last in parts for p in range(first, last)],
            slots=[x for s, first, last in parts for x in slot_mapping(s.table, first, last, self.block_size)],
            q_lens=[last - first for _, first, last in parts],
            kv_lens=[last for _, _, last in parts],
            tables=[s.table for s, _, _ in parts],
            logit_rows=ends,
        )
        pending = runner.launch(step, [Row(GREEDY, len(s.tokens)) for s in speakers])
        for stream, _, last in parts:
            stream.launched = last
        for row, stream in enumerate(speakers):
            stream.row = row
        return pending, speakers
