"""Prefixes of many blocks, which are matched, held and told many at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from memd.core import prefix
from memd.core.block import MANY_FRAMES, span_of
from memd.core.values import Grant
from pagepool.token_ids import pack
from tests.cpu.prefix_rig import B, Worker, a_pool

LONG = 3 * MANY_FRAMES


def block_by_block(worker: Worker, tokens: Sequence[int]) -> list[int]:
    """The frames that a match is to find: of each block what the index has under its digest."""
    index, found = worker.pool._state.cut_store().index, list[int]()
    blocks = index._blocks
    for start in range(0, (len(tokens) - 1) // B * B, B):
        piece, before = pack(tokens[start : start + B]), found[-1] if found else None
        frame = index.frames.get(index.digest_of(before, piece, b""))
        if frame is None or not index.holds(frame, 0 if before is None else blocks.prefixes[before], piece, b""):
            break
        found.append(frame)
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each digest that is made from now on."""
    made: list[int] = []
    real: Any = prefix.sha256

    def sha256(data: bytes) -> Any:
        made.append(len(data))
        return real(data)

    monkeypatch.setattr(prefix, "sha256", sha256)
    return made


def test_what_one_worker_has_sealed_another_matches_without_making_digests_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = a_pool(4 * LONG)
    first, second = Worker(pool), Worker(pool, "lock 2")
    tokens = list(range(LONG * B))
    computed = first.serve(tokens, release=True)
    made = counted(monkeypatch)
    found = second.create([*tokens, 1], LONG + 1)
    assert found.cached_tokens == LONG * B
    assert list(found.blocks.block_ids[:LONG]) == list(computed.blocks.block_ids)
    assert list(found.blocks.entries[:LONG]) == list(computed.blocks.entries)
    assert len(made) <= 4  # the root's, the first block's, and those of what comes after
    pool.check()


@pytest.mark.parametrize("differs_at", [MANY_FRAMES - 1, MANY_FRAMES, LONG - 1])
def test_a_match_ends_where_the_tokens_differ_however_many_are_looked_at_together(differs_at: int) -> None:
    pool = a_pool(4 * LONG)
    first, second = Worker(pool), Worker(pool, "lock 2")
    tokens = list(range(LONG * B))
    first.serve(tokens)
    tokens[differs_at * B + B - 1] = 7
    assert second.create([*tokens, 1], LONG + 1).cached_tokens == differs_at * B
    pool.check()


@pytest.mark.parametrize("length", [1, 6])
def test_equal_blocks_after_another_prefix_are_not_matched_whatever_is_guessed(length: int) -> None:
    """By then one block is looked at, or so many that they are compared as a slice."""
    pool = a_pool(3 * LONG)
    worker, tail = Worker(pool), [2] * ((LONG - 1) * B)
    long, short = [1] * B + tail, ([3] * B + tail)[: length * B]
    worker.serve(long)
    worker.serve(short)
    index = pool._state.cut_store().index
    there, own = index.match(pack([*long, 9]), b""), index.match(pack([*short, 9]), b"")
    assert (len(there), len(own)) == (LONG, length)
    assert span_of(there[length:]) is not None
    index.expect(own[-1], there[length])
    assert index.match(pack([3] * B + tail), b"") == own


@pytest.mark.parametrize("seed", range(12))
def test_a_match_finds_what_digests_find_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    pool = a_pool(5 * LONG // 2)
    workers = [Worker(pool), Worker(pool, "lock 2")]
    # Of two kinds of blocks, so that equal ones come after different prefixes.
    roots = [[token for _ in range(LONG) for token in [draw.randrange(2)] * B] for _ in range(3)]
    held: list[tuple[Worker, Grant]] = []
    for _ in range(40):
        worker = draw.choice(workers)
        cut = draw.randrange(1, LONG * B)
        tokens = draw.choice(roots)[:cut] + [draw.randrange(1000) for _ in range(draw.choice([0, 1, 3 * B]))]
        if (held and draw.random() < 0.6) or len(held) > 1:
            owner, granted = held.pop(draw.randrange(len(held)))
            owner.step(releases=[granted.table_id])
        expected = block_by_block(worker, tokens)
        assert worker.pool._state.cut_store().index.match(pack(tokens), b"") == expected
        ids = worker.pool._state.cut_store().blocks.ids
        before = [ids[frame] for frame in expected]
        if held and not draw.randrange(3):
            continue
        held.append((worker, worker.serve(tokens)))
        assert list(held[-1][1].blocks.block_ids[: len(expected)]) == before
        pool.check()


@pytest.mark.parametrize("frames", [[], [3], [*range(5, 5 + MANY_FRAMES - 1)], [*range(40, 20, -1)]])
def test_few_frames_or_none_in_a_row_are_no_slice(frames: list[int]) -> None:
    assert span_of(frames) is None


def test_many_frames_in_a_row_are_a_slice() -> None:
    row = list(range(5, 5 + MANY_FRAMES))
    assert span_of(row) == slice(5, 5 + MANY_FRAMES)
    row[3], row[4] = row[4], row[3]
    assert span_of(row) is None
