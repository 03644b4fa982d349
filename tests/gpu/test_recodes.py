"""Blocks that a CudaRunner stores in another format on a GPU: bytes, errors, order, and what the model reads there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from inferd.core.ports import BlockCopy, StepInput
from inferd.model.cuda_runner import CudaRunner, DevicePool, RunnerLimits, compiled
from inferd.model.load import ServedModel, prepare
from inferd.sampler import Row
from pagekernels.cuda.device import CudaDevice
from pagekernels.layout import LAYOUT_SWIZZLED, Format, PagedLayout, pack_entry, slot_mapping, unpack_entry
from pagekernels.twin import TwinOps
from tests.cpu.model_configs import VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts
from tests.cpu.settings_mix import GREEDY

BLOCK, NUM_BLOCKS, LENGTH = 16, 12, 70
SEALED = LENGTH // BLOCK
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Bench:
    """A runner over a slab on the GPU, which may have FP8 blocks."""

    served: ServedModel
    layout: PagedLayout
    runner: CudaRunner
    slab: torch.Tensor

    def launch(self, first: int, tokens: Sequence[int], table: Sequence[int], copies: Sequence[BlockCopy] = ()) -> Any:
        last = first + len(tokens)
        slots, places = slot_mapping(table, first, last, BLOCK), list(range(first, last))
        sizes = [len(tokens)], [last], [table], [len(tokens) - 1]
        return self.runner.launch(StepInput(tokens, places, slots, *sizes, copies=copies), [Row(GREEDY, last)])

    def natives(self) -> list[int]:
        return [pack_entry(self.layout.format, 0, at * self.layout.units_per_block) for at in range(NUM_BLOCKS)]

    def singles(self) -> list[int]:
        last = NUM_BLOCKS * self.layout.units_per_block - 1
        return [pack_entry(Format.FP8_E4M3, 0, last - at) for at in range(SEALED)]

    def twin(self) -> TwinOps:
        torch.cuda.synchronize()
        return TwinOps(self.slab.cpu().numpy(), self.layout)

    def stored(self, slab: Any, entries: Sequence[int]) -> list[bytes]:
        """The elements, and of FP8 blocks the scales; padding may be anything."""
        found = []
        for entry in entries:
            fmt, _, unit = unpack_entry(entry)
            scales = 4 * self.layout.num_scales if fmt is Format.FP8_E4M3 else 0
            size = self.layout.block_elements * fmt.itemsize + scales
            found.append(bytes(slab[unit * self.layout.unit_bytes :][:size]))
        return found


@pytest.fixture(params=["float32", "bfloat16"])
def bench(device: CudaDevice, request: pytest.FixtureRequest) -> Iterator[Bench]:
    served = prepare("llama", random_model("llama").to("cuda", DTYPES[request.param]))
    with opened(device, served) as made:
        yield made


@contextmanager
def opened(device: CudaDevice, served: ServedModel) -> Iterator[Bench]:
    layout = PagedLayout(BLOCK, served.geometry.shapes, served.format, LAYOUT_SWIZZLED)
    slab = torch.full((layout.block_bytes * NUM_BLOCKS,), 0xFF, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    limits = RunnerLimits(128, 8, 256, NUM_BLOCKS)
    pool = DevicePool((slab.data_ptr(),), layout, fp8=True)
    runner = CudaRunner(served, compiled(served, compile_=False), device, pool, limits)
    try:
        runner.capture(lambda _line: None)
        yield Bench(served, layout, runner, slab)
    finally:
        runner.close()


def test_bytes_and_errors_are_the_twin_s_and_nothing_is_compiled_for_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = random_prompts((LENGTH,), VOCAB_SIZE)
    table, singles, back = bench.natives()[1 : SEALED + 2], bench.singles(), bench.natives()[6 : 6 + SEALED]
    # Launched behind the step that writes what they read, before it is over.
    step = bench.launch(0, prompt, table)
    monkeypatch.setattr("pagekernels.cuda.build.cubin", lambda *_: pytest.fail("a kernel is loaded on the way"))
    compressing = bench.runner.recode(table[:SEALED], singles)
    decompressing = bench.runner.recode(singles, back)
    step.tokens()
    errors = compressing.errors()
    assert decompressing.errors() == []
    assert compressing.done()
    assert decompressing.done()
    twin = bench.twin()
    found = bench.stored(twin.slab, [*singles, *back])
    expected = twin.compress_blocks(np.array(table[:SEALED], np.uint32), np.array(singles, np.uint32))
    twin.decompress_blocks(np.array(singles, np.uint32), np.array(back, np.uint32))
    assert bench.stored(twin.slab, [*singles, *back]) == found
    np.testing.assert_allclose(errors, expected.flatten(), rtol=1e-3)


@pytest.mark.parametrize("count", [1, 5, 26])
@pytest.mark.parametrize("bench", ["float32"], indirect=True)  # in which native blocks hold just what FP8 ones mean
def test_decodes_suffixes_and_chunks_read_fp8_blocks_as_native_ones_of_the_same_values(
    bench: Bench, count: int
) -> None:
    (prompt, more) = random_prompts((LENGTH, count), VOCAB_SIZE)
    table, singles, meant = bench.natives()[:6], bench.singles(), bench.natives()[6 : 6 + SEALED]
    bench.launch(0, prompt, table).tokens()
    bench.runner.recode(table[:SEALED], singles).errors()
    bench.runner.recode(singles, meant).errors()
    tokens = [bench.launch(LENGTH, more, [*sealed, *table[SEALED:]]).tokens() for sealed in (singles, meant)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] >= 0


def test_a_copy_from_a_compressed_block_is_decompressed(bench: Bench) -> None:
    (prompt,) = random_prompts((LENGTH,), VOCAB_SIZE)
    table, (single, *_) = bench.natives()[1 : SEALED + 2], bench.singles()
    own, other = bench.natives()[6:8]
    bench.launch(0, prompt, table).tokens()
    bench.runner.recode(table[1:2], [single]).errors()
    twin = bench.twin()
    twin.decompress_blocks(np.array([single], np.uint32), np.array([own], np.uint32))
    twin.copy_blocks(np.array(table[SEALED:], np.uint32), np.array([other], np.uint32))
    copies = [BlockCopy(single, own), BlockCopy(table[SEALED], other)]
    bench.launch(LENGTH, [5], table, copies).tokens()
    assert bench.stored(bench.twin().slab, [own]) == bench.stored(twin.slab, [own])
    size = bench.layout.block_bytes
    place = slice(unpack_entry(other)[2] * bench.layout.unit_bytes, None)
    assert np.array_equal(bench.twin().slab[place][:size], twin.slab[place][:size])


def test_what_cannot_be_recoded_is_refused(bench: Bench) -> None:
    table, single = bench.natives(), bench.singles()[0]
    with pytest.raises(ValueError, match="must not overlap another target"):
        bench.runner.recode(table[:2], [single, single])
