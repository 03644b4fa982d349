"""A captured step replayed with other contents, the fixed buffers behind it, and which kernel serves which layer."""

from dataclasses import replace

import numpy as np
import pytest

from pagekernels.cuda.arrays import DeviceArray
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.decode import DecodeLayer
from pagekernels.cuda.ops import CudaOps
from pagekernels.layout import LAYOUT_SWIZZLED, Format
from pagekernels.ops import AttentionBatch
from pagekernels.twin import TwinOps, decode, encode
from tests.cpu.kernel_cases import LAYER, TOLERANCE, Case, with_params
from tests.gpu.gpu_ops import jobs_of, precompile, upload

torch = pytest.importorskip("torch")

SEQUENCES, TOKENS, BLOCKS = 6, 24, 40
STEPS = [
    ((1, 17), (1, 300), (4, 4), (1, 1)),
    ((1, 600), (16, 33), (0, 0), (2, 90), (1, 16), (1, 15)),
    ((24, 640),),
    (),
    ((1, 18), (1, 301), (0, 12), (1, 2)),
]
GENERIC = Case((), Format.BF16, dims=(48, 24), heads=2, group=3, version=LAYOUT_SWIZZLED)
TUNED = with_params(Case((), Format.BF16, dims=(64, 64), heads=2, group=4, version=LAYOUT_SWIZZLED), scale=0.125)
KINDS = {
    "generic": GENERIC,
    "generic f32": replace(GENERIC, fmt=Format.F32),
    "tuned": TUNED,
    "tuned window": with_params(TUNED, window=50),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled(device):
    precompile(device, [job for case in KINDS.values() for job in jobs_of(case)])


class Captured:
    """Append and attention of one layer in a graph, over a pool with random tokens in every slot."""

    def __init__(self, device, case):
        self.device, self.case = device, case
        rng = np.random.default_rng(0)
        layout = case.layout
        pool = SEQUENCES * BLOCKS
        self.slab = np.full(pool * layout.block_bytes, 0xFF, np.uint8)
        units = rng.permutation(pool) * layout.units_per_block
        self.tables = [[int(case.fmt) << 29 | int(u) for u in units[s::SEQUENCES]] for s in range(SEQUENCES)]
        slots = np.concatenate([case.slots(np.array(t), 0, BLOCKS * case.block_size) for t in self.tables])
        writer = TwinOps(self.slab, layout)
        writer.append(LAYER, self.random(rng, len(slots), 0), self.random(rng, len(slots), 1), slots)
        self.memory = device.api.mem_alloc(self.slab.nbytes)
        upload(device, self.memory, self.slab)
        layers = {LAYER: DecodeLayer(case.heads * case.group, case.params)}
        self.ops = CudaOps(device, int(self.memory), layout, layers)
        self.batch = DeviceBatch(device, SEQUENCES, TOKENS, BLOCKS, extra={"ids": ("int64", TOKENS)})
        self.inputs = [
            torch.zeros(TOKENS, heads, dim, dtype=self.dtype(), device="cuda")
            for heads, dim in ((case.heads * case.group, case.dims[0]), *((case.heads, d) for d in case.dims))
        ]
        self.out = torch.zeros(TOKENS, case.heads * case.group, case.dims[1], dtype=self.dtype(), device="cuda")
        self.graph = self.capture()

    def dtype(self):
        return torch.float32 if self.case.fmt is Format.F32 else torch.bfloat16

    def random(self, rng, count, which):
        values = rng.normal(size=(count, self.case.heads, self.case.dims[which])).astype(np.float32)
        return encode(self.case.fmt, values)

    def launch(self):
        q, k, v = self.inputs
        self.ops.plan(self.batch)
        self.ops.append(LAYER, k, v, self.batch)
        self.ops.attend(LAYER, q, self.out, self.batch, self.case.params)

    def capture(self):
        stream = torch.cuda.ExternalStream(self.device.stream_handle)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.batch.stage([], [], [], [])
            self.launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.launch()
        return graph

    def step(self, sequences, seed):
        """(what the graph gives, what the twin gives, tokens) for sequences of (query tokens, tokens)."""
        case, rng = self.case, np.random.default_rng(seed)
        order = rng.permutation(SEQUENCES)[: len(sequences)]
        tables = [self.tables[s] for s in order]
        slots = [case.slots(np.array(t), kv - n, kv).tolist() for t, (n, kv) in zip(tables, sequences, strict=True)]
        slots = [slot for part in slots for slot in part]
        for tensor in self.inputs:
            tensor.copy_(torch.from_numpy(rng.normal(size=tuple(tensor.shape))))
        self.out.fill_(7.0)
        q, k, v = (self.host(tensor) for tensor in self.inputs)
        torch.cuda.synchronize()
        lengths = [n for n, _ in sequences], [kv for _, kv in sequences]
        trimmed = [t[: -(-kv // case.block_size)] for t, kv in zip(tables, lengths[1], strict=True)]
        self.batch.stage(*lengths, trimmed, slots)
        with torch.cuda.stream(torch.cuda.ExternalStream(self.device.stream_handle)):
            self.graph.replay()
        self.device.synchronize()
        got = self.host(self.out)
        twin, count = TwinOps(self.slab, case.layout), len(slots)
        expected = encode(case.fmt, np.full(got.shape, 7.0, np.float32))
        if sequences:
            twin.append(LAYER, k[:count], v[:count], np.array(slots, np.int64))
            wide = np.zeros((len(tables), BLOCKS), np.uint32)
            wide[:] = tables
            batch = AttentionBatch(np.cumsum([0, *lengths[0]]).astype(np.int32), np.array(lengths[1], np.int32), wide)
            twin.attend(LAYER, q[:count], expected[:count], batch, case.params)
        return decode(case.fmt, got), decode(case.fmt, expected), count

    def host(self, tensor):
        if tensor.dtype is torch.float32:
            return tensor.cpu().numpy()
        return tensor.cpu().view(torch.uint16).numpy()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_graph_is_replayed_with_other_lengths_and_tables(device, kind):
    case = KINDS[kind]
    captured = Captured(device, case)
    tuned = captured.ops._tuned_for(captured.batch)
    assert (tuned is not None) == kind.startswith("tuned")
    for turn in range(2):
        for seed, sequences in enumerate(STEPS):
            got, expected, count = captured.step(sequences, seed + 10 * turn)
            tolerance = TOLERANCE[case.fmt]
            np.testing.assert_allclose(got[:count], expected[:count], rtol=tolerance, atol=tolerance)
            assert (got[count:] == 7.0).all()
    device.api.memcpy_dtoh(copied := np.empty_like(captured.slab), captured.memory)
    assert np.array_equal(copied, captured.slab)


def fetch(device, array: DeviceArray):
    device.synchronize()
    host = np.empty(array.shape, array.dtype)
    device.api.memcpy_dtoh(host, array.data_ptr())
    return host


def test_a_staged_step_is_on_the_device_padded_and_each_array_where_it_always_was(device):
    batch = DeviceBatch(device, 4, 8, 5, extra={"ids": ("int64", 8), "heat": ("float32", 4)})
    addresses = {name: array.data_ptr() for name, array in batch.arrays.items()}
    tables = [[11, 12], [21, 22, 23]]
    batch.stage([2, 1], [20, 33], tables, [5, 6, 7], {"ids": [1, 2, 3], "heat": np.array([0.5, 1.5])})
    assert fetch(device, batch.cu_q_lens).tolist() == [0, 2, 3, 3, 3]
    assert fetch(device, batch.kv_lens).tolist() == [20, 33, 0, 0]
    assert fetch(device, batch.slots).tolist() == [5, 6, 7, -1, -1, -1, -1, -1]
    assert fetch(device, batch.arrays["ids"])[:3].tolist() == [1, 2, 3]
    assert fetch(device, batch.arrays["heat"])[:2].tolist() == [0.5, 1.5]
    assert fetch(device, batch.block_tables)[0, :2].tolist() == [11, 12]
    assert fetch(device, batch.block_tables)[1, :3].tolist() == [21, 22, 23]
    assert addresses == {name: array.data_ptr() for name, array in batch.arrays.items()}
    assert torch.as_tensor(batch.slots, device="cuda").tolist() == [5, 6, 7, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("blocks", [40, 3000])
def test_tables_that_come_go_and_move_are_always_the_steps_own(device, blocks):
    """With 3,000 blocks a sequence only the used columns are copied."""
    batch, rng = DeviceBatch(device, 16, 16, blocks), np.random.default_rng(0)
    living = []
    for _ in range(40):
        living = [t for t in living if rng.random() > 0.2]
        while len(living) < 16 and rng.random() > 0.3:
            living.insert(int(rng.integers(len(living) + 1)), rng.integers(1, 2**32, int(rng.integers(1, 40))).tolist())
        rng.shuffle(living)
        batch.stage([1] * len(living), [1] * len(living), living, list(range(len(living))))
        on_device = fetch(device, batch.block_tables)
        for row, table in zip(on_device, living, strict=False):
            assert row[: len(table)].tolist() == table


def test_what_does_not_fit_a_batch_is_refused(device):
    batch = DeviceBatch(device, 2, 4, 3, 2)
    for arguments, complaint in (
        (([1, 1, 1], [1, 1, 1], [[1]] * 3, [0, 1, 2]), "one of each for up to 2 sequences"),
        (([1, 1], [1, 1], [[1]] * 2, [0]), "q_lens add up to 2 and there are 1 slots"),
        (([3], [3], [[1]], [0, 1, 2]), "a sequence has 3 query tokens, but this batch takes 2"),
        (([1], [1], [[1, 2, 3, 4]], [0]), "a table has 4 blocks, but this batch takes 3"),
    ):
        with pytest.raises(ValueError, match=complaint):
            batch.stage(*arguments)


def test_a_device_says_what_it_is(device):
    assert device.api.Context.get_device() == device.api.Device(device.index)
    assert device.uuid.startswith(("GPU-", "MIG-"))
    assert device.arch == "sm_{}{}".format(*torch.cuda.get_device_capability(device.index))
    assert device.num_sms == torch.cuda.get_device_properties(device.index).multi_processor_count
    assert device.max_shared_bytes >= 48 * 1024
