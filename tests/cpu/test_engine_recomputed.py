"""What a preemption costs is counted: the tokens whose KV was there before and is computed again, of beams too."""

from __future__ import annotations

from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.ports import Victim
from tests.cpu.engine_rig import Rig
from tests.cpu.test_engine_samples import counters, prompt

WIDTH, LENGTH = 3, 20


def search(rig: Rig) -> None:
    rig.submit(1, prompt(LENGTH), 12, beam=Beam(WIDTH, 1.0, EarlyStopping.NEVER))


def most_tokens(rig: Rig) -> int:
    return max((sequence.num_computed for sequence in rig.engine._scheduler.running), default=0)


def yields(rig: Rig) -> list[int]:
    """The search gives its tables up; of how many tokens each beam had the KV."""
    running = rig.engine._scheduler.running
    computed = [sequence.num_computed for sequence in running]
    rig.session.say(Victim(running[0].table_id))
    return computed


def again(computed: list[int], cached: int) -> int:
    """The prompt once, but for what is found of it, and the tail of each beam."""
    return LENGTH - cached + sum(each - LENGTH for each in computed)


def test_a_search_that_yields_counts_its_prompt_once_and_each_of_its_beams() -> None:
    rig = Rig()
    search(rig)
    while most_tokens(rig) < LENGTH + 5:
        rig.turn()
    computed = yields(rig)
    assert len(computed) == WIDTH
    rig.settle()
    assert rig.finished(1).used.preemptions == 1
    assert counters(rig).recomputed_tokens == again(computed, cached=16)


def test_a_search_that_yields_again_while_it_resumes_counts_that_too() -> None:
    rig = Rig()
    search(rig)
    while most_tokens(rig) < LENGTH + 5:
        rig.turn()
    first = yields(rig)
    rig.turn()
    while len(rig.engine._scheduler.running) < WIDTH:
        rig.turn()
    second = yields(rig)
    rig.settle()
    assert rig.finished(1).used.preemptions == 2
    assert counters(rig).recomputed_tokens == again(second, cached=16) + again(first, cached=16)
