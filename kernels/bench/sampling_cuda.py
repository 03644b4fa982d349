"""`python kernels/bench/sampling_cuda.py [vocab]`: what sampling costs a step on this GPU, beside torch's own arg-max.

Microseconds a step, in a CUDA graph of 20, the median of 5 replays; logits normal, as wide as a young model's (standard
deviation 1) and as a trained one's (3). A graph holds all three kernels whatever its rows ask for, so greedy rows pay
for two that have nothing to do; "greedy only" is the launch without them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pagekernels.cuda.device import CudaDevice, open_device
from pagekernels.cuda.sampling import GpuSampler, pack_head, pack_position

BATCHES = (1, 8, 32, 128)
LAUNCHES, REPLAYS = 20, 5


@dataclass(frozen=True)
class How:
    """Settings of a row."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 1
    sample_index: int = 0


SETTINGS = {
    "greedy only": How(temperature=0),
    "greedy": How(temperature=0),
    "plain": How(),
    "min_p 0.05": How(min_p=0.05),
    "top_k 50": How(top_k=50),
    "top_p 0.95": How(top_p=0.95),
    "temperature 0.7, top_k 20, top_p 0.8": How(temperature=0.7, top_k=20, top_p=0.8),
}


def microseconds(device: CudaDevice, launch: Callable[[], object]) -> float:
    """Of one launch among many in a graph."""
    stream = torch.cuda.ExternalStream(device.stream_handle)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def row(device: CudaDevice, sampler: GpuSampler, name: str, batches: Sequence[torch.Tensor]) -> str:
    """One line of the table; `batches` are logits."""
    cells = []
    for logits in batches:
        records = b"".join(pack_head(SETTINGS[name]) + pack_position(position) for position in range(len(logits)))
        rows = torch.frombuffer(bytearray(records), dtype=torch.uint8).cuda()
        tokens = torch.zeros(len(logits), dtype=torch.int32, device="cuda")
        where = (rows.data_ptr(), tokens.data_ptr())
        greedy = name == "greedy only"
        launch = partial(sampler.sample, logits, *where, greedy_only=greedy)
        cells.append(microseconds(device, launch))
    return f"{name:38}" + "".join(f"{cell:8.1f}" for cell in cells)


def main() -> None:
    """Print a table for each dtype and width of logits."""
    vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 152064
    torch.cuda.init()
    device = open_device(0)
    print(f"{torch.cuda.get_device_name(0)}; {vocab} logits a row; microseconds at {BATCHES} rows")
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.bfloat16, 3.0), (torch.float32, 3.0)):
        print(f"\n{dtype}, standard deviation {scale}")
        sampler = GpuSampler(device, max(BATCHES), vocab, str(dtype).removeprefix("torch."))
        batches = [(torch.randn(batch, vocab, device="cuda") * scale).to(dtype) for batch in BATCHES]
        for name in SETTINGS:
            print(row(device, sampler, name, batches))
        times = [microseconds(device, partial(logits.argmax, -1)) for logits in batches]
        print(f"{'torch.argmax':38}" + "".join(f"{cell:8.1f}" for cell in times))
        sampler.close()
    device.close()


if __name__ == "__main__":
    main()
