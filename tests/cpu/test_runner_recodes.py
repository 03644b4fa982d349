"""Blocks that a runner stores in another format: which bytes and errors, and what the model computes from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inferd.core.ports import BlockCopy, StepInput
from inferd.model.cuda_runner import RunnerLimits
from inferd.model.load import ServedModel, prepare
from inferd.model.recoding import copy_blocks
from inferd.model.runner import ModelRunner
from inferd.sampler import Row
from pagekernels.cpu import configure
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format, LayerShape, PagedLayout, pack_entry, slot_mapping, unpack_entry
from pagekernels.twin import TwinOps, encode
from tests.cpu.host_gpu import host_runner
from tests.cpu.model_configs import VOCAB_SIZE, random_model
from tests.cpu.model_rig import random_prompts
from tests.cpu.settings_mix import GREEDY

BLOCK, NUM_BLOCKS, LENGTH = 16, 12, 70
SEALED = LENGTH // BLOCK
LIMITS = RunnerLimits(128, 8, 256, NUM_BLOCKS, graphs=False)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    configure(1)
    return prepare("llama", random_model("llama"))


def natives(served: ServedModel) -> list[int]:
    fmt = served.format
    return [pack_entry(fmt, 0, block * fmt.itemsize) for block in range(NUM_BLOCKS)]


def singles(served: ServedModel, count: int) -> list[int]:
    """FP8 blocks in the last blocks' units, from behind."""
    last = NUM_BLOCKS * served.format.itemsize - 1
    return [pack_entry(Format.FP8_E4M3, 0, last - index) for index in range(count)]


class Bench:
    """A runner of either kind over a slab of its own, and a twin over a copy of it as it was at a moment."""

    def __init__(self, served: ServedModel, runner: Any, slab: npt.NDArray[np.uint8]) -> None:
        self.served, self.runner, self.slab = served, runner, slab
        (self.prompt,) = random_prompts((LENGTH,), VOCAB_SIZE)

    def step(self, first: int, tokens: Sequence[int], table: Sequence[int], copies: Sequence[BlockCopy] = ()) -> int:
        """Tokens from a position on; the likeliest next one."""
        last = first + len(tokens)
        slots = slot_mapping(table, first, last, BLOCK)
        positions = list(range(first, last))
        step = StepInput(tokens, positions, slots, [len(tokens)], [last], [table], [len(tokens) - 1], copies=copies)
        (token,) = self.runner.launch(step, [Row(GREEDY, last)]).tokens()
        return int(token)

    def place(self, entry: int) -> slice:
        """Where a native block lies in the slab."""
        layout = self.served.layout(BLOCK)
        first = unpack_entry(entry)[2] * layout.unit_bytes
        return slice(first, first + layout.block_bytes)

    def block(self, entry: int) -> npt.NDArray[np.uint8]:
        """The bytes of a native block, to be changed."""
        return self.slab[self.place(entry)]

    def prefilled(self) -> list[int]:
        """The table of the prompt, whose KV is there."""
        table = natives(self.served)[1 : SEALED + 2]
        self.step(0, self.prompt, table)
        return table

    def twin(self) -> tuple[npt.NDArray[np.uint8], TwinOps]:
        slab = self.slab.copy()
        return slab, TwinOps(slab, self.served.layout(BLOCK))


