"""Pools on the GPU with everything unused poisoned, and the attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout, swizzle
from pagekernels.ops import AttentionParams

ABSURD = 0xFFFFFFFF
DTYPES = {Format.BF16: torch.bfloat16, Format.F16: torch.float16}


@dataclass(frozen=True)
class Case:
    """Sequences of (kv_len, q_len), and the shapes of one model."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 128
    block_size: int = 16
    heads: int = 8
    group: int = 4
    native: Format = Format.BF16
    fp8: float = 0.0
    exponents: tuple[int, int] = (0, 0)  # of V: each block's values are about 2 to the power of one from here to there
    params: AttentionParams = field(default_factory=lambda: AttentionParams(0.0))

    @property
    def layout(self) -> PagedLayout:
        """Three layers, so that offsets matter."""
        shape = LayerShape(self.heads, self.head_dim, self.head_dim)
        return PagedLayout(self.block_size, (shape,) * 3, self.native, LAYOUT_SWIZZLED)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.params.scale or self.head_dim**-0.5


@dataclass
class Pool:
    """What a case became: the slab, the step's buffers, and the values that were stored."""

    case: Case
    slab: torch.Tensor
    step: SimpleNamespace
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    q: torch.Tensor


def row_offsets(case: Case, layer: int, kv_len: int, row_bytes: int, values: bool) -> torch.Tensor:
    """int64 [H, kv_len, D]: elements from a block's start to each stored element of its token."""
    size, dim = case.block_size, case.head_dim
    token = torch.arange(kv_len) % size
    flips = torch.tensor([swizzle(row, row_bytes) for row in range(size)])[token]
    per_chunk = 16 * dim // row_bytes
    d = torch.arange(dim)
    within = ((d // per_chunk) ^ flips[:, None]) * per_chunk + d % per_chunk
    head = torch.arange(case.heads)[:, None, None] * (2 * size * dim) + (size * dim if values else 0)
    return case.layout.layer_offsets[layer] + head + (token * dim)[:, None] + within


def store(
    case: Case,
    slab: torch.Tensor,
    layer: int,
    blocks: tuple[torch.Tensor, torch.Tensor],
    *,
    x: torch.Tensor,
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write x [H, kv_len, D] into blocks (units int64, is_fp8 bool); returns what the blocks then mean, float64.

    `sizes`: x are values, and of this magnitude in each block; None: they are keys.
    """
    values = sizes is not None
    units, is_fp8 = blocks
    layout, kv_len = case.layout, x.shape[1]
    token_unit = units.repeat_interleave(case.block_size)[:kv_len]
    token_fp8 = is_fp8.repeat_interleave(case.block_size)[:kv_len]
    native = x.to(DTYPES[case.native])
    index = row_offsets(case, layer, kv_len, 2 * case.head_dim, values) + (token_unit * layout.unit_bytes // 2)[:, None]
    keep = ~token_fp8
    slab.view(torch.int16)[index[:, keep].cuda()] = native[:, keep].view(torch.int16).cuda()
    result = native.double()
    if is_fp8.any():
        scales = torch.rand(case.heads, len(units)) * 0.02 + 0.004
        scales *= 1.0 if sizes is None else sizes
        token_scale = scales.repeat_interleave(case.block_size, 1)[:, :kv_len, None]
        stored = (x / token_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        at = row_offsets(case, layer, kv_len, case.head_dim, values) + (token_unit * layout.unit_bytes)[:, None]
        slab[at[:, token_fp8].cuda()] = stored[:, token_fp8].view(torch.uint8).cuda()
        places = layout.block_elements + 4 * (2 * case.heads * layer + 2 * torch.arange(case.heads) + values)
        for b in torch.nonzero(is_fp8).flatten().tolist():
            at = (int(units[b]) * layout.unit_bytes + places) // 4
            slab.view(torch.float32)[at.cuda()] = scales[:, b].cuda()
        result = torch.where(token_fp8[:, None], stored.double() * token_scale.double(), result)
    return result


def build(case: Case, layer: int = 1, seed: int = 0, spare: int = 3) -> Pool:
    """A pool with random content for one layer; everything else is NaN, table tails are absurd."""
    torch.manual_seed(seed)
    layout, size = case.layout, case.block_size
    columns = max(-(-kv_len // size) for kv_len, _ in case.sequences) + spare
    blocks = sum(-(-kv_len // size) for kv_len, _ in case.sequences)
    slab = torch.full(((blocks + 5) * layout.block_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    pairs, used = torch.randperm(blocks + 5), 0
    tables = torch.full((len(case.sequences), columns), ABSURD, dtype=torch.int64)
    keys, values = [], []
    for s, (kv_len, _) in enumerate(case.sequences):
        count = -(-kv_len // size)
        is_fp8 = torch.rand(count) < case.fp8
        if kv_len % size:
            is_fp8[-1:] = False
        units = pairs[used : used + count] * 2 + torch.where(is_fp8, torch.randint(0, 2, (count,)), 0)
        used += count
        formats = torch.where(is_fp8, int(Format.FP8_E4M3), int(case.native))
        tables[s, :count] = formats << 29 | units
        k, v = torch.randn(2, case.heads, kv_len, case.head_dim)
        sizes = 2.0 ** torch.randint(case.exponents[0], case.exponents[1] + 1, (count,))
        v *= sizes.repeat_interleave(size)[:kv_len, None]
        keys.append(store(case, slab, layer, (units, is_fp8), x=k))
        values.append(store(case, slab, layer, (units, is_fp8), x=v, sizes=sizes))
    q_lens = torch.tensor([q_len for _, q_len in case.sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)])
    step = SimpleNamespace(
        cu_q_lens=starts.to(torch.int32).cuda(),
        kv_lens=torch.tensor([kv_len for kv_len, _ in case.sequences], dtype=torch.int32).cuda(),
        block_tables=tables.to(torch.uint32).cuda(),
    )
    # Heads at an odd multiple of 8 elements: the query is a slice of something wider.
    wide = torch.randn(int(starts[-1]) + 2, case.heads * case.group, case.head_dim + 8).to(DTYPES[case.native]).cuda()
    return Pool(case, slab, step, keys, values, wide[:, :, : case.head_dim])


def oracle(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D], lse [T, Hq]) in float64; rows of no sequence are NaN."""
    case, params = pool.case, pool.case.params
    out = torch.full(pool.q.shape, torch.nan, dtype=torch.float64, device="cuda")
    lse = torch.full(pool.q.shape[:2], torch.nan, dtype=torch.float64, device="cuda")
    starts = pool.step.cu_q_lens.tolist()
    for s, (kv_len, q_len) in enumerate(case.sequences):
        if not kv_len or not q_len:
            continue
        q = pool.q[starts[s] : starts[s + 1]].double().view(q_len, case.heads, case.group, -1)
        scores = case.scale * torch.einsum("qhgd,hkd->hgqk", q, pool.k[s].cuda())
        if params.softcap:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        position = torch.arange(kv_len - q_len, kv_len, device="cuda")[:, None]
        token = torch.arange(kv_len, device="cuda")
        seen = token <= position
        if params.window:
            seen &= token > position - params.window
        if params.chunk:
            seen &= token // params.chunk == position // params.chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        if params.sinks is not None:
            sinks = torch.from_numpy(params.sinks).double().cuda().view(case.heads, case.group, 1, 1)
            scores = torch.cat([scores, sinks.expand(-1, -1, q_len, -1)], -1)
        lse[starts[s] : starts[s + 1]] = scores.logsumexp(-1).permute(2, 0, 1).reshape(q_len, -1)
        weights = scores.softmax(-1)[..., :kv_len]
        result = torch.einsum("hgqk,hkd->qhgd", weights, pool.v[s].cuda())
        out[starts[s] : starts[s + 1]] = result.reshape(q_len, -1, case.head_dim)
    return out, lse
