"""Runs the shapes of the serving path once, so that nothing compiles or is touched for the first time by a request."""

from __future__ import annotations

import time

import structlog

from inferd.core.limits import Limits
from inferd.core.messages import Sampling
from inferd.core.ports import Draining, Grant, KvPool, Lost, Refusal, Step, StepInput, TableRequest
from inferd.sampler import Row
from inferd.surroundings import Model
from pagekernels.layout import Format, pack_entry, slot_mapping, unpack_entry
from pagepool.errors import PagepoolError, Reason
from pagepool.limits import MAX_PRIORITY

ANSWER_TIMEOUT_S = 10.0
SAMPLINGS = (Sampling(temperature=0), Sampling(), Sampling(top_k=2, top_p=0.5, min_p=0.1))

log = structlog.get_logger(__name__)


def warm_up(pool: KvPool, model: Model, limits: Limits, max_context: int, *, fp8: bool = False) -> None:
    """A full prefill, a decode of one sequence and one of as many as may run, and every kind of sampling.

    With `fp8` a block is compressed and decompressed too, if there is room for it.

    Works on a table of its own, of which nothing is committed, so that nothing of it can be matched later. A short
    context or a pool with little room makes it shorter, a full one leaves it out. PagepoolError (UNAVAILABLE) if memd
    goes meanwhile.
    """
    size = pool.info.block_size
    most = min(limits.max_batch_tokens, max_context)
    wanted = min(-(-most // size), pool.info.num_blocks)
    grant = _table(pool, wanted) or _table(pool, 1)
    if grant is None:
        log.warning("no warm-up, since others hold the whole pool")
        return
    length = min(len(grant.entries) * size, most)
    slots = slot_mapping(grant.entries, 0, length, size)
    prefill = StepInput([0] * length, list(range(length)), slots, [length], [length], [grant.entries], [])
    model.launch(prefill, []).tokens()
    for count in (1, limits.max_num_seqs):
        for sampling in SAMPLINGS:
            # All rows read one table; only the first writes, since a negative slot is skipped.
            last = [slots[-1]] + [-1] * (count - 1)
            positions, tables = [length - 1] * count, [grant.entries] * count
            decode = StepInput([0] * count, positions, last, [1] * count, [length] * count, tables, list(range(count)))
            model.launch(decode, [Row(sampling, length)] * count).tokens()
    if fp8 and len(grant.entries) > 1:
        first, other = grant.entries[:2]
        compressed = pack_entry(Format.FP8_E4M3, *unpack_entry(other)[1:])  # of the table's own, so nobody's else
        model.recode([first], [compressed]).errors()
        model.recode([compressed], [first]).errors()
    pool.submit(Step(releases=[grant.table_id]))


def _table(pool: KvPool, num_blocks: int) -> Grant | None:
    """A table that matches nothing; None if memd refuses it."""
    request = TableRequest(ref=0, token_ids=[0], num_blocks=num_blocks, no_match=True, priority=-MAX_PRIORITY)
    pool.submit(Step(creates=[request]))
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        # What ends the session goes first, lest it is lost behind the answer.
        for event in sorted(pool.poll(), key=lambda each: isinstance(each, Grant | Refusal)):
            match event:
                case Grant():
                    return event
                case Refusal():
                    return None
                case Draining():
                    raise PagepoolError(Reason.DRAINING, "memd is stopping", retry_after_s=1.0)
                case Lost(message):
                    raise PagepoolError(Reason.POOL_LOST, message, retry_after_s=1.0)
        pool.wait(left_s)
    raise PagepoolError(Reason.POOL_LOST, f"memd did not answer within {ANSWER_TIMEOUT_S:g} s", retry_after_s=1.0)
