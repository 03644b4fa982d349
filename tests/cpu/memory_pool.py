"""memd's core in process, as the KvPool of an engine under test, and a model whose KV is the tokens themselves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from inferd.core.history import Extras
from inferd.core.messages import Adjustments, Sampling, Submit
from inferd.core.ports import Capacity, Grant, Lost, PoolEvent, PoolInfo, Refusal, Step, StepInput, Victim
from inferd.logprobs import Scores, score
from inferd.model.recoding import Recoded as Over
from inferd.sampler import Row, sample
from memd.core import operations, values
from memd.core.geometry import Geometry
from memd.core.pool import Pool
from pagekernels.layout import LAYOUT_VERSION, Format, LayerShape, unpack_entry
from pagepool.pool_values import Remap
from pagepool_client.recodes import Recode, Recoded

VOCAB = 211


def make_pool(num_blocks: int, block_size: int = 8, epoch: int = 7) -> Pool:
    pool = Pool(epoch, block_size, slab_bytes=1 << 24, max_num_blocks=num_blocks)
    pool.declare(Geometry((LayerShape(1, 4, 4),), Format.F32, False, LAYOUT_VERSION, bytes(32), "fake"))
    return pool


class MemoryPool:
    """One worker's session with a Pool. Answers come at once, or after `deliver` while `held`.

    News goes to all sessions of the pool, whichever asks.
    """

    _of_pool: ClassVar[WeakKeyDictionary[Pool, dict[int, MemoryPool]]] = WeakKeyDictionary()

    def __init__(self, pool: Pool, signal: threading.Event, *, takes_remaps: bool = False) -> None:
        self.pool, self.signal = pool, signal
        self._lock, self._takes_remaps = f"lock-{pool.num_leases}", takes_remaps
        self.lease_id = pool.attach("worker", self._lock, 1e9, 0.0).lease.lease_id
        if takes_remaps:
            pool.remaps.listen(self.lease_id, 0.0)
        self.held = self.fenced = False
        self._num_answered = 0
        self.steps: list[Step] = []
        self.on_step: Callable[[Step], None] = lambda step: None
        self.on_answer: Callable[[], None] = lambda: None
        self.grants: dict[int, Grant] = {}
        self._late: deque[PoolEvent] = deque()
        self._events: deque[PoolEvent] = deque()
        self.recodes: deque[Recode] = deque()
        self.recodings: list[Recoded] = []
        self._of_pool.setdefault(pool, {})[self.lease_id] = self

    @property
    def info(self) -> PoolInfo:
        pool = self.pool
        return PoolInfo(pool.epoch, self.lease_id, pool.block_size, pool.num_blocks, pool.unit_bytes)

    def submit(self, step: Step) -> None:
        self.steps.append(step)
        self.on_step(step)
        self._answer(len(self.steps))
        if not self.held:
            self.deliver()

    def _answer(self, step_id: int) -> None:
        answer = self.pool.step(self.lease_id, _core_step(step_id, self.steps[step_id - 1]), 0.0)
        self.on_answer()
        for each in answer.grants:
            run = each.blocks
            ids, entries, source = run.block_ids, run.entries, each.copy_source
            grant = Grant(each.ref, each.table_id, each.cached_tokens, ids, entries, each.num_tables, source)
            self.grants[grant.table_id] = grant
            self._late.append(grant)
        for no in answer.refusals:
            never = no.reason is values.RefusalReason.REQUEST_TOO_LARGE
            pending = no.reason is values.RefusalReason.PREFIX_PENDING
            blocks = no.pinned_blocks, no.held_blocks
            self._late.append(Refusal(no.ref, never, no.available_blocks, no.total_blocks, pending, *blocks))
        self._late += [Remap(*astuple(news)) for news in self.pool.remaps.take_news(self.lease_id)]

    def deliver(self) -> None:
        """Let the answers through."""
        self._events += self._late
        self._late.clear()
        self._num_answered = len(self.steps)
        self.signal.set()

    def break_stream(self) -> None:
        """Answers that are held go down with it."""
        self.pool.stream_broken(self.lease_id)
        self._late.clear()

    def reclaim(self) -> None:
        """A new stream takes the lease back, hears what there is, and repeats the steps that were not answered."""
        pool = self.pool
        assert pool.attach("worker", self._lock, 1e9, 0.0, (pool.epoch, self.lease_id)).reclaimed
        if self._takes_remaps:
            pool.remaps.listen(self.lease_id, 0.0)
        self._hear_news()
        for step_id in range(self._num_answered + 1, len(self.steps) + 1):
            self._answer(step_id)
            self.deliver()
            self._hear_news()

    def say(self, event: PoolEvent) -> None:
        self._events.append(event)
        self.signal.set()

    def recode(self, *recodes: Recode) -> None:
        """memd wants blocks to be stored in another format; its core has no part in it here."""
        self.recodes += recodes
        self.signal.set()

    def take_recodes(self) -> list[Recode]:
        told = list(self.recodes)
        self.recodes.clear()
        return told

    def answer_recode(self, sequence: int, errors: Sequence[float], *, failed: bool) -> None:
        self.recodings.append(Recoded(sequence, tuple(errors), failed))

    def _hear_news(self) -> None:
        news: list[tuple[int, PoolEvent]] = [(lease, Victim(table)) for lease, table in self.pool.victims.take_news()]
        news += [(lease, Capacity(blocks)) for lease, blocks in self.pool.waiting.take_news()]
        for lease, event in news:
            if (session := self._of_pool[self.pool].get(lease)) is not None:
                session.say(event)

    def poll(self) -> list[PoolEvent]:
        self._hear_news()
        events = list(self._events)
        self._events.clear()
        return events

    def wait(self, timeout_s: float) -> bool:
        return bool(self._events) or self.signal.wait(timeout_s)

    def lose(self) -> None:
        self.say(Lost("memd is gone"))


def _core_step(step_id: int, step: Step) -> values.Step:
    return values.Step(
        step_id,
        [values.Commit(each.table_id, each.token_ids) for each in step.commits],
        step.releases,
        [
            values.TableRequest(
                each.token_ids,
                each.num_blocks,
                each.salt,
                each.priority,
                each.no_match,
                each.ref,
                arrival=each.arrival,
                headroom=each.headroom,
                resume_table_id=each.resume_table_id,
                partial=each.partial,
                wait_for_prefix=each.wait_for_prefix,
                num_yields=each.num_yields,
            )
            for each in step.creates
        ],
        [values.ExtendRequest(each.table_id, each.num_blocks, each.ref) for each in step.extends],
        step.operations,
        step.frees,
        [
            operations.ReserveRequest(each.num_blocks, each.num_tables, each.ref, each.for_table_id)
            for each in step.reserves
        ],
        step.acknowledged,
    )


@dataclass(frozen=True)
class Computed:
    """A Pending that is over."""

    sampled: list[int]
    forward_s: float
    scored: Scores | None = None

    def tokens(self) -> list[int]:
        return self.sampled

    def scores(self) -> Scores | None:
        return self.scored


class TokenModel:
    """Stores each token as its own KV and computes logits from what it reads back through the block table.

    So a wrong slot, table, position or match changes the tokens, or is found right here.
    """

    depth = 1

    def __init__(self, pool: Pool) -> None:
        self._block_size = pool.block_size
        self._kv = np.full(4 * pool.num_blocks * pool.block_size, -1)
        self.steps: list[StepInput] = []
        self.fail_next: Exception | None = None
        self.poison_request_with: int | None = None  # a sequence whose context begins with it gets NaN logits

    def launch(self, step: StepInput, rows: Sequence[Row]) -> Computed:
        logits = self.forward(step)
        tokens = sample(logits[: len(rows)], rows)
        return Computed(tokens, 1e-4, score(logits, step.targets, rows, tokens))

    def recode(self, sources: Sequence[int], targets: Sequence[int]) -> Over:
        """What a block holds is in the target too; the error of each is its source, and that plus 0.5."""
        size = self._block_size
        for source, target in zip(sources, targets, strict=True):
            unit, other = (unpack_entry(entry)[2] for entry in (source, target))
            assert min(self._kv[unit * size : (unit + 1) * size]) >= 0, "a block is recoded that was never written"
            self._kv[other * size : (other + 1) * size] = self._kv[unit * size : (unit + 1) * size]
        native = [source for source in sources if unpack_entry(source)[0] is not Format.FP8_E4M3]
        return Over([error for source in native for error in (source, source + 0.5)])

    def holds(self, table: Sequence[int], first: int, tokens: Sequence[int]) -> bool:
        """Whether the KV of these tokens has been written to the table's positions from `first` on."""
        return [self._kv[self._slot(table, position)] for position in range(first, first + len(tokens))] == list(tokens)

    def forward(self, step: StepInput) -> torch.Tensor:
        self.steps.append(step)
        error, self.fail_next = self.fail_next, None
        size = self._block_size
        for copy in step.copies:
            source, target = (unpack_entry(entry)[2] * size for entry in (copy.source, copy.target))
            self._kv[target : target + size] = self._kv[source : source + size]
        for slot, token in zip(step.slots, step.token_ids, strict=True):
            if slot >= 0:
                self._kv[slot] = 0 if error else token
        if error:
            raise error
        rows: dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]] = {}
        wanted = [*step.logit_rows, *(target.row for target in step.targets)]
        first = 0
        for q_len, kv_len, table in zip(step.q_lens, step.kv_lens, step.tables, strict=True):
            assert list(step.positions[first : first + q_len]) == list(range(kv_len - q_len, kv_len))
            context = [int(self._kv[self._slot(table, position)]) for position in range(kv_len)]
            assert min(context) >= 0, "KV is read that was never written"
            assert context[kv_len - q_len :] == list(step.token_ids[first : first + q_len])
            for row in set(wanted) & set(range(first, first + q_len)):
                logits = logits_after(context[: kv_len - q_len + row - first + 1])
                rows[row] = logits * np.nan if context[0] == self.poison_request_with else logits
            first += q_len
        return torch.from_numpy(np.stack([rows[row] for row in wanted])) if wanted else torch.empty(0, VOCAB)

    def _slot(self, table: Sequence[int], position: int) -> int:
        _, _, unit = unpack_entry(table[position // self._block_size])
        return unit * self._block_size + position % self._block_size


def logits_after(context: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The logits of the fake model after a context; any token of it changes them all."""
    return (3 * np.random.default_rng(context).standard_normal(VOCAB)).astype(np.float32)


def continuation(prompt: list[int], count: int, sampling: Sampling, how: Adjustments | None = None) -> list[int]:
    """What a correct engine generates, computed alone and without any pool; counts what penalties depend on anew."""
    tokens = list(prompt)
    for _ in range(count):
        logits = torch.from_numpy(logits_after(tokens)[None])
        extras = Extras.of(Submit(0, prompt, count, adjustments=how))
        for token in tokens[len(prompt) :] if extras and extras.history else ():
            extras.history.add(token)
        tokens += sample(logits, [Row(sampling, len(tokens), extras)])
    return tokens[len(prompt) :]
