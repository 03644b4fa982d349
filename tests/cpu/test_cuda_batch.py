"""What a step stages for the GPU, over a device that is NumPy: which bytes are copied, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from pagekernels.cuda.arrays import DeviceArray, check_tensor
from pagekernels.cuda.attend import most_splits, most_tiles
from pagekernels.cuda.batch import DeviceBatch


@dataclass
class HostDevice:
    """The calls of pycuda.driver that DeviceBatch makes, on memory of the host, done at once."""

    copied: list[int] = field(default_factory=list)
    stream: object = "stream"
    api: object = field(init=False)

    def __post_init__(self):
        self.memory = None
        self.api = SimpleNamespace(
            mem_alloc=self.allocate,
            memset_d8_async=lambda *_: None,
            pagelocked_empty=np.empty,
            memcpy_htod_async=self.copy,
            Memcpy2D=lambda: Copy2D(self),
            Event=lambda _flags: SimpleNamespace(record=lambda _stream: None, synchronize=lambda: None),
            event_flags=SimpleNamespace(DISABLE_TIMING=2),
        )

    def allocate(self, size):
        self.memory = np.zeros(size, np.uint8)
        return 1 << 20

    def copy(self, address, source, _stream):
        self.copied.append(len(source))
        at = address - (1 << 20)
        self.memory[at : at + len(source)] = source

    def read(self, array: DeviceArray):
        at = array.data_ptr() - (1 << 20)
        return self.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)


class Copy2D:
    """pycuda.driver.Memcpy2D."""

    def __init__(self, device):
        self.device = device

    def set_src_host(self, source):
        self.source = source

    def set_dst_device(self, address):
        self.at = address - (1 << 20)

    def __call__(self, _stream):
        self.device.copied.append(self.width_in_bytes * self.height)
        for row in range(self.height):
            part = self.source[row * self.src_pitch :][: self.width_in_bytes]
            self.device.memory[self.at + row * self.dst_pitch :][: len(part)] = part


def test_a_decode_step_after_another_copies_lengths_and_slots_only():
    device = HostDevice()
    batch = DeviceBatch(device, 128, 128, 2048)
    tables = [[s * 40 + b for b in range(40)] for s in range(128)]
    for step in range(4):
        batch.stage([1] * 128, [600 + step] * 128, tables, list(range(128)))
    assert max(device.copied[0], *device.copied[2:]) < 4096
    assert device.copied[1] == 128 * 40 * 4
    assert len(device.copied) == 5
    assert device.read(batch.kv_lens).tolist() == [603] * 128
    assert device.read(batch.block_tables)[:, :40].tolist() == tables


@pytest.mark.parametrize("blocks", [40, 3000])
def test_tables_that_come_go_and_move_are_always_the_steps_own(blocks):
    device, rng = HostDevice(), np.random.default_rng(0)
    batch, living = DeviceBatch(device, 16, 16, blocks), []
    for _ in range(300):
        living = [table for table in living if rng.random() > 0.2]
        while len(living) < 16 and rng.random() > 0.3:
            living.insert(int(rng.integers(len(living) + 1)), rng.integers(1, 2**32, int(rng.integers(1, 40))).tolist())
        if rng.random() > 0.5:
            rng.shuffle(living)
        count = len(living)
        batch.stage([1] * count, list(range(1, count + 1)), living, list(range(count)))
        on_device = device.read(batch.block_tables)
        assert all(row[: len(table)].tolist() == table for row, table in zip(on_device, living, strict=False))
        assert device.read(batch.cu_q_lens).tolist() == [min(s, count) for s in range(17)]
        assert device.read(batch.kv_lens).tolist() == [s + 1 if s < count else 0 for s in range(16)]
        assert device.read(batch.slots).tolist() == [s if s < count else -1 for s in range(16)]


def test_further_arrays_travel_in_the_same_copy():
    device = HostDevice()
    batch = DeviceBatch(device, 2, 4, 3, extra={"ids": ("int64", 4), "heat": ("float32", 2)})
    batch.stage([1], [1], [[7]], [0], {"ids": [5, -1], "heat": np.array([0.5])})
    assert device.read(batch.arrays["ids"])[:2].tolist() == [5, -1]
    assert device.read(batch.arrays["heat"])[0] == 0.5
    assert len(device.copied) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([1, 1, 1], [1, 1, 1], [[1]] * 3, [0, 1, 2]), "one of each for up to 2 sequences"),
        (([1, 1], [1], [[1]] * 2, [0, 1]), "there are 2 q_lens, 1 kv_lens and 2 tables"),
        (([1, 1], [1, 1], [[1]] * 2, [0]), "q_lens add up to 2 and there are 1 slots"),
        (([2, 3], [2, 3], [[1]] * 2, [0] * 5), "there are 5 slots, but they must agree and be at most 4"),
        (([3], [3], [[1]], [0, 1, 2]), "a sequence has 3 query tokens, but this batch takes 2"),
        (([1], [1], [[1, 2, 3, 4]], [0]), "a table has 4 blocks, but this batch takes 3"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        DeviceBatch(HostDevice(), 2, 4, 3, 2).stage(*arguments)


@pytest.mark.parametrize("seed", range(200))
def test_no_step_has_more_tiles_of_query_rows_than_the_capacity_says(seed):
    rng = np.random.default_rng(seed)
    sequences, most, group = int(rng.integers(1, 9)), int(rng.integers(1, 30)), int(rng.integers(1, 20))
    tokens = int(rng.integers(1, sequences * most + 1))
    batch = DeviceBatch(HostDevice(), sequences, tokens, 4, most)
    for rows in (16, 64):
        lengths, left = [], tokens
        for _ in range(sequences):
            lengths.append(int(rng.integers(0, min(most, left) + 1)))
            left -= lengths[-1]
        assert sum(-(-n * group // rows) for n in lengths) <= most_tiles(batch, group, rows)


def test_contexts_are_split_as_long_as_the_parts_are_worth_it():
    assert most_splits(100, 50) == 1
    assert most_splits(4096, 50) == 16
    assert most_splits(1 << 20, 50) == 50
    assert most_splits(1 << 20, 500) == 64
    assert most_splits(4096, 0) == 1


def test_a_tensor_that_a_kernel_cannot_take_is_named():
    array = DeviceArray(64, (2, 3, 8), "float32")
    check_tensor("k", array, "[T, H, D]", (2, 3, 8), (4,))
    assert array.stride() == (24, 8, 1)
    with pytest.raises(ValueError, match=r"k has shape \(2, 3, 8\), but must be \[T, H, D\] = \(2, 3, 9\)"):
        check_tensor("k", array, "[T, H, D]", (2, 3, 9), (4,))
    with pytest.raises(ValueError, match="k has elements of 4 bytes, but must have 2"):
        check_tensor("k", array, "[T, H, D]", (2, 3, 8), (2,))
