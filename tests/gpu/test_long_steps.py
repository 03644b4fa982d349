"""Long chunks of prefill in bfloat16: flash attention over the chunk and what it sees of the prefix, with an oracle."""

from __future__ import annotations

import pytest
import torch

from inferd.model.attention import AttentionLayer
from inferd.model.cuda_attention import Chunk, LongSteps, dense
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.ops import CudaOps
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import AttentionParams

HEADS, GROUP, BLOCK = 2, 3, 16


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """In float64; queries are the last of the keys."""
    q, k, v = (x.double() for x in (q, k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
    position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    hidden = key > position
    if params.window:
        hidden |= key <= position - params.window
    scores.masked_fill_(hidden, -torch.inf)
    if params.sinks is not None:
        sinks = torch.tensor(params.sinks, device=q.device, dtype=torch.float64)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(k)], v)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [0, 50, 100, 1000])
@pytest.mark.parametrize("prefix", [0, 37, 160])
def test_a_chunk_after_a_prefix(device: CudaDevice, prefix: int, window: int, dim: int, *, sinks: bool) -> None:
    """The prefix is written by one step, the chunk of 90 tokens attends in the next; the rest of the pool is NaN."""
    generator = torch.Generator("cuda").manual_seed(prefix + window)
    stream = torch.cuda.ExternalStream(device.stream_handle)
    with torch.inference_mode(), torch.cuda.stream(stream):

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

        layout = PagedLayout(BLOCK, (LayerShape(HEADS, dim, dim),), Format.BF16, LAYOUT_SWIZZLED)
        slab = torch.full((40 * layout.block_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        logits = draw(HEADS * GROUP).float() * 3
        params = AttentionParams(dim**-0.5, window, sinks=logits.cpu().numpy() if sinks else None)
        use = AttentionLayer(0, True, params, HEADS * GROUP)
        ops = CudaOps(device, slab.data_ptr(), layout)
        count = prefix + 90
        table = [pack_entry(Format.BF16, 0, 2 * (39 - block)) for block in range(-(-count // BLOCK))]
        q, k, v = draw(count, HEADS * GROUP, dim), draw(count, HEADS, dim), draw(count, HEADS, dim)
        assert dense(use, q, v)
        out = torch.full_like(q, torch.nan)
        for first, last in [(0, prefix), (prefix, count)] if prefix else [(0, count)]:
            batch = DeviceBatch(device, 1, 256, 40)
            batch.stage([last - first], [last], [table], slot_mapping(table, first, last, BLOCK))
            steps = LongSteps(ops, [use], [logits if sinks else None], batch, None, [Chunk(0, 0, last - first, last)])
            steps.attend(0, q[first:last], k[first:last], v[first:last], out[first:last])
        torch.testing.assert_close(out[prefix:].double(), oracle(q[prefix:], k, v, params), rtol=0.02, atol=0.02)
        stream.synchronize()
        ops.close()
