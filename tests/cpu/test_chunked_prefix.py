"""Prompts that the pool has in part: the rest is prefilled in chunks; with --no-enable-chunked-prefix all of it is."""

from __future__ import annotations

import pytest

from inferd.core.limits import Limits
from tests.cpu.engine_rig import Rig

B = 8
PROMPT = [(5 * index) % 199 for index in range(60)]
"""Seven full blocks and a part of one."""


def rig_with(*, chunked_prefix: bool) -> Rig:
    """Steps of 16 tokens."""
    return Rig(limits=Limits(max_batch_tokens=16, max_num_seqs=4, chunked_prefix=chunked_prefix))


def chunks(rig: Rig, request: int, prompt: list[int]) -> list[tuple[int, int]]:
    """Serves a prompt alone; position of the first token and number of tokens of each step's prefill."""
    steps = []
    launch = rig.model.launch

    def noting(step, *rest):  # type: ignore[no-untyped-def]
        if len(step.token_ids) > 1:
            steps.append((step.positions[0], len(step.token_ids)))
        return launch(step, *rest)

    rig.model.launch = noting
    rig.submit(request, prompt, most=9)
    rig.settle()
    rig.model.launch = launch
    return steps


def test_what_is_left_of_a_reused_prompt_is_prefilled_in_chunks() -> None:
    rig = rig_with(chunked_prefix=True)
    rig.settle()
    assert chunks(rig, 1, PROMPT) == [(0, 16), (16, 16), (32, 16), (48, 12)]
    longer = [*PROMPT, *rig.generated(1), *range(40)]
    steps = chunks(rig, 2, longer)
    cached = rig.finished(2).used.cached_tokens
    assert cached >= 64, "its answer's blocks are reused too"
    assert [count for _, count in steps] == [16] * ((len(longer) - cached) // 16) + [(len(longer) - cached) % 16]
    assert steps[0][0] == cached
    rig.check_nothing_held()


@pytest.mark.parametrize("chunked_prefix", [True, False])
def test_without_it_every_prompt_is_computed_whole_with_the_same_tokens(chunked_prefix: bool) -> None:
    rig = rig_with(chunked_prefix=chunked_prefix)
    rig.settle()
    whole = chunks(rig, 1, PROMPT)
    again = chunks(rig, 2, PROMPT)
    assert rig.generated(1) == rig.generated(2)
    assert rig.finished(2).used.cached_tokens == (56 if chunked_prefix else 0)
    assert (again == whole) is not chunked_prefix
    assert rig.pool.counters.prefix_hit_tokens == (56 if chunked_prefix else 0)
    rig.check_nothing_held()
