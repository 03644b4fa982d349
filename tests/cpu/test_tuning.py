"""`pagepool tune` without daemons: settings, samples, figures, what is printed and drawn, and wrong flags."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1.types_pb2 import Pool, PoolUsage
from pagepool_client.cli.main import parser
from pagepool_client.cli.tune_flags import BUDGETS, checked, grid_of, require_served
from pagepool_client.tuning.figures import METRICS, Figures, Heard, Objective, figures, mean, percentile, score
from pagepool_client.tuning.grid import Setting, pools
from pagepool_client.tuning.plot import svg, text_plot
from pagepool_client.tuning.report import as_json, reasons, table
from pagepool_client.tuning.sample import longest, sample, warm_up
from pagepool_client.workload.format import Piece, WorkloadRequest
from tests.cpu.tuning_rig import grid, ladder, tuned

COMMAND = [sys.executable, "-m", "pagepool_client.cli.main", "tune"]
RUN = Figures(100.0, 0.2, 1.5, 0.01, 0.05, 1.0, 16, 2.0, 64, 1)


def requests(*times: float, output: int = 4) -> list[WorkloadRequest]:
    return [WorkloadRequest(at, (Piece("a", 10),), output) for at in times]


# Settings and samples.


def test_the_search_begins_at_the_defaults_and_the_largest_pool() -> None:
    space = grid()
    assert space.setting(space.start) == Setting(16, 32768 // 16, 512)
    assert next(space.setting(point) for point in space.points) == Setting(8, 8192 // 8, 128)
    assert len(set(space.points)) == 5 * 3 * 4


def test_of_equals_the_default_block_size_is_preferred_then_the_smaller_pool_then_the_smaller_budget() -> None:
    first, *_, last = sorted(grid().points, key=grid().preference)
    assert grid().setting(first) == Setting(16, 8192 // 16, 128)
    assert grid().setting(last) == Setting(128, 32768 // 128, 1024)


def test_pools_are_shares_of_the_largest_that_the_longest_request_fits() -> None:
    assert pools([1, 0.5, 0.25], 10_000, 2000, [16, 128]) == (2500, 5000, 10_000)
    assert pools([1, 0.5, 0.25], 10_000, 2490, [16, 128]) == (5000, 10_000), "2490 take 20 blocks of 128"
    with pytest.raises(
        PagepoolError, match=r"a request of 10,001 tokens, but the largest pool .* has 10,000"
    ) as caught:
        pools([1, 0.5], 10_000, 10_001, [16])
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


def test_a_sample_is_the_workloads_begin_with_its_pattern_pressed_into_the_time() -> None:
    made = requests(10, 11, 14, 100)
    assert [one.at_s for one in sample(made, 3, 2.0)] == [0.0, 0.5, 2.0]
    assert [one.at_s for one in sample(made, 3, None)] == [0.0, 1.0, 4.0]
    assert [one.at_s for one in sample(made, 3, 0.0)] == [0.0, 0.0, 0.0]
    assert [one.at_s for one in sample(requests(7, 7), 9, 5.0)] == [0.0, 0.0]
    assert [(one.at_s, one.output_tokens) for one in warm_up(requests(*range(9), output=50))] == [(0.0, 8)] * 4
    assert longest(requests(1, output=3)) == 13


# Figures.


def heard(due: float, *messages: tuple[float, int], finished: bool = True) -> Heard:
    return Heard(due, list(messages), finished, 5, 2)


def test_figures_of_two_requests() -> None:
    run = figures([heard(10.0, (10.5, 1), (10.7, 2)), heard(11.0, (11.1, 1), (12.0, 1))])
    assert run.throughput == pytest.approx(5 / 2.0)
    assert (run.ttft_p50, run.ttft_p99) == pytest.approx((0.1, 0.5))
    assert (run.itl_p50, run.itl_p99) == pytest.approx((0.1, 0.9)), "two tokens of one message share the wait"
    assert (run.finished, run.cached_tokens, run.preemptions, run.seconds) == (2, 10, 4, 2.0)


def test_where_a_run_is_cut_those_who_still_wait_count_as_long_as_they_waited() -> None:
    run = figures([heard(0.0, (1.0, 1), finished=False), heard(1.0, finished=False)], ended_s=5.0)
    assert run.throughput == pytest.approx(1 / 5)
    assert (run.ttft_p99, run.itl_p50, run.finished) == (4.0, None, 0)
    with pytest.raises(ValueError, match="no token came"):
        figures([heard(0.0, finished=False)], ended_s=5.0)


def test_goodput_counts_requests_that_met_both_bounds() -> None:
    quick, slow = heard(0.0, (0.1, 1), (0.3, 2)), heard(0.0, (0.1, 1), (4.0, 1))
    late, cut = heard(0.0, (3.0, 1)), heard(0.0, (0.1, 1), finished=False)
    run = figures([quick, slow, late, cut], objective=Objective(1.0, 0.1))
    assert run.goodput == pytest.approx(1 / 4.0)
    assert figures([quick, slow], objective=Objective()).goodput == pytest.approx(2 / 4.0)


def test_a_score_rises_with_what_is_better_and_weighs_metrics_equally() -> None:
    def changed(**fields: float | None) -> Figures:
        return Figures(**{**{name: getattr(RUN, name) for name in RUN.__slots__}, **fields})  # type: ignore[arg-type]

    assert score(changed(throughput=200.0), ["throughput"]) == pytest.approx(math.log(200))
    base = score(RUN, ["throughput", "ttft-p99"])
    assert base is not None
    assert score(changed(throughput=200.0, ttft_p99=3.0), ["throughput", "ttft-p99"]) == pytest.approx(base)
    assert score(changed(ttft_p99=0.75), ["throughput", "ttft-p99"]) == pytest.approx(base + math.log(2) / 2)
    assert score(changed(itl_p50=None), ["itl-p50"]) is None
    assert score(changed(goodput=0.0), ["goodput"]) == pytest.approx(math.log(0.5 / 2.0)), "half a request"
    assert mean([RUN, changed(throughput=300.0, itl_p50=None)]).throughput == 200.0
    assert mean([RUN, changed(itl_p50=None)]).itl_p50 == 0.01
    assert all(metric.value(RUN) is not None for metric in METRICS.values())


@given(st.lists(st.floats(0, 1e3), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_enough_others_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9
    assert sum(value < found for value in values) < percent / 100 * len(values)


# What is printed and drawn.


def test_the_table_says_what_differs_what_does_not_and_what_failed() -> None:
    space = grid(3, 1, 1)
    slow, broken = (2, 0, 0), (0, 0, 0)
    result = tuned(space, lambda point: None if point == broken else 50.0 if point == slow else 100.0, 10)
    heading, *rows = table(result)
    assert heading.split()[:6] == ["block", "blocks", "budget", "runs", "tokens/s", "first"]
    assert rows[0].endswith("failed: memd has ended with signal 9: it said nothing")
    assert "100.0" in rows[1]
    assert rows[1].endswith("  recommended")
    assert rows[2].endswith("  -50 %")
    words = "\n".join(reasons(result))
    assert "--block-size 16: 8: failed, 32: -50 %" in words
    assert "1 setting failed" in words
    assert "where trying every setting would take 6" in words


def test_a_difference_within_the_noise_is_called_none() -> None:
    result = tuned(grid(3, 1, 1), ladder(100.0, 104.0, 98.0, 103.0, 97.0), 10)
    assert result.grid.setting(result.choice.point).block_size == 16
    assert all(row.endswith(("  none", "  recommended")) for row in table(result)[1:])
    assert "of equals, nearest to what practitioners advise" in "\n".join(reasons(result))
    assert result.least_difference > 0.03


def test_a_value_that_ran_with_other_flags_only_is_shown_with_a_star() -> None:
    result = tuned(grid(2, 2, 1), ladder(100.0), 5)
    chosen = result.grid.setting(result.choice.point)
    assert (chosen.block_size, chosen.num_blocks) == (16, 16384 // 16)
    assert (0, 0, 0) not in result.points, "8 ran with the largest pool only"
    words = "\n".join([*reasons(result), *text_plot(result, 80)])
    assert "--block-size 16: 8: none*" in words
    assert "--max-num-blocks 1024: 2,048: none" in words
    assert "* ran with other values of the other flags only" in words


def test_json_has_every_run_and_is_json() -> None:
    result = tuned(grid(2, 1, 1), lambda point: None if point[0] == 0 else 100.0, 6)
    told = json.loads(json.dumps(as_json(result)))
    assert told["recommended"] == {"block_size": 16, "num_blocks": 2048, "batch_tokens": 128}
    failed, served = told["settings"]
    assert failed["runs"] == [{"trouble": "memd has ended with signal 9: it said nothing"}]
    assert (failed["difference"], failed["within_noise"]) == (None, None)
    assert served["runs"][0]["throughput"] == 100.0
    assert (served["difference"], served["within_noise"]) == (0.0, True)
    assert (told["exhaustive_runs"], told["metrics"]) == (4, ["throughput"])
    assert told["runs"] == sum(len(one["runs"]) for one in told["settings"])


@pytest.mark.parametrize("factor", [1.0, 1.02, 3.0, 1e6])
def test_the_plots_show_each_value_beside_the_recommended_one(factor: float) -> None:
    result = tuned(grid(), lambda point: 100.0 * factor ** -abs(point[0] - 3) if point[0] else None, 30)
    lines = text_plot(result, 80)
    assert max(map(len, lines)) <= 100
    assert sum("◆" in line for line in lines) == 3, "once for each flag"
    assert [line.split()[0] for line in lines if line.startswith("--")] == [
        "--block-size",
        "--max-num-blocks",
        "--max-batch-tokens",
    ]
    drawing = ET.fromstring(svg(result, "a <b> & c"))
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "a <b> & c: score, of the recommended"
    assert {"8", "16", "32", "64", "128"} <= set(words)
    assert "failed" in words
    for circle in drawing.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.get("cy", "-1")) <= 300


# Flags.


def wanted(*words: str, workload: str = "w.jsonl") -> object:
    return checked(parser().parse_args(["tune", "--workload", workload, *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-sizes", "16,24"], "--block-sizes is 24, but must be a power of two from 8 to 128"),
        (["--block-sizes", "x"], "--block-sizes is x, but must be numbers with commas between them"),
        (["--block-sizes", ""], "--block-sizes is "),
        (["--pool-shares", "0"], "--pool-shares is 0.0, but must be from 0.001 to 1"),
        (["--pool-shares", "nan"], "--pool-shares is nan"),
        (["--batch-tokens", "0"], "--batch-tokens is 0, but must be from 1 to"),
        (["--requests", "0"], "--requests is 0"),
        (["--repetitions", "101"], "--repetitions is 101"),
        (["--within", "soon"], "--within is soon, but must be own, or from 0 to 86400 seconds"),
        (["--within", "-1"], "--within is -1"),
        (["--cut", "0"], "--cut is 0.0"),
        (["--patience", "-1"], "--patience is -1.0, but must be from 0.001 to 86400"),
        (["--slo-first", "inf"], "--slo-first is inf"),
        (["--metric", "goodput"], "--metric is goodput, but must be given with --slo-first or --slo-next"),
        (
            ["--plot", "x.png"],
            "--plot is x.png, but must be a file in an existing folder, with a name that ends in .svg",
        ),
        (["--plot", "no/such/x.svg"], "--plot is no/such/x.svg"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(PagepoolError) as caught:
        wanted(*words)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.message.startswith(message)


def test_a_bad_workload_is_refused_by_its_line_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"at": 0, "prompt": [["a", 1]], "output_tokens": 1}\n{"at": 1}\n')
    done = subprocess.run([*COMMAND, "--workload", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}:2: prompt is missing" in done.stderr


def test_the_grid_follows_the_device_and_the_size_of_the_model() -> None:
    options = checked(parser().parse_args(["tune", "--workload", "w"]))
    usage = PoolUsage(total_blocks=1000)
    small = Pool(device="host", block_size=16, block_bytes=16 * 1024, usage=usage)
    assert grid_of(options, small, 100).batch_tokens == BUDGETS["cpu"]
    assert grid_of(options, small, 100).pool_tokens == (4000, 8000, 16_000)
    large = Pool(device="cuda:0", block_size=16, block_bytes=16 * (320 << 10), usage=usage)
    space = grid_of(options, large, 100)
    assert (space.batch_tokens, space.setting(space.start).block_size) == (BUDGETS["gpu"], 8)
    assert options.runs(space) == 5 * 3 * 5 * 2


def test_what_the_model_cannot_serve_or_nobody_can_measure_is_refused_by_name() -> None:
    options = checked(parser().parse_args(["tune", "--workload", "w", "--metric", "itl-p99", "--metric", "ttft-p50"]))
    assert options.metrics == ("itl-p99", "ttft-p50")
    with pytest.raises(PagepoolError, match=r"--workload is with a request of 14, .* at most 13 tokens"):
        require_served(options, requests(0, output=4), 13)
    with pytest.raises(PagepoolError, match=r"--metric is itl-p99, .* every answer of the workload has one token"):
        require_served(options, requests(0, output=1), 13)
    require_served(options, requests(0, 1, output=2), 13)
    assert checked(parser().parse_args(["tune", "--workload", "w", "--slo-next", "0.1"])).metrics == ("goodput",)
