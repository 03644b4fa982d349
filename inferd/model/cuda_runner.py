"""Runs a model on a GPU over the blocks of one pool, with two steps in flight.

Small steps (decodes, suffixes after a prefix hit, a few of both) are padded up to one that was captured as a CUDA
graph: ids resolved, attention planned, forward, sampling. Larger ones, chunks of prefill, are launched one kernel after
the other. Either way the host only stages inputs, launches, and later waits for an event behind the copy of the tokens.
What rows ask of their logits beside a token is launched behind the step (`cuda_logits`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import structlog
import torch

from inferd.core.limits import SCORED_ROWS
from inferd.core.ports import StepInput
from inferd.model.cuda_attention import CUDA_ATTENTION_NAME, LongSteps, ShortSteps, StepAttention
from inferd.model.cuda_graphs import DECODE_SIZES, MIN_ROWS, MIXED_SIZES, CompiledForward, Graphs, ladder
from inferd.model.cuda_logits import LogitsWork, rows_at_once
from inferd.model.cuda_recoding import LaunchedRecoding, launch_recoding
from inferd.model.cuda_steps import Room, StepBuffers, chunks_of, short_first, shorts_of
from inferd.model.cuda_tokens import DEPTH, Launched, TokenRing, device_errors
from inferd.model.load import ServedModel
from inferd.model.recoding import copy_blocks
from inferd.sampler import Row
from pagekernels.cuda.decode import DecodeLayer
from pagekernels.cuda.decode_shape import MAX_QUERY_TOKENS, Tuning
from pagekernels.cuda.device import CudaDevice
from pagekernels.cuda.ops import CudaOps
from pagekernels.cuda.sampling import GpuSampler
from pagekernels.layout import PagedLayout

log = structlog.get_logger(__name__)

MAX_CAPTURED_TOKENS = 256
"""Mixed steps of more tokens are bound by arithmetic, not by launches."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest step, the longest sequence in tokens, the pool's blocks, and whether small steps are captured."""

    max_batch_tokens: int
    max_num_seqs: int
    max_context: int
    num_blocks: int
    graphs: bool = True

    def blocks(self, block_size: int) -> int:
        """Blocks of the longest table."""
        return max(1, min(-(-self.max_context // block_size), self.num_blocks))


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The pool's slabs as this process has them mapped, by number, and whether there may be FP8 blocks in it."""

    addresses: Sequence[int]
    layout: PagedLayout
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class Rung:
    """A captured step of one size, and where its logits are behind a replay."""

    buffers: StepBuffers
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def holds(self, need: Room) -> bool:
        """Whether a step of this size can be padded up to this one."""
        room = self.buffers.room
        enough = need.sequences <= room.sequences and need.tokens <= room.tokens and need.rows <= room.rows
        return enough and need.blocks <= room.blocks and need.max_queries <= room.max_queries


class CudaRunner:
    """A served model on `device`, bound to a pool. For the device's thread.

    The model must lie on the device. `forward` is its compiled forward (`compiled`), made once: a later runner of the
    same model, after memd came back, only captures again.
    """

    depth = DEPTH

    def __init__(
        self,
        served: ServedModel,
        forward: CompiledForward,
        device: CudaDevice,
        pool: DevicePool,
        limits: RunnerLimits,
    ) -> None:
        self._forward, self._device, self._limits = forward, device, limits
        self._uses = tuple(served.geometry.layers.values())
        where = served.model.device
        self._sinks = [
            None if u.params.sinks is None else torch.tensor(u.params.sinks, device=where) for u in self._uses
        ]
        self._stream = torch.cuda.ExternalStream(device.stream_handle, device=device.index)  # type: ignore[no-untyped-call]
        self._ops = CudaOps(device, pool.addresses, pool.layout, decode_layers(served), Tuning(mixed=pool.fp8))
        self._fp8 = pool.fp8
        self._blocks = limits.blocks(pool.layout.block_size)
        rows = ladder(DECODE_SIZES, limits.max_num_seqs)[-1]  # a captured step may have more than sequences may run
        with torch.cuda.stream(self._stream):
            self._tokens = torch.zeros(rows, dtype=torch.int32, device=served.model.device)
        self._ring = TokenRing(device, rows)
        self._sampler: GpuSampler | None = None
        self._work: LogitsWork | None = None
        self._graphs = Graphs(self._stream)
        self._rungs: list[Rung] = []
        most = limits.max_batch_tokens
        self._long = self._buffers(limits.max_num_seqs, max(most, MIN_ROWS), most)
        self._short = self._buffers(limits.max_num_seqs, max(most, MIN_ROWS), MAX_QUERY_TOKENS)

    def launch(self, step: StepInput, rows: Sequence[Row]) -> Launched:
        """See inferd.surroundings.Model."""
        with device_errors(), torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                return self._launch(step, rows)
            except Exception:
                self._stream.synchronize()  # what was launched of it still writes to blocks that are given back next
                raise

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> LaunchedRecoding:
        """See inferd.surroundings.Model."""
        with device_errors(), torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                return launch_recoding(self._device, self._ops, self._tokens.device, sources, targets)
            except Exception:
                self._stream.synchronize()  # the targets are given to somebody else next
                raise

    def capture(self, tell: Callable[[str], None]) -> None:
        """Compile the forward and capture the steps of all sizes; from then on neither happens any more."""
        began = time.perf_counter()
        tell("compiling the model for the GPU (some ten seconds the first time)")
        if self._fp8:
            self._ops.load_compression()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            attention = ShortSteps(self._ops, self._uses, self._short.batch)
            logits = self._run(self._short, attention, MIN_ROWS)
            self._work = self._logits_work(logits.shape[1])
            logits = self._run(self._short, attention, MIN_ROWS, targets=True)
            self._work.warm_up(logits, self._limits.max_num_seqs, SCORED_ROWS)
            self._stream.synchronize()
            tell(f"ready to capture after {time.perf_counter() - began:.1f} s")
            if self._limits.graphs:
                self._capture_all()
            self._stream.synchronize()
        tell(f"captured {len(self._rungs)} sizes; {time.perf_counter() - began:.1f} s in all")

    def close(self) -> None:
        """Drop everything that knows the pool's address. Waits for the GPU first. Again does nothing."""
        self._device.synchronize()
        self._rungs.clear()
        self._graphs.drop()
        self._ops.close()
        for each in (self._sampler, self._work):
            if each is not None:
                each.close()
        self._sampler = self._work = None

    def _rooms(self) -> list[Room]:
        """The sizes to capture, in the order in which a step is tried on them."""
        limits = self._limits
        decodes = [Room(size, size, size, self._blocks, 1) for size in ladder(DECODE_SIZES, limits.max_num_seqs)]
        most = min(MAX_CAPTURED_TOKENS, limits.max_batch_tokens)
        mixed = [
            Room(min(size, limits.max_num_seqs), size, max(MIN_ROWS, min(size, limits.max_num_seqs)), self._blocks, 64)
            for size in ladder(MIXED_SIZES, most)
        ]
        return decodes + mixed

    def _capture_all(self) -> None:
        """A model that does what no graph can hold (experts that are chosen on the host) runs without graphs."""
        try:
            for room in self._rooms():
                self._capture(room)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            log.warning("steps of this model cannot be captured, so they are launched kernel by kernel", why=why)
            self._rungs.clear()
            self._graphs.drop()

    def _capture(self, room: Room) -> None:
        buffers = StepBuffers(self._device, room)
        attention = ShortSteps(self._ops, self._uses, buffers.batch)
        buffers.stage(NOTHING, [])
        graph, logits = self._graphs.capture(lambda: self._run(buffers, attention, room.tokens))
        self._rungs.append(Rung(buffers, graph, logits))

    def _launch(self, step: StepInput, rows: Sequence[Row]) -> Launched:
        slot = self._ring.begin()
        if step.copies:
            copy_blocks(self._ops, step.copies)
        need = room_for(step)
        rungs = () if step.targets else self._rungs  # which have no rows for targets
        if rung := next((rung for rung in rungs if rung.holds(need)), None):
            rung.buffers.stage(step, rows)
            rung.graph.replay()
            logits = rung.logits
        else:
            logits = self._launch_uncaptured(step, rows)
        asked = None
        if step.targets or any(map(_EXTRAS, rows)):
            assert self._work is not None
            asked = self._work.launch(logits, rows, step.targets)
        return slot.end(self._tokens.data_ptr(), len(rows), asked)

    def _launch_uncaptured(self, step: StepInput, rows: Sequence[Row]) -> torch.Tensor:
        used, targets = max(MIN_ROWS, len(step.token_ids)), bool(step.targets)
        if max(step.q_lens) <= MAX_QUERY_TOKENS:
            self._short.stage(step, rows)
            attention = ShortSteps(self._ops, self._uses, self._short.batch)
            return self._run(self._short, attention, used, targets=targets)
        step = short_first(step, MAX_QUERY_TOKENS)
        chunks = chunks_of(step, MAX_QUERY_TOKENS)
        short = None
        if shorts := chunks[0].index:
            self._short.stage(shorts_of(step, shorts), [])
            self._ops.plan(self._short.batch)
            short = self._short.batch
        self._long.stage(step, rows)
        long = LongSteps(self._ops, self._uses, self._sinks, self._long.batch, short, chunks)
        return self._run(self._long, long, used, targets=targets)

    def _run(
        self, buffers: StepBuffers, attention: StepAttention, tokens: int, *, targets: bool = False
    ) -> torch.Tensor:
        """What a captured step consists of; its logits, of room.rows rows and those of targets behind."""
        sampler, address = self._sampler, self._tokens.data_ptr()
        ids, positions = buffers.ids[:tokens][None], buffers.positions[:tokens][None]
        if sampler is not None:
            sampler.resolve_ids(ids.data_ptr(), 8, tokens, address)
        self._ops.plan(buffers.batch)
        num_rows = buffers.room.rows
        wanted = buffers.logit_rows if targets else buffers.logit_rows[:num_rows]
        logits = self._forward(ids, positions, wanted, attention)
        if sampler is None:
            dtype = str(logits.dtype).removeprefix("torch.")
            sampler = self._sampler = GpuSampler(self._device, self._tokens.numel(), logits.shape[-1], dtype)
        sampler.sample(logits[:num_rows], buffers.records, address)
        return logits

    def _logits_work(self, vocab: int) -> LogitsWork:
        sampler = GpuSampler(self._device, min(rows_at_once(vocab), self._limits.max_num_seqs), vocab, "float32")
        return LogitsWork(sampler, self._tokens, vocab, self._short.room.rows)

    def _buffers(self, sequences: int, tokens: int, max_queries: int) -> StepBuffers:
        rows = max(MIN_ROWS, sequences)
        room = Room(sequences, tokens, rows, self._blocks, max_queries)
        buffers = StepBuffers(self._device, room, SCORED_ROWS)
        buffers.stage(NOTHING, [])
        return buffers


_EXTRAS = attrgetter("extras")
NOTHING = StepInput([], [], [], [], [], [], [])


def decode_layers(served: ServedModel) -> dict[int, DecodeLayer]:
    """How the model attends to each of the pool's layers; of layers that share KV, the first."""
    found: dict[int, DecodeLayer] = {}
    for use in served.geometry.layers.values():
        found.setdefault(use.store, DecodeLayer(use.num_q_heads, use.params))
    return found


def compiled(served: ServedModel, *, compile_: bool) -> CompiledForward:
    """The model's forward on the GPU. From now on its attention is a CudaRunner's."""
    served.model.set_attn_implementation(CUDA_ATTENTION_NAME)
    return CompiledForward(served.model, compile_=compile_)


def room_for(step: StepInput) -> Room:
    """The sizes that a step needs."""
    blocks = max(map(len, step.tables))
    return Room(len(step.q_lens), len(step.token_ids), len(step.logit_rows), blocks, max(step.q_lens))
