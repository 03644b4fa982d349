"""`python -m pagekernels.bench [threads]`: what the CPU kernels cost here, beside NumPy on contiguous K and V.

`--gpu` measures the CUDA kernels instead: decode attention, moves, sampling; `--fa3 PYTHON` and `--flashinfer PYTHON`
are commands that start a Python which can import these peers, and whose figures then stand beside ours.

Each line is the median and the least of repeated calls on one layer; blocks are shuffled. NumPy's product reads
contiguous memory, has no softmax worth the name and uses as many threads as its own library likes.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

import pagekernels
from pagekernels.cpu import configure, warm_up
from pagekernels.layout import Format, LayerShape, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import Array, AttentionBatch, AttentionParams, PagedOps


@dataclass(frozen=True)
class Workload:
    """`sequences` of `kv_len` tokens, each with `queries` new ones."""

    name: str
    sequences: int
    queries: int
    kv_len: int
    heads: int = 3
    group: int = 3
    dim: int = 64
    fmt: Format = Format.F32
    block_size: int = 16


DECODE, PREFILL = Workload("decode", 16, 1, 1024), Workload("prefill", 1, 512, 512)
WORKLOADS = (
    Workload("decode", 1, 1, 128),
    Workload("decode", 1, 1, 1024),
    DECODE,
    Workload("decode", 16, 1, 1024, fmt=Format.BF16),
    Workload("decode", 16, 1, 1024, fmt=Format.F16),
    Workload("decode", 16, 1, 1024, heads=8, group=4, dim=128),
    Workload("decode", 16, 1, 1024, heads=8, group=4, dim=128, fmt=Format.BF16),
    PREFILL,
    Workload("prefill", 1, 512, 512, fmt=Format.BF16),
    Workload("prefill", 1, 512, 2048),
    Workload("prefill", 1, 512, 2048, heads=8, group=4, dim=128),
)


@dataclass(frozen=True)
class Setup:
    """A pool filled for a workload."""

    ops: PagedOps
    batch: AttentionBatch
    slots: tuple[npt.NDArray[np.int64], ...]
    keys: Array
    query: Array


def set_up(work: Workload) -> Setup:
    """Random K, V and q over shuffled blocks."""
    rng = np.random.default_rng(0)
    layout = PagedLayout(work.block_size, (LayerShape(work.heads, work.dim, work.dim),), work.fmt)
    columns = -(-work.kv_len // work.block_size)
    units = rng.permutation(work.sequences * columns) * layout.units_per_block
    entries = [pack_entry(work.fmt, 0, int(unit)) for unit in units]
    tables = np.array(entries, np.uint32).reshape(work.sequences, columns)
    ops = pagekernels.open_ops(memoryview(bytearray(len(units) * layout.block_bytes)), layout)
    slots = tuple(np.array(slot_mapping(table.tolist(), 0, work.kv_len, work.block_size)) for table in tables)
    keys = rng.normal(size=(work.sequences, work.kv_len, work.heads, work.dim)).astype(np.float32)
    for token_keys, token_slots in zip(keys, slots, strict=True):
        ops.append(0, token_keys, token_keys, token_slots)
    tokens = work.sequences * work.queries
    query = rng.normal(size=(tokens, work.heads * work.group, work.dim)).astype(np.float32)
    if work.fmt is not Format.F32:
        query = (query.view(np.uint32) >> 16).astype(np.uint16)
    starts = np.arange(0, tokens + 1, work.queries, dtype=np.int32)
    batch = AttentionBatch(starts, np.full(work.sequences, work.kv_len, np.int32), tables)
    return Setup(ops, batch, slots, keys, query)


def time_calls(call: Callable[[], object], seconds: float = 0.5) -> str:
    """Median and least milliseconds of a call."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return f"{median(times):9.3f} {min(times):9.3f}"


