"""The operations on a paged KV pool in GPU memory. The semantics are those of ops.PagedOps; the twin is the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagekernels import checks
from pagekernels.cuda.arrays import DeviceTensor, check_tensor
from pagekernels.cuda.attend import GenericAttention
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.compress import Compression
from pagekernels.cuda.decode import DecodeLayer, TunedDecode, Tuning, can_take
from pagekernels.cuda.decode_shape import MAX_QUERY_TOKENS
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.move import BlockMoves, Entries
from pagekernels.cuda.place import is_aligned
from pagekernels.layout import LAYOUT_SWIZZLED, PagedLayout
from pagekernels.ops import AttentionParams


class CudaOps:
    """Operations on one pool: the slab at this address, or the slabs by number, of `layout`, which is LAYOUT_SWIZZLED.

    `layers` says, by index into layout.layers, how the model attends to them: those that the tuned kernel can take are
    served by it, all others and all other parameters by the generic one. Every method only launches on the device's
    stream: nothing waits, and once each call was made with a batch of its kind nothing is allocated or compiled, so
    that they may be captured into a graph, which is then replayed with other contents of the same batch. Unlike on the
    CPU, lengths, slots and entries are trusted: they are on the device. For the device's thread.
    """

    def __init__(
        self,
        device: CudaDevice,
        slabs: int | Sequence[int],
        layout: PagedLayout,
        layers: Mapping[int, DecodeLayer] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        if layout.version != LAYOUT_SWIZZLED:
            raise ValueError(
                f"layout.version is {layout.version}, but the CUDA kernels read version {LAYOUT_SWIZZLED} only: "
                "attach to a memd on a GPU, or run on the CPU"
            )
        self.device, self.layout = device, layout
        self._slabs = (slabs,) if isinstance(slabs, int) else tuple(slabs)
        self._layers, self._tuning = dict(layers or {}), tuning
        self._moves = BlockMoves(device, self._slabs, layout)
        self._compression = Compression(device, self._slabs, layout)
        self._generic = GenericAttention(device, self._slabs, layout)
        self._tuned: dict[int, TunedDecode | None] = {}

    def plan(self, batch: DeviceBatch) -> None:
        """Launch the planner of the tuned layers: once a step, when the batch is staged and before its first attend."""
        if tuned := self._tuned_for(batch):
            tuned.plan(batch)

    def append(self, layer: int, k: DeviceTensor, v: DeviceTensor, batch: DeviceBatch) -> None:
        """Write k [T, H, D] and v [T, H, Dv] into the batch's slots; T may be fewer than the batch has.

        In the native format or float32; tokens and heads may be strided.
        """
        self._moves.append(layer, k, v, batch)

    def attend(
        self, layer: int, q: DeviceTensor, out: DeviceTensor, batch: DeviceBatch, params: AttentionParams
    ) -> None:
        """Causal attention of q [T, Hq, D] over the batch's tables into out [T, Hq, Dv]; T as in append.

        Rows of no sequence are left as they are. `params` must live as long as this object.
        """
        shape = checks.check_layer(self.layout, layer)
        tokens, heads = q.shape[0], q.shape[1]
        sizes = (4, self.layout.format.itemsize)
        check_tensor("q", q, "[T, Hq, D]", (tokens, heads, shape.head_dim_k), sizes)
        check_tensor("out", out, "[T, Hq, Dv]", (tokens, heads, shape.head_dim_v), (q.element_size(),))
        if heads % shape.num_kv_heads:
            raise ValueError(f"q has Hq = {heads} heads, but must have a multiple of H = {shape.num_kv_heads}")
        tuned = self._tuned_for(batch)
        if tuned and self._is_tuned(layer, q, params) and is_aligned(q) and is_aligned(out):
            tuned.attend(layer, q, out, batch)
        else:
            self._generic.attend(layer, q, out, batch, params)

    def copy_blocks(self, sources: Entries, targets: Entries) -> None:
        """Copy whole blocks, source entry to target entry of the same format (uint32 [N] each, on the host).

        No target may be a source of the same call.
        """
        self._moves.copy_blocks(sources, targets)

    def compress_blocks(self, sources: Entries, targets: Entries, errors: DeviceTensor) -> None:
        """Store sealed blocks of the native format as FP8 blocks, and their errors in float32 [N, 2] on the device.

        What is stored, and what the errors are, says PagedOps. Entries are uint32 [N] on the host; the slab's end is
        not known here, so units are trusted. Raises ValueError on another format, or if targets overlap anything.
        """
        self._compression.compress(sources, targets, errors)

    def decompress_blocks(self, sources: Entries, targets: Entries) -> None:
        """Store FP8 blocks as blocks of the native format; see compress_blocks."""
        self._compression.decompress(sources, targets)

    def load_compression(self) -> None:
        """Compile what compress_blocks and decompress_blocks need, so that neither does when it is called."""
        self._compression.load()

    def gather(
        self, layer: int, batch: DeviceBatch, seq: int, tokens: tuple[int, int], k: DeviceTensor, v: DeviceTensor
    ) -> None:
        """Read tokens [first, last) of the batch's sequence into k [H, last - first, D] and v [H, last - first, Dv].

        In the native format, dequantised where a block is FP8, or in float32. For token-major rows give transposed
        views. The lengths are fixed when a graph is captured.
        """
        table = batch.block_tables.data_ptr() + 4 * seq * batch.blocks
        if not 0 <= seq < batch.sequences or not 0 <= tokens[0] <= tokens[1] <= batch.blocks * self.layout.block_size:
            raise ValueError(f"tokens {tokens} of sequence {seq} are asked for, but {self._room(batch)}")
        self._moves.gather(layer, table, tokens, k, v)

    def close(self) -> None:
        """Give the work space back, when nothing launched is running any more."""
        self._generic.close()
        for tuned in self._tuned.values():
            if tuned:
                tuned.close()
        self._tuned.clear()

    def _room(self, batch: DeviceBatch) -> str:
        return f"the batch has {batch.sequences} sequences of up to {batch.blocks * self.layout.block_size} tokens"

    def _tuned_for(self, batch: DeviceBatch) -> TunedDecode | None:
        """The tuned kernels for batches of this kind, made when first asked for; None if they take no layer."""
        if batch.max_queries > MAX_QUERY_TOKENS:
            return None
        queries = 1 if batch.max_queries == 1 else MAX_QUERY_TOKENS
        if queries not in self._tuned:
            taken = {
                index: layer
                for index, layer in self._layers.items()
                if can_take(self.layout, index, layer.num_q_heads, queries)
            }
            made = TunedDecode(self.device, self.layout, self._slabs, taken, queries, self._tuning) if taken else None
            self._tuned[queries] = made
        return self._tuned[queries]

    def _is_tuned(self, layer: int, q: DeviceTensor, params: AttentionParams) -> bool:
        """Whether the tuned kernel was made for this layer with these very parameters, and can read q's rows."""
        known = self._layers.get(layer)
        if known is None or known.params is not params or q.shape[1] != known.num_q_heads:
            return False
        native = q.element_size() == self.layout.format.itemsize
        return native and can_take(self.layout, layer, known.num_q_heads, 1)
