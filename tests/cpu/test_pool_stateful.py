"""Random command sequences against a naive model of the pool, with check() after each; and planted bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from memd.core.errors import InvariantError
from memd.core.pool import Pool
from memd.core.values import Commit, Step, TableRequest
from tests.cpu.pool_bugs import (
    believes_the_last_pin_alone,
    drops_what_was_never_written,
    ends_a_pin_with_its_last_block,
    evicts_the_newest,
    evicts_what_it_matched,
    forgets_a_share,
    forks_without_counting,
    frees_a_block_twice,
    frees_a_unit_twice,
    gives_a_lost_reserve_away,
    gives_away_what_a_lost_worker_can_write,
    keeps_heads_less_than_tails,
    leaks_a_share,
    lets_a_shared_block_be_written,
    matches_the_last_token,
    releases_heads_first,
    truncates_in_place,
    unpins_what_others_keep,
    uses_a_reserved_block_twice,
)
from tests.cpu.pool_bugs_prefixes import (
    copies_from_another_prefix,
    keeps_a_source_for_good,
    keeps_the_promises_of_the_dead,
    lets_a_source_go_at_once,
    waits_for_the_last_token,
    wakes_nobody_at_the_end,
)
from tests.cpu.pool_bugs_remaps import (
    gives_a_moved_block_away_at_once,
    moves_blocks_of_who_does_not_listen,
)
from tests.cpu.pool_bugs_waiting import (
    forgets_the_tokens_to_come,
    grants_what_others_claim,
    has_tables_yield_for_what_was_found,
    holds_blocks_back_that_clients_have,
    lets_the_suspended_keep_a_block,
    names_a_table_however_often_it_has_yielded,
    names_nobody_where_all_is_shared,
    tells_no_victim_after_a_repeated_answer,
    tells_nobody_that_there_are_blocks,
    tells_nobody_what_went_down_with_a_stream,
)
from tests.cpu.pool_machine import PoolMachine
from tests.cpu.pool_model_values import GEOMETRY, SIZE, TIMEOUT
from tests.cpu.pool_rules_clients import ClientRules
from tests.cpu.pool_rules_leases import LeaseRules
from tests.cpu.pool_rules_operations import OperationRules
from tests.cpu.pool_rules_pins import PinRules
from tests.cpu.pool_rules_prefixes import PrefixRules
from tests.cpu.pool_rules_remaps import RemapRules
from tests.cpu.pool_rules_waiting import UrgentRules, WaitingRules
from tests.cpu.pool_rules_workers import WorkerRules


class WorkersCommands(LeaseRules, WorkerRules, OperationRules):
    """What workers do with tables and with their reserve. A hunt has few commands, so that much of each meets."""


class SharedCommands(WorkersCommands, ClientRules):
    """Beside clients."""


class PinCommands(LeaseRules, WorkerRules, PinRules):
    """Beside pins."""


class PrefixCommands(WorkersCommands, PrefixRules):
    """With copies of what matches in part, and waits for what others compute."""


class RemapCommands(WorkersCommands, RemapRules):
    """While blocks move."""


class WaitingCommands(WorkersCommands, WaitingRules):
    """Where blocks are short."""


class UrgentCommands(LeaseRules, WorkerRules, UrgentRules):
    """And priorities meet."""


class ApartCommands(LeaseRules, WorkerRules, ClientRules, WaitingRules):
    """And clients have some."""


class PoolCommands(
    LeaseRules, ClientRules, PinRules, WorkerRules, OperationRules, PrefixRules, RemapRules, WaitingRules, UrgentRules
):
    """Every command of the pool."""


SUITE = settings(
    max_examples=500,
    stateful_step_count=30,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
HUNT = settings(
    SUITE, max_examples=1000, stateful_step_count=40, phases=[Phase.generate], derandomize=True, print_blob=False
)


def test_500_random_command_sequences_keep_the_invariant_and_agree_with_the_model() -> None:
    run_state_machine_as_test(PoolCommands, settings=SUITE)


BUGS: list[tuple[type[PoolMachine], list[Callable[[pytest.MonkeyPatch], None]]]] = [
    (
        WorkersCommands,
        [
            forks_without_counting,
            truncates_in_place,
            drops_what_was_never_written,
            uses_a_reserved_block_twice,
            lets_a_shared_block_be_written,
            gives_a_lost_reserve_away,
            releases_heads_first,
            matches_the_last_token,
            evicts_what_it_matched,
            gives_away_what_a_lost_worker_can_write,
        ],
    ),
    (SharedCommands, [leaks_a_share, forgets_a_share, frees_a_block_twice, frees_a_unit_twice, evicts_the_newest]),
    (
        PinCommands,
        [
            believes_the_last_pin_alone,
            unpins_what_others_keep,
            keeps_heads_less_than_tails,
            ends_a_pin_with_its_last_block,
        ],
    ),
    (
        PrefixCommands,
        [
            lets_a_source_go_at_once,
            keeps_a_source_for_good,
            copies_from_another_prefix,
            keeps_the_promises_of_the_dead,
            waits_for_the_last_token,
            wakes_nobody_at_the_end,
        ],
    ),
    (RemapCommands, [gives_a_moved_block_away_at_once, moves_blocks_of_who_does_not_listen]),
    (
        WaitingCommands,
        [
            lets_the_suspended_keep_a_block,
            forgets_the_tokens_to_come,
            grants_what_others_claim,
            tells_nobody_that_there_are_blocks,
            tells_no_victim_after_a_repeated_answer,
            names_nobody_where_all_is_shared,
            names_a_table_however_often_it_has_yielded,
        ],
    ),
    (UrgentCommands, [has_tables_yield_for_what_was_found, tells_nobody_what_went_down_with_a_stream]),
    (ApartCommands, [holds_blocks_back_that_clients_have]),
]


def test_the_hunt_finds_nothing_in_the_pool_as_it_is() -> None:
    run_state_machine_as_test(PoolCommands, settings=settings(HUNT, max_examples=20))


@pytest.mark.parametrize(("commands", "plant"), [(commands, plant) for commands, plants in BUGS for plant in plants])
def test_random_command_sequences_find_a_planted_bug(
    commands: type[PoolMachine], plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantError, AssertionError)):
        run_state_machine_as_test(commands, settings=HUNT)


@pytest.mark.parametrize("plant", [leaks_a_share, forgets_a_share, frees_a_block_twice])
def test_check_alone_finds_a_wrong_reference_count(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the model's help, in a sequence that shares a block and releases it on one side."""

    def play() -> None:
        pool = Pool(7, SIZE, 1 << 30, 8)
        pool.declare(GEOMETRY)
        worker = pool.attach("worker", "lock", TIMEOUT, 0.0).lease.lease_id
        prompt = [1] * (2 * SIZE)
        first, *_ = pool.step(worker, Step(1, creates=[TableRequest(prompt, 3)]), 0.0).grants
        pool.step(worker, Step(2, commits=[Commit(first.table_id, prompt)]), 0.0)
        second, *_ = pool.step(worker, Step(3, creates=[TableRequest([*prompt, 1], 3)]), 0.0).grants
        assert second.cached_tokens == len(prompt)
        pool.check()
        pool.step(worker, Step(4, releases=[second.table_id]), 0.0)
        pool.check()

    play()
    plant(monkeypatch)
    with pytest.raises(InvariantError):
        play()