def numpy_attention(work: Workload, keys: Array) -> Callable[[], object]:
    """Scores, a softmax without its maximum, and the weighted sum, for contiguous [sequence, head, token, dim]."""
    k = np.ascontiguousarray(keys.transpose(0, 2, 1, 3)).astype(np.float32)
    q = np.ones((work.sequences, work.heads, work.queries * work.group, work.dim), np.float32)

    def call() -> object:
        weights = np.exp(q @ k.swapaxes(2, 3) * np.float32(1e-3))
        return (weights @ k) / weights.sum(-1, keepdims=True)

    return call


def report(work: Workload) -> None:
    """One line for a workload."""
    setup = set_up(work)
    out, params = np.empty_like(setup.query), AttentionParams(work.dim**-0.5)
    shape = (
        f"{work.sequences} x {work.queries} of {work.kv_len}, {work.heads * work.group}q/{work.heads}kv d {work.dim}"
    )
    ours = time_calls(lambda: setup.ops.attend(0, setup.query, out, setup.batch, params))
    print(f"{work.name:8} {work.fmt.name:5} {shape:36} {ours}  {time_calls(numpy_attention(work, setup.keys))}")


def report_moves() -> None:
    """Append, gather and copy of a 512-token sequence."""
    setup = set_up(PREFILL)
    table, keys = setup.batch.block_tables[0], setup.keys[0]
    gathered = np.empty((PREFILL.heads, PREFILL.kv_len, PREFILL.dim), np.float32)
    half = len(table) // 2
    for name, size, call in (
        ("append", f"{PREFILL.kv_len} tokens", lambda: setup.ops.append(0, keys, keys, setup.slots[0])),
        ("gather", f"{PREFILL.kv_len} tokens", lambda: setup.ops.gather(0, table, PREFILL.kv_len, gathered, gathered)),
        ("copy", f"{half} blocks", lambda: setup.ops.copy_blocks(table[:half], table[half:])),
    ):
        print(f"{name:8} F32   {size:36} {time_calls(call)}")


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def report_gpu(peers: dict[str, str]) -> int:
    """Run the benchmarks of the CUDA kernels, each in a process of its own; how many failed."""
    folder = Path(__file__).parents[1] / "bench"
    if not (folder / "decode_cuda.py").is_file():
        raise SystemExit(f"{folder} is not there: --gpu needs a checkout of the repository")
    failed = 0
    with tempfile.TemporaryDirectory() as results:
        commands = []
        for name, python in peers.items():
            commands.append([*shlex.split(python), "decode_cuda.py", "--beside", name, "--json", f"{results}/{name}"])
        if peers:
            commands.append([sys.executable, "decode_cuda.py", "--report", *(f"{results}/{name}" for name in peers)])
        else:
            commands.append([sys.executable, "decode_cuda.py"])
        commands += [[sys.executable, script] for script in ("cuda_moves.py", "sampling_cuda.py")]
        for command in commands:
            print(f"== {' '.join(command[-5:])}", flush=True)
            failed += subprocess.run(command, cwd=folder, check=False).returncode != 0  # noqa: S603 (the caller's own words)
    return failed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=1)
    parser.add_argument("--gpu", action="store_true")
    for peer in ("fa3", "flashinfer"):
        parser.add_argument(f"--{peer}", metavar="PYTHON")
    options = parser.parse_args()
    if options.gpu:
        peers = {name: command for name in ("fa3", "flashinfer") if (command := getattr(options, name))}
        sys.exit(1 if report_gpu(peers) else 0)
    report_cpu(options.threads)


def report_cpu(threads: int) -> None:
    """The table of the CPU kernels."""
    configure(threads)
    warm_up()
    print(f"{processor()}, {threads} thread(s); milliseconds, median and least of one layer")
    print(f"{'':51}{'pagekernels':>19}  {'NumPy, contiguous':>19}")
    for work in WORKLOADS:
        report(work)
    report_moves()


if __name__ == "__main__":
    main()
