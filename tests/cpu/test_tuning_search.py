"""The search of `pagepool tune`: near the best with a quarter of the runs, and no difference where there is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pagepool_client.tuning.search import LEAST_RUNS, Search
from pagepool_client.tuning.trials import PRIOR_DEVIATION, Point, Trials, student_t
from tests.cpu.tuning_rig import grid, loss, machine, noisy

CASES = 200


def quarter(blocks: int, pools: int, budgets: int, repetitions: int) -> int:
    return blocks * pools * budgets * repetitions // 4


@pytest.mark.parametrize(
    ("sizes", "repetitions", "noise", "least"),
    [
        ((5, 3, 4), 1, 0.01, 0.97),
        ((5, 3, 4), 2, 0.01, 0.99),
        ((5, 3, 4), 2, 0.02, 0.97),
        ((5, 4, 5), 1, 0.02, 0.95),
        ((5, 4, 5), 2, 0.02, 0.97),
        ((4, 2, 3), 2, 0.01, 0.98),
        ((4, 2, 3), 2, 0.02, 0.93),
    ],
)
def test_a_quarter_of_the_sweep_comes_within_5_percent_of_the_best(
    sizes: tuple[int, int, int], repetitions: int, noise: float, least: float
) -> None:
    space, most = grid(*sizes), quarter(*sizes, repetitions)
    near = 0
    for seed in range(CASES):
        truth = machine(space, seed)
        choice = Search(space, most, noisy(truth, noise, seed)).choose()
        assert choice is not None
        assert choice.runs <= most
        near += loss(space, truth, choice.point) <= 0.05
    assert near >= least * CASES, f"{near} of {CASES}"


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.03])
@pytest.mark.parametrize("sizes", [(5, 3, 4), (4, 2, 3)])
def test_where_settings_are_equal_the_default_block_size_stays_and_no_difference_is_claimed(
    noise: float, sizes: tuple[int, int, int]
) -> None:
    space, most = grid(*sizes), quarter(*sizes, 2)
    default = claimed = 0
    for seed in range(CASES):
        search = Search(space, most, noisy(lambda _: 5.0, noise, seed))
        choice = search.choose()
        assert choice is not None
        default += space.setting(choice.point).block_size == 16
        claimed += search.trials.differs(space.start, choice.point)
    assert default >= 0.95 * CASES
    assert claimed <= 0.1 * CASES


def test_without_noise_equal_settings_give_the_default_block_size_the_smallest_pool_and_the_smallest_budget() -> None:
    space = grid()
    choice = Search(space, 30, lambda _: 1.0).choose()
    assert choice is not None
    assert choice.point == (1, 0, 0)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5)),
    st.integers(LEAST_RUNS, 60),
    st.floats(0, 0.3),
    st.integers(0, 10_000),
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4))),
)
def test_it_never_exceeds_its_runs_nor_leaves_the_grid_nor_chooses_a_failed_setting(
    sizes: tuple[int, int, int], most: int, noise: float, seed: int, failing: set[Point]
) -> None:
    space = grid(*sizes)
    run = noisy(machine(space, seed), noise, seed)
    tried: list[Point] = []

    def measure(point: Point) -> float | None:
        tried.append(point)
        return None if point in failing else run(point)

    choice = Search(space, most, measure).choose()
    assert 1 <= len(tried) <= most
    assert set(tried) <= set(space.points)
    assert all(tried.count(point) == 1 for point in failing & set(tried)), "a failure is not repeated"
    if choice is None:
        assert set(tried) <= failing
    else:
        assert choice.point in set(tried) - failing
        assert choice.runs == len(tried)


@given(st.integers(0, 10_000))
def test_a_clear_optimum_is_found_whatever_else_the_machine_is_like(seed: int) -> None:
    space = grid()
    truth = machine(space, seed)
    choice = Search(space, 60, truth).choose()
    assert choice is not None
    assert loss(space, truth, choice.point) <= 0.05


def test_a_setting_that_fails_gives_way_to_those_that_serve() -> None:
    space = grid()
    choice = Search(space, 30, lambda point: None if point[2] == space.start[2] else -0.1 * point[0]).choose()
    assert choice is not None
    assert choice.point[2] != space.start[2]
    assert Search(space, 30, lambda _: None).choose() is None


def test_the_noise_is_the_prior_at_first_and_that_of_the_repeated_runs_later() -> None:
    trials = Trials()
    trials.add((0, 0, 0), 1.0)
    trials.add((0, 0, 1), 9.0)
    assert trials.noise == PRIOR_DEVIATION, "different settings are no noise"
    for number in range(200):
        trials.add((0, 0, 0), 1.0 + (0.1 if number % 2 else -0.1))
    assert trials.noise == pytest.approx(0.1, rel=0.02)
    assert trials.mean((0, 0, 0)) == pytest.approx(1.0)
    assert not trials.differs((0, 0, 0), (0, 0, 0))
    assert trials.differs((0, 0, 0), (0, 0, 1))


def test_a_difference_is_one_only_beyond_its_standard_error_times_t() -> None:
    trials = Trials()
    for point, score in (((0, 0, 0), 0.0), ((0, 0, 1), 0.11)):
        trials.add(point, score)
    bound = student_t(3) * PRIOR_DEVIATION * math.sqrt(2)
    assert bound == pytest.approx(0.0894, rel=0.01)
    assert trials.differs((0, 0, 0), (0, 0, 1))
    trials.add((0, 0, 2), 0.11 - bound + 0.001)
    assert not trials.differs((0, 0, 1), (0, 0, 2))


def test_a_failed_run_takes_its_setting_out() -> None:
    trials = Trials()
    trials.add((0, 0, 0), 1.0)
    trials.add((0, 0, 0), None)
    assert trials.runs((0, 0, 0)) == 0
    assert (0, 0, 0) in trials
    assert trials.best() is None
    assert trials.mean((0, 0, 0)) == -math.inf


@given(st.integers(3, 1000))
def test_students_t_is_what_scipy_says(freedom: int) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)
