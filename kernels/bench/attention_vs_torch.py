"""`python kernels/bench/attention_vs_torch.py [threads]`: the CPU kernels over pages against torch's SDPA without.

torch reads contiguous K and V. "both" is a linear layer of torch and a decode call in turn, as in a model's step: it
shows whether the two share their threads well.
"""

import sys

import numpy as np
import torch  # before the kernels, which join its threads

from pagekernels.bench import DECODE, WORKLOADS, Workload, processor, set_up, time_calls
from pagekernels.cpu import configure, warm_up
from pagekernels.layout import Format
from pagekernels.ops import AttentionParams


def sdpa(work: Workload, keys: np.ndarray):
    """The attention of torch on the same shapes, contiguous, in the workload's type."""
    dtype = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}[work.fmt]
    k = torch.from_numpy(keys).transpose(1, 2).contiguous().to(dtype)
    q = torch.randn(work.sequences, work.heads * work.group, work.queries, work.dim).to(dtype)
    mask = torch.ones(work.queries, work.kv_len, dtype=torch.bool).tril(work.kv_len - work.queries)
    causal = {"is_causal": True} if work.queries == work.kv_len else {"attn_mask": mask}
    masked = {} if work.queries == 1 else causal
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True, **masked)


def decode_call(work: Workload):
    """(our call, torch's call) of a workload."""
    setup = set_up(work)
    out, params = np.empty_like(setup.query), AttentionParams(work.dim**-0.5)
    return lambda: setup.ops.attend(0, setup.query, out, setup.batch, params), sdpa(work, setup.keys)


def main() -> None:
    """Print the table."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    configure(threads)
    warm_up()
    print(f"{processor()}, {threads} thread(s), torch {torch.__version__}; ms, median and least of one layer")
    print(f"{'':51}{'pagekernels':>19}  {'torch, contiguous':>19}")
    for work in WORKLOADS:
        ours, theirs = decode_call(work)
        shape = f"{work.sequences} x {work.queries} of {work.kv_len}, {work.heads}kv x {work.group}, d {work.dim}"
        print(f"{work.name:8} {work.fmt.name:5} {shape:36} {time_calls(ours)}  {time_calls(theirs)}")
    x, weight = torch.randn(16, 576), torch.randn(1536, 576)
    attend = decode_call(DECODE)[0]
    print(f"linear   {time_calls(lambda: torch.nn.functional.linear(x, weight))}")
    print(f"attend   {time_calls(attend)}")
    print(f"both     {time_calls(lambda: (torch.nn.functional.linear(x, weight), attend()))}")


if __name__ == "__main__":
    main()
