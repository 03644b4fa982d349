"""An engine over memd's core in process, turned by hand on a clock that only goes on when it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from inferd.core.limits import Limits
from inferd.core.messages import (
    EngineState,
    Failed,
    Finished,
    PromptLogprobs,
    Sampling,
    ScoredTokens,
    Submit,
    TokenLogprobs,
    Tokens,
)
from inferd.core.ngram import NgramIndex
from inferd.core.ports import Step
from inferd.core.speculation import MakeProposer
from inferd.engine import Engine
from inferd.surroundings import Attachment, Mailbox, Surroundings
from memd.core.pool import Pool
from pagekernels.layout import unpack_entry
from pagepool.errors import PagepoolError
from pagepool.pool_values import Release, Suspend
from tests.cpu.deferred import Deferred
from tests.cpu.memory_pool import MemoryPool, TokenModel, make_pool

EOS = 210


class Rig:
    """`session`, `device`, `model` and `pool` are those of the present attachment; the device runs the model late.

    `bind` makes a model over a pool.
    """

    depth = 1

    def __init__(
        self,
        num_blocks: int = 64,
        limits: Limits | None = None,
        pool: Pool | None = None,
        bind: Callable[[Pool], Any] = TokenModel,
        make_proposer: MakeProposer = NgramIndex,
    ) -> None:
        self.pool = pool or make_pool(num_blocks)
        self._bind = bind
        self.sent: list[Any] = []
        self.now = 0.0
        self.refusals: list[PagepoolError] = []
        self.warm_up_errors: list[PagepoolError] = []
        self.closed: list[MemoryPool] = []
        self.warmed_up = 0
        self.on_send: Callable[[Any], None] = lambda message: None
        self.mailbox = Mailbox()
        surroundings = Surroundings(self._attach, self._send, self.mailbox, self._clock, make_proposer)
        self.engine = Engine(surroundings, limits or Limits(), [EOS])

    def _clock(self) -> float:
        self.now += 1e-4
        return self.now

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.on_send(message)

    def _attach(self) -> Attachment:
        if self.refusals:
            raise self.refusals.pop(0)
        self.session, self.model = MemoryPool(self.pool, self.mailbox.signal, takes_remaps=True), self._bind(self.pool)
        # One that has steps in flight itself keeps account of them as Deferred does.
        self.device = Deferred(self.model, self.depth) if self.model.depth == 1 else self.model
        self.session.on_step, self.session.on_answer = self._check_step, self._check_held
        return Attachment(self.session, self.device, self._closer(self.session), self._warm_up, recodes=self.session)

    def _check_step(self, step: Step) -> None:
        """What memd hears is true: KV that is committed has been written, no device writes to what is given back."""
        for commit in step.commits:
            table = self.pool.table(commit.table_id, 0.0)
            first, entries = table.num_tokens, table.blocks.entries
            assert not isinstance(self.model, TokenModel) or self.model.holds(entries, first, commit.token_ids)
        dropped = {
            entry
            for operation in step.operations
            if isinstance(operation, Release | Suspend)
            for entry in self._own_entries(operation.table_id)
        }
        flying = {entry for each in self.device.in_flight for table in each.step.tables for entry in table}
        assert not dropped & flying, "blocks are given back under a step in flight"

    def _check_held(self) -> None:
        """What steps in flight read, copy and write is this worker's for memd, whoever else lets go of it."""
        state, steps = self.session.pool._state, [each.step for each in self.device.in_flight]
        lease, layout, holders = state.leases[self.session.lease_id], state.layout, state.cut_store().blocks.holders
        assert layout

        def is_held(entry: int) -> bool:
            held_by = holders[unpack_entry(entry)[2] // layout.units_per_block]
            return any(holder == lease.lease_id or holder in lease.tables for holder in held_by)

        copied = {entry for step in steps for copy in step.copies for entry in (copy.source, copy.target)}
        assert all(map(is_held, copied)), "a block is given away under a copy in flight"
        tables = [each for step in steps for each in zip(step.tables, step.kv_lens, strict=True)]
        read = {entry for entries, length in tables for entry in entries[: -(-length // state.block_size)]}
        assert all(map(is_held, read)), "a block is given away under a step in flight that reads it"

    def _own_entries(self, table_id: int) -> list[int]:
        """Of the blocks that only this table has; none if memd does not know the table yet."""
        with contextlib.suppress(PagepoolError):
            table = self.pool.table(table_id, 0.0)
            views = [self.pool.block(block_id, 0.0) for block_id in table.blocks.block_ids]
            return [view.entry for view in views if view.ref_count == 1 and not view.sealed]
        return []

    def _closer(self, session: MemoryPool) -> Callable[[], None]:
        device = self.device

        def close() -> None:
            assert not device.in_flight, "the pool's memory is given up under a running step"
            assert not getattr(device, "recoding", ()), "the pool's memory is given up under a recoding"
            self.closed.append(session)
            if session.pool is self.pool:
                session.pool.detach(session.lease_id, 0.0)

        return close

    def _warm_up(self) -> None:
        self.warmed_up += 1
        if self.warm_up_errors:
            raise self.warm_up_errors.pop(0)

    def submit(self, request: int, prompt: list[int], most: int = 8, **options: Any) -> None:
        options.setdefault("sampling", Sampling(temperature=0))
        options.setdefault("ignore_eos", True)
        self.mailbox.post(Submit(request, prompt, most, **options))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.turn()

    def settle(self, most: int = 2000) -> None:
        """Turn until there is nothing left to do."""
        for _ in range(most):
            rest_s = self.engine.turn()
            if rest_s is None or (rest_s > 0 and not self.mailbox.signal.is_set()):
                return
            if rest_s > 0:
                self.mailbox.signal.clear()
        raise AssertionError(f"still busy after {most} turns")

    def generated(self, request: int) -> list[int]:
        """Its tokens, which all come as one kind of message."""
        plain = [
            token
            for message in self.sent
            if isinstance(message, Tokens)
            for owner, tokens in message.items
            if owner == request
            for token in tokens
        ]
        scored = [each.token_id for each in self.scored(request)]
        assert not plain or not scored
        return plain or scored

    def scored(self, request: int) -> list[TokenLogprobs]:
        return [
            each
            for message in self.sent
            if isinstance(message, ScoredTokens)
            for owner, logprobs in message.items
            if owner == request
            for each in logprobs
        ]

    def prompt_scored(self, request: int) -> list[TokenLogprobs]:
        """The logprobs of its prompt, which come in order, without a gap, and before its first token."""
        found: list[TokenLogprobs] = []
        for message in self.sent:
            if isinstance(message, PromptLogprobs) and message.request == request:
                assert message.first_position == len(found) + 1
                assert message.logprobs
                found += message.logprobs
            elif isinstance(message, Tokens | ScoredTokens) and request in dict(message.items):
                break
        every = [each for each in self.sent if isinstance(each, PromptLogprobs) and each.request == request]
        assert sum(len(each.logprobs) for each in every) == len(found), "some came late"
        return found

    def end(self, request: int) -> Finished | Failed | None:
        ends = [each for each in self.sent if isinstance(each, Finished | Failed) and each.request == request]
        assert len(ends) < 2, "a request ended twice"
        return ends[0] if ends else None

    def finished(self, request: int) -> Finished:
        end = self.end(request)
        assert isinstance(end, Finished), end
        return end

    def failed(self, request: int) -> Failed:
        end = self.end(request)
        assert isinstance(end, Failed), end
        return end

    @property
    def starved_steps(self) -> int:
        """As of the last state that was sent."""
        return [message for message in self.sent if isinstance(message, EngineState)][-1].counters.starved_steps

    @property
    def phases(self) -> list[str]:
        states = [message.phase for message in self.sent if isinstance(message, EngineState)]
        return [phase for index, phase in enumerate(states) if index == 0 or states[index - 1] != phase]

    def check_nothing_held(self) -> None:
        """Every block has come back, exactly."""
        self.pool.check()
        usage = self.pool.usage()
        assert (usage.held, usage.quarantined, self.pool.num_tables) == (0, 0, 0)
