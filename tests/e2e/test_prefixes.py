"""What prompts have in common is computed once, on whatever worker, whenever they come."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.memd.v1 import types_pb2
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, within

PROMPT = [1000 + 7 * at % 5000 for at in range(1000)]
BOUND_S = 20.0

House = tuple[Memd, Worker, Worker]


@pytest.fixture(scope="module")
def house(tiny_model: Path) -> Iterator[House]:
    """Two workers of blocks of 16 tokens, whose prompts of 1,000 tokens take many steps."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    steps = ("--max-batch-tokens", "16", "--max-num-seqs", "8", "--prefix-wait", f"{BOUND_S:g}")
    with household("--pool-bytes", "64MiB", "--block-size", "16", "--heartbeat-timeout", "2s") as (memd, launch):
        one, two = launch("one", *flags, *steps), launch("two", *flags, *steps)
        yield memd, one.ready(), two.ready()


def at_rest(*workers: Worker) -> int:
    """Tokens of prompts that these workers have computed, once their counters stand still for longer than they lag."""
    seen: list[tuple[float, int]] = []
    stubs = [worker.stub() for worker in workers]

    def stands_still() -> bool:
        models = [stub.GetModel(pb.GetModelRequest()) for stub in stubs]
        count = sum(model.counters.prefill_tokens for model in models)
        if not seen or seen[-1][1] != count or any(model.running_requests for model in models):
            seen.append((monotonic(), count))
        return monotonic() - seen[-1][0] > 1.5

    within(30, stands_still)
    return seen[-1][1]


def ask(tokens: list[int], salt: str) -> pb.GenerateRequest:
    return greedy(tokens, 12, ignore_eos=True, cache_salt=salt.encode())


def test_two_prompts_that_part_inside_a_block_share_it_up_to_there(house: House) -> None:
    _, one, two = house
    shared = PROMPT[:40]
    one.generate(ask([*shared, *range(60, 90)], "parts"))
    for worker in (one, two):
        other = [*shared, *range(200 + worker.process.pid % 50, 290)]
        found = worker.generate(ask(other, "parts"))
        alone = one.generate(ask(other, f"alone {worker.name}"))
        assert (found.finished.usage.cached_tokens, alone.finished.usage.cached_tokens) == (40, 0)
        assert found.token_ids == alone.token_ids
    same = two.generate(ask(shared, "parts"))
    assert same.finished.usage.cached_tokens == 39, "all but the last token, whose logits are wanted"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prompt_sent_at_once_is_computed_once(house: House, workers: int) -> None:
    _, one, two = house
    asked = [one, two] if workers == 2 else [one, one]
    before = at_rest(one, two)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(worker.generate, ask(PROMPT, f"once {workers}")) for worker in asked]
        first, second = (run.result() for run in runs)
    none, found = sorted(run.finished.usage.cached_tokens for run in (first, second))
    assert (none, found in {992, 999}) == (0, True), "all full blocks, and if the next one is full by then, its part"
    assert at_rest(one, two) - before == 1000 + 1000 - found
    assert first.token_ids == second.token_ids


def test_what_a_killed_worker_was_to_compute_the_other_computes(house: House) -> None:
    memd, one, dying = house  # the last test of this house
    expected = one.generate(ask(PROMPT, "alone")).token_ids
    call = dying.stub().Generate(ask(PROMPT, "killed"), timeout=60)
    assert next(call).HasField("started")
    within(10, lambda: any(30 < table.num_tokens < 900 for table in the_tables(memd)))
    with ThreadPoolExecutor(1) as pool:
        began = monotonic()
        waiting = pool.submit(one.generate, ask(PROMPT, "killed"))
        dying.kill()
        finished = waiting.result()
    assert monotonic() - began < BOUND_S
    assert finished.token_ids == expected
    assert finished.finished.usage.cached_tokens < 992


def the_tables(memd: Memd) -> list[types_pb2.BlockTable]:
    return list(memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
