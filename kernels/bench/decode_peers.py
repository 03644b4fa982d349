"""FlashAttention 3 (vLLM's build) and FlashInfer on the shapes of decode_cuda.py; each must be importable by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

DIM, BLOCK = 128, 16


class Peer(NamedTuple):
    """One layer's call, and what the peer plans once a step."""

    attend: Callable[[], object]
    plan: Callable[[], object]


def pages(heads: tuple[int, int], batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled tables int32 [batch, pages of a sequence], and pages [pages, K|V, BLOCK, KV heads, DIM]."""
    count = batch * context // BLOCK
    table = torch.randperm(count, device="cuda", dtype=torch.int32).view(batch, -1)
    return table, torch.randn(count, 2, BLOCK, heads[1], DIM, device="cuda", dtype=torch.bfloat16)


def fa3(heads: tuple[int, int], batch: int, context: int, *, fp8: bool = False) -> Peer:
    """FlashAttention 3 as vLLM calls it, in bf16 or with q, K and V in FP8; its scheduler metadata are the plan."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    table, kv = pages(heads, batch, context)
    q = torch.randn(batch, heads[0], DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    ones = torch.ones(batch, heads[1], device="cuda")
    scales = {f"{name}_descale": ones for name in "qkv"} if fp8 else {}
    if fp8:
        q, kv = q.to(torch.float8_e4m3fn), kv.to(torch.float8_e4m3fn)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)

    def plan() -> torch.Tensor:
        return get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=context, num_heads_q=heads[0], num_heads_kv=heads[1],
            headdim=DIM, cache_seqlens=lengths, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=BLOCK,
            causal=True, num_splits=0,
        )  # fmt: skip

    metadata = plan()

    def attend() -> object:
        return flash_attn_varlen_func(
            q=q, k=kv[:, 0], v=kv[:, 1], out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=context, softmax_scale=DIM**-0.5, causal=True, block_table=table, fa_version=3,
            scheduler_metadata=metadata, **scales,
        )  # fmt: skip

    return Peer(attend, plan)


def flashinfer(heads: tuple[int, int], batch: int, context: int, *, fp8: bool = False) -> Peer:
    """FlashInfer's tensor core decode, whose plan() runs on the host. ValueError if it is to read FP8."""
    if fp8:
        raise ValueError("FlashInfer is measured in bf16 alone; use --beside fa3 with --kv fp8")
    import flashinfer as library

    table, kv = pages(heads, batch, context)
    q = torch.randn(batch, heads[0], DIM, device="cuda", dtype=torch.bfloat16)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * (context // BLOCK)
    last = torch.full((batch,), BLOCK, dtype=torch.int32, device="cuda")

    def plan() -> object:
        return wrapper.plan(
            starts, table.flatten(), last, *heads, DIM, BLOCK, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
        )

    plan()
    return Peer(lambda: wrapper.run(q, kv), plan)


PEERS = {"fa3": fa3, "flashinfer": flashinfer}