@contextmanager
def open_bench(kind: str, served: ServedModel, patch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if kind == "cpu":
        slab = np.full(served.layout(BLOCK).block_bytes * NUM_BLOCKS, 0xFF, np.uint8)
        yield Bench(served, ModelRunner(served, CpuOps(slab, served.layout(BLOCK))), slab)
        return
    slabs: list[npt.NDArray[np.uint8]] = []
    full = np.full

    def kept(shape: Any, value: Any, dtype: Any) -> Any:
        slabs.append(full(shape, value, dtype))
        return slabs[-1]

    with patch.context() as local:
        local.setattr("tests.cpu.host_gpu.np.full", kept)
        with host_runner(served, BLOCK, NUM_BLOCKS, LIMITS, patch, fp8=True) as runner:
            local.undo()
            yield Bench(served, runner, slabs[0])


@pytest.fixture(params=["cpu", "cuda"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # Each its own model: the GPU's runner gives it another attention.
    with open_bench(request.param, prepare("llama", random_model("llama")), monkeypatch) as opened:
        yield opened


def test_what_is_stored_and_what_it_cost_is_what_the_twin_says_bit_for_bit(bench: Bench) -> None:
    table = bench.prefilled()[:SEALED]
    targets, (slab, twin) = singles(bench.served, SEALED), bench.twin()
    expected = twin.compress_blocks(np.array(table, np.uint32), np.array(targets, np.uint32))
    pending = bench.runner.recode(table, targets)
    np.testing.assert_allclose(pending.errors(), expected.flatten(), rtol=1e-6)
    assert pending.done()
    assert pending.errors() == pending.errors()
    assert len(pending.errors()) == 2 * SEALED
    assert max(pending.errors()) < 0.1
    assert np.array_equal(bench.slab, slab)
    back = natives(bench.served)[7 : 7 + SEALED]
    twin.decompress_blocks(np.array(targets, np.uint32), np.array(back, np.uint32))
    pending = bench.runner.recode(targets, back)
    assert pending.errors() == []
    assert pending.done()
    assert np.array_equal(bench.slab, slab)


def test_the_same_recoding_done_again_does_no_harm(bench: Bench) -> None:
    table, targets = bench.prefilled()[:SEALED], singles(bench.served, SEALED)
    errors, slab = bench.runner.recode(table, targets).errors(), bench.slab.copy()
    assert bench.runner.recode(table, targets).errors() == errors
    assert np.array_equal(bench.slab, slab)


@pytest.mark.parametrize("wrong", ["targets", "mixed", "outside", "word"])
def test_what_cannot_be_recoded_is_refused_and_nothing_is_written(bench: Bench, wrong: str) -> None:
    table = bench.prefilled()
    one, other = singles(bench.served, 2)
    sources, targets = {
        "targets": (table[:2], [one, one]),
        "mixed": ([table[0], one], [other, table[3]]),
        "outside": (table[:1], [pack_entry(Format.FP8_E4M3, 1, 0)]),
        "word": ([1 << 32], [one]),
    }[wrong]
    before = bench.slab.copy()
    with pytest.raises((ValueError, OverflowError)):
        bench.runner.recode(sources, targets)
    assert np.array_equal(bench.slab, before)


def test_logits_over_compressed_blocks_are_those_over_native_blocks_of_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding, a suffix and a chunk of prefill, with a table that memd has remapped in between."""
    served = prepare("llama", random_model("llama"))
    with open_bench("cpu", served, monkeypatch) as bench:
        table = bench.prefilled()
        compressed = singles(served, SEALED)
        meant = natives(served)[7 : 7 + SEALED]
        bench.runner.recode(table[:SEALED], compressed)
        _, twin = bench.twin()
        twin.decompress_blocks(np.array(compressed, np.uint32), np.array(meant, np.uint32))
        for entry in meant:
            bench.block(entry)[:] = twin.slab[bench.place(entry)]
        more = [*natives(served)[SEALED + 2 : SEALED + 3]]
        tails = {"plain": table[:SEALED], "fp8": compressed, "meant": meant}
        for tokens in ([7], [7, 8, 9], list(range(3, 20))):
            logits = {}
            for name, sealed in tails.items():
                whole = [*sealed, table[SEALED], *more]
                last = LENGTH + len(tokens)
                slots = slot_mapping(whole, LENGTH, last, BLOCK)
                positions = list(range(LENGTH, last))
                step = StepInput(tokens, positions, slots, [len(tokens)], [last], [whole], list(range(len(tokens))))
                logits[name] = bench.runner.forward(step)
            assert torch.equal(logits["fp8"], logits["meant"]), "read otherwise than it is meant"
            assert not torch.equal(logits["fp8"], logits["plain"]), "nothing was lost, so nothing was tested"
            off = (logits["fp8"] - logits["plain"]).norm() / logits["plain"].norm()
            assert off < 0.5, "more was lost than such a model makes of 3 % of each number"


def test_decoding_goes_on_over_blocks_that_are_compressed_one_by_one(bench: Bench) -> None:
    """Greedy tokens of a table that loses its native blocks under way are those over native ones of the same values."""
    targets, meant = singles(bench.served, SEALED), natives(bench.served)[7 : 7 + SEALED]
    found: dict[str, list[int]] = {}
    for name, instead in (("fp8", targets), ("meant", meant)):
        table = [*bench.prefilled(), natives(bench.served)[SEALED + 2]]
        found[name] = [3]
        for at in range(8):
            if at < SEALED:
                bench.runner.recode(table[at : at + 1], targets[at : at + 1])
                if name == "meant":
                    bench.runner.recode(targets[at : at + 1], meant[at : at + 1])
                bench.block(table[at])[:] = 0xFF  # is given to somebody else
                table = [*table[:at], instead[at], *table[at + 1 :]]
            found[name].append(bench.step(LENGTH + at, found[name][-1:], table))
    assert found["fp8"] == found["meant"]
    assert len(set(found["fp8"])) > 4


def test_a_copy_from_a_compressed_block_is_decompressed_before_it_is_written_to(bench: Bench) -> None:
    """Beside a plain one: the former for a prompt that shares a part of a sealed block, the latter of an open block."""
    table = bench.prefilled()
    (compressed,) = singles(bench.served, 1)
    bench.runner.recode(table[1:2], [compressed])
    own, other, again = natives(bench.served)[7:10]
    _, twin = bench.twin()
    twin.decompress_blocks(np.array([compressed], np.uint32), np.array([own], np.uint32))
    meant = twin.slab[bench.place(own)].copy()
    copies = [BlockCopy(compressed, own), BlockCopy(table[SEALED], other)]
    token = bench.step(BLOCK + 5, [42], [table[0], own], copies)
    assert np.array_equal(bench.block(other), bench.block(table[SEALED]))
    bench.block(again)[:] = meant
    assert token == bench.step(BLOCK + 5, [42], [table[0], again])
    size = bench.served.layout(BLOCK).block_elements * 4  # without the padding, which no copy has to keep
    assert np.array_equal(bench.block(own)[:size], bench.block(again)[:size])


class Calls:
    """Which operations the copies of a step become."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[int], list[int]]] = []

    def copy_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        self.made.append(("copy", sources.tolist(), targets.tolist()))

    def decompress_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        self.made.append(("decompress", sources.tolist(), targets.tolist()))


@pytest.mark.parametrize(
    ("formats", "made"),
    [
        (["native"] * 3, [("copy", [0, 1, 2])]),
        (["fp8"] * 2, [("decompress", [0, 1])]),
        (["native", "fp8", "native", "fp8"], [("decompress", [1, 3]), ("copy", [0, 2])]),
    ],
)
def test_copies_are_one_call_unless_formats_differ(formats: list[str], made: list[tuple[str, list[int]]]) -> None:
    kinds = {"native": Format.BF16, "fp8": Format.FP8_E4M3}
    sources = [pack_entry(kinds[each], 0, 2 * at) for at, each in enumerate(formats)]
    targets = [pack_entry(Format.BF16, 0, 100 + 2 * at) for at in range(len(formats))]
    calls = Calls()
    copy_blocks(calls, [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)])
    expected = [(name, [sources[at] for at in places], [targets[at] for at in places]) for name, places in made]
    assert calls.made == expected


@pytest.mark.parametrize("fmt", [Format.BF16, Format.F16])
def test_a_16_bit_pool_recodes_and_copies_as_the_twin_does(fmt: Format) -> None:
    configure(1)
    layout = PagedLayout(BLOCK, (LayerShape(2, 16, 16), LayerShape(1, 20, 12)), fmt)
    slab = np.zeros(8 * layout.block_bytes, np.uint8)
    values = np.random.default_rng(1).normal(size=layout.block_elements).astype(np.float32)
    slab[: 2 * layout.block_elements] = encode(fmt, values).view(np.uint8)
    expected = slab.copy()
    twin = TwinOps(expected, layout)
    source, other = (np.array([pack_entry(fmt, 0, unit)], np.uint32) for unit in (0, 6))
    target = np.array([pack_entry(Format.FP8_E4M3, 0, 5)], np.uint32)
    twin.compress_blocks(source, target)
    twin.decompress_blocks(target, other)
    ops = CpuOps(slab, layout)
    ops.compress_blocks(source, target)
    copy_blocks(ops, [BlockCopy(int(target[0]), int(other[0]))])
    assert np.array_equal(slab, expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_s_kernels_are_made_for_what_the_pool_may_have(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    with host_runner(served, BLOCK, NUM_BLOCKS, LIMITS, monkeypatch, fp8=fp8) as runner:
        ops: Any = runner._ops
        assert (ops.tuning.mixed, ops.is_loaded) == (fp8, fp8)
